"""One release: every tool's edits by verdict, as rows of the result."""

from __future__ import annotations

import gc
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from baselines import TOOLS, Brought, Workshop
from material import Made, Series, Wanted, as_pinned, load, outcomes_of, recorded, release_files, states_of
from neaptide.model import Edit
from neaptide.outcomes import EditOutcome, Status
from neaptide.output import Progress
from neaptide.pins import DEFAULT_PIN, TargetPin, load_pin
from neaptide.rebase.describe import todo
from neaptide.rebase.planning import Library, Planned, plan_on
from referee import Reading, Verdict, grown, judge, scope_of

NEAPTIDE = "neaptide"
Row = dict[str, Any]
Growth = tuple[tuple[int, int], ...]
APPLIED = (Status.CLEAN, Status.MOVED)
NO_FILE, NO_SYMBOL = "no such file", "no such symbol"


class Bench:
    """The series of one target, exported once, brought to releases one by one."""

    def __init__(self, library: Library, series: Series, folder: Path) -> None:
        self.library, self.series = library, series
        self.position = {patch.name: i for i, patch in enumerate(series.patches)}
        self.shop = Workshop(folder, series.pin.package, series.planned.plan)
        self.reference = self._reference()

    def _reference(self) -> list[Growth]:
        """How the texts of each edit grow on the pin's own files; there every edit must be right."""
        pair = self._readings(self.series.states)
        out: list[Growth] = []
        for wanted in self.series.wanted:
            before, after = pair(wanted)
            growth = tuple(grown(scope_of(wanted.edit), text, before, after) for text in wanted.texts)
            assert all(inside for inside, _ in growth), f"no trace of {wanted.patch} {wanted.key} at the pin"
            assert judge(wanted.edit, wanted.texts, growth, before, after) is Verdict.RIGHT, wanted.key
            out.append(growth)
        return out

    def _readings(self, states: Sequence[Mapping[str, bytes]]) -> Callable[[Wanted], tuple[Reading, Reading]]:
        """The file of an edit just before and just after its patch."""

        def pair(wanted: Wanted) -> tuple[Reading, Reading]:
            at, file = self.position[wanted.patch], wanted.edit.file
            return _read(states[at].get(file)), _read(states[at + 1].get(file))

        return pair

    def rows(self, release: TargetPin) -> Iterator[Row]:
        """The row of each tool on a release."""
        files = release_files(self.library, self.series, release)
        begun = time.process_time()
        with recorded() as made:
            artefact = as_pinned(self.series, release)
            planned = plan_on(self.library, self.series.target, artefact, self.series.patches, DEFAULT_PIN)
        seconds = time.process_time() - begun
        yield self._neaptide(release, planned, made, seconds)
        commit = self.shop.import_tree({p: d for p, d in files.items() if p.endswith(".py")})
        edits = self._under_new_names(planned)
        for name, tool in TOOLS.items():
            yield self._baseline(release, name, self.shop.bring(commit, tool), edits)
        self.library.forget(self.series.target, release)
        _read.cache_clear()

    def _under_new_names(self, planned: Planned) -> list[list[Edit]]:
        """Each edit, and it under names that its symbol may have now in the same file: line tools follow it there."""
        out = []
        for wanted, outcome in zip(self.series.wanted, outcomes_of(self.series, planned.plan), strict=True):
            where = planned.about(outcome)
            found = where.candidates if where is not None and _reason(outcome) == NO_SYMBOL else ()
            names = [wanted.edit.symbol, *(c.symbol for c in found if c.file == wanted.edit.file)]
            out.append([msgspec.structs.replace(wanted.edit, symbol=name) for name in names])
        return out

    def _row(self, release: TargetPin, tool: str, verdicts: Sequence[Verdict], seconds: float) -> Row:
        found = Counter(verdicts)
        return {
            "case": f"{self.series.target} {release.version}", "variant": tool, "edits": len(verdicts),
            "applied_rightly": found[Verdict.RIGHT], "wrong_place": found[Verdict.WRONG],
            "not_applied": found[Verdict.NOT], "cpu_seconds": round(seconds, 3),
        }  # fmt: skip

    def _neaptide(self, release: TargetPin, planned: Planned, made: Made, seconds: float) -> Row:
        """What is clean or moved counts; drift is written only after somebody has read it, and is listed apart."""
        series = self.series
        pair, outcomes = self._readings(states_of(planned.plan)), outcomes_of(series, planned.plan)
        verdicts, drift = [], Counter[Verdict]()
        for wanted, outcome, reference in zip(series.wanted, outcomes, self.reference, strict=True):
            texts = made.get(wanted.made_as, ()) if outcome.status is not Status.CONFLICT else ()
            found = judge(wanted.edit, texts, reference, *pair(wanted)) if texts else Verdict.NOT
            if outcome.status is Status.DRIFT:
                drift[found] += 1
            verdicts.append(found if outcome.status in APPLIED else Verdict.NOT)
        failed = [o for o, v in zip(outcomes, verdicts, strict=True) if v is not Verdict.RIGHT]
        told = sum(bool(o.detail and todo(planned, o, frozenset())) for o in failed)
        reasons = Counter(_reason(o) for o in failed)
        return {
            **self._row(release, NEAPTIDE, verdicts, seconds), "names_symbol": sum(bool(o.symbol) for o in failed),
            "names_reason": told,
            "drift_right_if_accepted": drift[Verdict.RIGHT], "drift_wrong_if_accepted": drift[Verdict.WRONG],
            "reasons": dict(sorted(reasons.items())),
            "files_with_unbound_names": sum(o.key.startswith("names:") for o in planned.plan.outcomes),
        }  # fmt: skip

    def _baseline(self, release: TargetPin, tool: str, brought: Brought, edits: Sequence[Sequence[Edit]]) -> Row:
        pair = self._readings(brought.states)
        verdicts = []
        for names, wanted, reference in zip(edits, self.series.wanted, self.reference, strict=True):
            found = [judge(edit, wanted.texts, reference, *pair(wanted)) for edit in names]
            verdicts.append(Verdict.RIGHT if Verdict.RIGHT in found else found[0])
        failed = [w for w, v in zip(self.series.wanted, verdicts, strict=True) if v is not Verdict.RIGHT]
        named = sum(self._names_function(w, brought) for w in failed)
        row = self._row(release, tool, verdicts, brought.cpu_seconds)
        return {**row, "names_symbol": named}

    def _names_function(self, wanted: Wanted, brought: Brought) -> bool:
        name = wanted.edit.symbol.rpartition(".")[2].partition("#")[0]
        return name in brought.named[self.position[wanted.patch]].get(wanted.edit.file, "")


@cache
def _read(data: bytes | None) -> Reading:
    """A file's reading, which tools that left the same bytes share."""
    return Reading(data)


def _reason(outcome: EditOutcome) -> str:
    if outcome.status is not Status.CONFLICT:
        return outcome.status.value
    kinds = {"no file": NO_FILE, "no symbol": NO_SYMBOL, "the rule has": "no or several matches"}
    return next((kind for start, kind in kinds.items() if outcome.detail.startswith(start)), "other conflicts")


def rows_of(root: Path, target: str, releases: Sequence[TargetPin]) -> list[Row]:
    """Every tool on releases of one target; their sdists lie in the cache."""
    gc.disable()  # syntax trees have no cycles, and collections would go through all of them
    library = Library(root, {}, Progress(), frozen=True)
    series = load(library, target, load_pin(root, DEFAULT_PIN).targets[target])
    with tempfile.TemporaryDirectory(prefix="neaptide-bump-") as folder:
        bench = Bench(library, series, Path(folder))
        return [row for release in releases for row in bench.rows(release)]
