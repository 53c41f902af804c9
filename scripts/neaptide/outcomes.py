"""Typed outcomes of planning: what became of each edit, each patch and the whole series."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from neaptide.errors import ExitCode
from neaptide.model import Patch

Reader = Callable[[str], bytes | None]


class Status(StrEnum):
    """Outcome of an edit; a patch takes the worst of its edits'."""

    CLEAN = "clean"
    MOVED = "moved"
    DRIFT = "drift"
    UNMET = "unmet"
    CONFLICT = "conflict"
    RETIRED = "retired"
    SUPERSEDED = "superseded"
    NOT_APPLICABLE = "not-applicable"


IN_FORCE = (Status.CLEAN, Status.MOVED, Status.DRIFT)
WORST_LAST = [Status.CLEAN, Status.MOVED, Status.DRIFT, Status.UNMET, Status.CONFLICT]


@dataclass(frozen=True)
class Guards:
    """Recorded guards of one edit; ``site`` is empty where the edit has no pristine site."""

    symbol: str
    site: str


@dataclass(frozen=True)
class EditOutcome:
    """What became of one edit (or overlay file), with what a reader needs to judge it."""

    patch: str
    key: str
    file: str
    symbol: str
    status: Status
    detail: str = ""
    guards: Guards | None = None
    upstream_change: str = ""


@dataclass(frozen=True)
class PatchPlan:
    """One patch: its outcome and the files as they are after it (only those it changes)."""

    patch: Patch
    status: Status
    outcomes: tuple[EditOutcome, ...]
    files: Mapping[str, bytes]
    detail: str = ""


@dataclass(frozen=True)
class Subject:
    """The tree that is planned against.

    Attributes:
        target: ``vllm`` or ``b12x``.
        version: the upstream version that era specifiers are compared with.
        names: what ``{pkg}`` and ``{PREFIX}`` stand for.
        read: pristine bytes of a file, by its path inside the package.
        original: the pin's own bytes of a file, for showing what upstream changed.
        guards: recorded guards by patch and edit key; None records instead of comparing.
        unpinned: no pin is of this version, so an edit may have no recorded guard: then somebody must read it.
    """

    target: str
    version: str
    names: Mapping[str, str]
    read: Reader
    original: Reader = lambda path: None
    guards: Mapping[str, Mapping[str, Guards]] | None = None
    unpinned: bool = False


@dataclass(frozen=True)
class Plan:
    """The planned series."""

    subject: Subject
    patches: tuple[PatchPlan, ...]

    @property
    def outcomes(self) -> list[EditOutcome]:
        return [o for p in self.patches for o in p.outcomes]

    @property
    def files(self) -> dict[str, bytes]:
        """Every touched file as it is after the whole series."""
        return {path: data for p in self.patches for path, data in p.files.items()}

    def with_status(self, status: Status) -> list[PatchPlan]:
        return [p for p in self.patches if p.status is status]

    def exit_code(self, accepted: frozenset[tuple[str, str, str]] = frozenset()) -> ExitCode:
        """``accepted`` holds (patch, edit key, site guard) of drift somebody has read."""
        if self.with_status(Status.CONFLICT):
            return ExitCode.CONFLICT
        if self.with_status(Status.UNMET):
            return ExitCode.UNVERIFIED
        if self.open_drift(accepted):
            return ExitCode.DRIFT
        return ExitCode.DONE

    def open_drift(self, accepted: frozenset[tuple[str, str, str]]) -> list[EditOutcome]:
        return [o for o in self.outcomes if o.status is Status.DRIFT and drift_key(o) not in accepted]


def drift_key(outcome: EditOutcome) -> tuple[str, str, str]:
    guards = outcome.guards
    return outcome.patch, outcome.key, (guards.site or guards.symbol) if guards else ""
