"""What a series can be applied to, and the record that each target keeps of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from neaptide import __version__, jsonfile
from neaptide.outcomes import IN_FORCE, Plan, Reader, drift_key

LOCK_NAME = "neaptide.lock.json"
Accepted = frozenset[tuple[str, str, str]]


class State(StrEnum):
    """What is on disk at a target."""

    ABSENT = "absent"
    PRISTINE = "pristine"
    APPLIED = "applied"
    MODIFIED = "modified"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class Record:
    """``neaptide.lock.json``: what was applied to a target, and on what.

    Attributes:
        base, result: identity of the tree before and after, ``commit`` and ``tree`` for git
            places; empty for an installed distribution, where ``files`` says it all.
        patches: id, digest, status and (git) commit of each patch, in order.
        files: sha256 before (None: absent) and after, by path inside the package.
        accepted: drift that somebody has read, as (patch, edit key, site guard).
    """

    pin: str
    target: str
    artefact: Mapping[str, str]
    base: Mapping[str, str]
    result: Mapping[str, str]
    patches: Sequence[Mapping[str, str]]
    files: Mapping[str, Mapping[str, str | None]]
    accepted: Accepted
    tool_version: str = __version__

    def as_dict(self) -> dict[str, Any]:
        return {
            "accepted_drift": [{"edit": e, "patch": p, "site_guard": g} for p, e, g in sorted(self.accepted)],
            "artefact": dict(self.artefact),
            "base": dict(self.base),
            "files": {k: dict(v) for k, v in self.files.items()},
            "patches": [dict(p) for p in self.patches],
            "pin": self.pin,
            "result": dict(self.result),
            "schema_version": 1,
            "target": self.target,
            "tool_version": self.tool_version,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Record:
        return cls(
            pin=str(data["pin"]),
            target=str(data["target"]),
            artefact=dict(data["artefact"]),
            base=dict(data["base"]),
            result=dict(data["result"]),
            patches=[{"id": p["id"], "digest": p["digest"], **p} for p in data["patches"]],
            files={path: {"after": f["after"], "before": f["before"]} for path, f in data["files"].items()},
            accepted=frozenset((d["patch"], d["edit"], d["site_guard"]) for d in data["accepted_drift"]),
            tool_version=str(data["tool_version"]),
        )


def load_record(path: Path) -> Record | None:
    return jsonfile.read(path, Record.from_dict) if path.is_file() else None


def listed(names: Sequence[str], most: int = 5) -> str:
    """Names for people; of many the first."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def bytes_of(file: Path) -> bytes | None:
    """The bytes of a file; None where there is none."""
    return file.read_bytes() if file.is_file() else None


def sha256(data: bytes | None) -> str | None:
    return None if data is None else hashlib.sha256(data).hexdigest()


def file_hashes(plan: Plan) -> dict[str, dict[str, str | None]]:
    return {
        path: {"after": sha256(data), "before": sha256(plan.subject.read(path))}
        for path, data in sorted(plan.files.items())
    }


def patch_rows(plan: Plan) -> list[dict[str, str]]:
    return [{"digest": p.patch.digest, "id": p.patch.id, "status": p.status.value} for p in plan.patches]


def unlocked_patches(record: Record, locked: Mapping[str, str]) -> list[str]:
    """Where the patches of a record that are in force are not a lock's, which has digests by patch: a line each."""
    own = {row["id"].split("/")[-1]: row["digest"] for row in record.patches if row.get("status") in IN_FORCE}
    found = [f"{name} is not applied" for name in locked if name not in own]
    return found + [f"{name} is another than the lock's" for name, digest in own.items() if locked.get(name) != digest]


def accepted_in(plan: Plan, patches: Sequence[str], known: Accepted) -> Accepted:
    """Drift that is accepted: of ``plan``, named now by patch or remembered; of patches not in it, as remembered."""
    drift = {drift_key(o) for o in plan.outcomes if o.status == "drift"}
    planned = {p.patch.name for p in plan.patches}
    kept = {d for d in known if d[0] not in planned}
    return frozenset(kept | {d for d in drift if d in known or d[0] in patches})


class Place(Protocol):
    """A tree that a series is applied to; ``label`` names it in messages."""

    target: str
    label: str

    def lock(self) -> AbstractContextManager[None]: ...
    def require_clean(self) -> None: ...
    def reader(self) -> Reader: ...
    def state(self) -> State: ...
    def altered(self) -> list[str]: ...
    def recover(self) -> str: ...
    def record(self) -> Record | None: ...
    def accepted(self) -> Accepted: ...
    def read(self, path: str) -> bytes | None: ...
    def modules(self) -> dict[str, bytes]: ...
    def precheck(self, plan: Plan) -> None: ...
    def write(self, plan: Plan, accepted: Accepted) -> bool: ...
    def undo_point(self) -> Callable[[], None]: ...
    def revert(self) -> bool: ...
    def package_parent(self) -> Path: ...


def described(place: Place) -> str:
    """The state of a place, and of a modified one the files that make it so."""
    state = place.state()
    names = place.altered() if state is State.MODIFIED else []
    return f"{state.value} ({listed(names)})" if names else state.value
