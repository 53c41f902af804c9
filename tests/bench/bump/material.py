"""What the tools are given: the series as chosen for the pin ``current``, and releases to bring it to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
from neaptide import edits as planner
from neaptide.model import Condition, Edit, Patch
from neaptide.operations import splices
from neaptide.outcomes import EditOutcome, Plan
from neaptide.pins import DEFAULT_PIN, TargetPin
from neaptide.plan import keyed_edits
from neaptide.rebase.planning import Library, Planned, files_of, plan_on
from neaptide.series import load_series

NEVER = Condition(version=">=999999")
Texts = tuple[str, ...]
Made = dict[tuple[str, str], Texts]


@dataclass(frozen=True)
class Wanted:
    """One edit of the series at the pin.

    Attributes:
        patch, edit, key: whose it is, with names filled in, and its key in outcomes.
        texts: what it writes at the pin, one a splice; of a ``delete`` what it takes away.
    """

    patch: str
    edit: Edit
    key: str
    texts: Texts

    @property
    def made_as(self) -> tuple[str, str]:
        return self.patch, repr(self.edit)


@dataclass(frozen=True)
class Series:
    """The series of one target on the pin's own files.

    Attributes:
        states: touched files as upstream has them, then as they are after each patch.
    """

    target: str
    pin: TargetPin
    patches: list[Patch]
    planned: Planned
    wanted: list[Wanted]
    states: list[dict[str, bytes]]


def load(library: Library, target: str, pin: TargetPin) -> Series:
    """The series for the versions of the pin, whatever the release: no patch is retired or superseded."""
    patches = [
        msgspec.structs.replace(
            p, header=msgspec.structs.replace(p.header, retire_when=NEVER, superseded_when=None)
        )
        for p in load_series(library.root, target)
    ]  # fmt: skip
    with recorded() as made:
        planned = plan_on(library, target, pin, patches, DEFAULT_PIN)
    wanted = [
        Wanted(patch.name, edit, key, made[patch.name, repr(edit)])
        for patch in patches
        for key, edit in keyed_edits(patch, pin.version, pin.names)
    ]
    return Series(target, pin, patches, planned, wanted, states_of(planned.plan))


def states_of(plan: Plan) -> list[dict[str, bytes]]:
    """Files that the series touches: before it, and after each patch."""
    before = {path: plan.subject.read(path) for path in plan.files}
    states = [{path: data for path, data in before.items() if data is not None}]
    for patch in plan.patches:
        states.append({**states[-1], **patch.files})
    return states


@contextmanager
def recorded() -> Iterator[Made]:
    """What each edit writes while a series is planned, by patch and edit; the last splices of an edit count."""
    made: Made = {}

    def record(edit: Edit, source: Any, symbol: Any, matches: Any, folder: Path) -> Any:
        found = splices(edit, source, symbol, matches, folder)
        gone = edit.operation == "delete"
        made[folder.name, repr(edit)] = tuple(source.text[s.start : s.end] if gone else s.text for s in found)
        return found

    with mock.patch.object(planner, "splices", record):
        yield made


def release_files(library: Library, series: Series, release: TargetPin) -> Mapping[str, bytes]:
    """Modules of a release; kept by the library, so that planning on them reads nothing again."""
    return library.files(series.target, as_pinned(series, release), files_of(series.patches)).files


def as_pinned(series: Series, release: TargetPin) -> TargetPin:
    """The release under the pin's version, by which eras are chosen."""
    return msgspec.structs.replace(release, version=series.pin.version)


def outcomes_of(series: Series, plan: Plan) -> list[EditOutcome]:
    """Outcomes of the edits in the order of ``series.wanted``, without overlays, requirements and names."""
    found = {(o.patch, o.key): o for o in plan.outcomes}
    return [found[w.patch, w.key] for w in series.wanted]
