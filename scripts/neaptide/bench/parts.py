"""Cases of a part of vLLM, run in child processes: what the indexer's and the workspace's benches share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from neaptide.bench.engine import Bench, Variant
from neaptide.errors import NeaptideError

CHILD = Path(__file__).with_name("part_child")


class Case(Protocol):
    """A named thing to try."""

    @property
    def name(self) -> str: ...

    def as_dict(self) -> dict[str, Any]: ...


C = TypeVar("C", bound=Case)


def chosen_cases(known: Mapping[str, C], names: Sequence[str], where: str) -> list[C]:
    """Cases by name; all of them for none."""
    unknown = [n for n in names if n not in known]
    if unknown:
        raise NeaptideError(
            f"no case {unknown[0]!r}", wanted=f"one of {', '.join(known)}", todo="Check the spelling.", where=where
        )
    return [known[n] for n in names] or list(known.values())


def run_child(
    bench: Bench,
    variant: Variant,
    cases: Sequence[Case],
    more: Mapping[str, Any] = MappingProxyType({}),
    unset: Sequence[str] = (),
    environment: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Rows of all cases from one child process; what it had written when it failed, and why.

    Args:
        more: what the spec has beside the cases.
        unset, environment: as :meth:`Bench.child` takes them.
    """
    spec = {"cases": [c.as_dict() for c in cases], **more}
    result, said = bench.child(CHILD, spec, variant, unset=unset, environment=environment)
    found = result or {"rows": []}
    written = {row["case"] for row in found["rows"]}
    found["rows"] += [{"case": c.name, "outcome": "failed", "error": said} for c in cases if c.name not in written]
    return found


def add_rows(result: dict[str, Any], found: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], bench: Bench) -> None:
    """Take up named rows, and device and versions if the child came so far as to write them."""
    for row in rows:
        result["rows"].append(row)
        bench.progress.note(f"{row['case']} {row['variant']}: {row['outcome']} {row.get('error', '')}".rstrip())
    result |= {key: found[key] for key in ("versions", "device") if key in found}
