"""What a rebase has found and accepted so far, so that the next run goes on from there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from neaptide import jsonfile
from neaptide.disk import write_bytes
from neaptide.outcomes import Plan, Status
from neaptide.places import Accepted


@dataclass(frozen=True)
class Progressed:
    """A file ``state.json`` of a rebase.

    Attributes:
        artefact: sha256 or commit that it is about.
        accepted: drift that somebody has read: patch, edit key, guard.
        outcomes: status by ``PATCH EDIT-KEY`` of the last run.
    """

    artefact: str
    accepted: Accepted = frozenset()
    outcomes: Mapping[str, str] = field(default_factory=dict)


def load(path: Path, artefact: str) -> Progressed:
    """The state of an earlier run on the same artefact, or a new one."""
    if not path.is_file():
        return Progressed(artefact)
    found = jsonfile.read(path, _from)
    return found if found.artefact == artefact else Progressed(artefact)


def _from(data: Mapping[str, Any]) -> Progressed:
    accepted = frozenset((str(a), str(b), str(c)) for a, b, c in data["accepted"])
    return Progressed(str(data["artefact"]), accepted, dict(data["outcomes"]))


def save(path: Path, artefact: str, accepted: Accepted, plan: Plan) -> None:
    data = {"accepted": sorted(accepted), "artefact": artefact, "outcomes": _outcomes(plan), "schema_version": 1}
    write_bytes(path, jsonfile.encode(data))


def _outcomes(plan: Plan) -> dict[str, str]:
    """Status by patch and key of what is not clean."""
    return {f"{o.patch} {o.key}": o.status.value for o in plan.outcomes if o.status is not Status.CLEAN}


def since(before: Progressed, plan: Plan) -> str:
    """How many edits are better and worse than in the last run; nothing without one."""
    if not before.outcomes:
        return ""
    now = _outcomes(plan)
    settled = [key for key in before.outcomes if key not in now]
    fresh = [key for key in now if key not in before.outcomes]
    return f"since the last run: {len(settled)} settled, {len(fresh)} new, {len(now)} to read in all"
