"""Planning a whole series in memory: every edit of every patch gets a typed outcome, nothing is written."""

from __future__ import annotations

import difflib
import gc
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from neaptide.anchor import check_rule, find, rule_text
from neaptide.edits import SeriesState, make_edit, resolve_edit, span_of, unmet_expectation
from neaptide.errors import NeaptideError
from neaptide.guard import node_guard
from neaptide.model import Anchor, Condition, Edit, Patch, expand, expand_edit
from neaptide.names import unbound_names
from neaptide.operations import Unplaceable
from neaptide.outcomes import WORST_LAST, EditOutcome, Guards, PatchPlan, Plan, Status, Subject
from neaptide.series import after_closure, applicable, applies_to, edits_for, overlay_source, overlays_for, requires_for
from neaptide.symbols import MODULE, find_symbol
from neaptide.text import Source


def plan_series(subject: Subject, patches: Sequence[Patch]) -> Plan:
    """Plan every patch; all outcomes are reported, never only the first.

    Raises:
        NeaptideError: for input that is wrong whatever the tree says (overlapping edits of
            one patch, a rule that does not parse, an edit with no recorded guard).
    """
    series = SeriesState(subject, patches)
    with _without_collection():
        return Plan(subject, tuple(_plan_patch(series, patch) for patch in patches))


@contextmanager
def _without_collection() -> Iterator[None]:
    """No cyclic garbage collection: it would go through every syntax tree again and again while more are made."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _plan_patch(series: SeriesState, patch: Patch) -> PatchPlan:
    subject = series.subject
    if not applies_to(patch, subject.version):
        detail = f"nothing for {subject.target} {subject.version}"
        return PatchPlan(patch, Status.NOT_APPLICABLE, (), {}, detail)
    for condition, status in (
        (patch.header.retire_when, Status.RETIRED),
        (patch.header.superseded_when, Status.SUPERSEDED),
    ):
        if condition is not None and all(_holds(series, patch, leaf) for leaf in condition.leaves):
            detail = "; ".join(_describe(leaf) for leaf in condition.leaves)
            return PatchPlan(patch, status, (), {}, detail)
    outcomes = _plan_overlays(series, patch)
    files = {
        overlay.dest: overlay_source(patch, overlay).read_bytes()
        for overlay, outcome in zip(overlays_for(patch, subject.version), outcomes, strict=True)
        if outcome.status is not Status.CONFLICT
    }
    outcomes += [_plan_requirement(series, patch, anchor) for anchor in requires_for(patch, subject.version)]
    changed: set[str] = set()
    for key, edit in keyed_edits(patch, subject.version, subject.names):
        outcome = _plan_edit(series, patch, edit, key)
        outcomes.append(outcome)
        if outcome.status is not Status.CONFLICT:
            changed.add(edit.file)
    outcomes += _unbound(series, patch, sorted(changed))
    for path in sorted(changed):
        files[path] = series.working[path].source.text.encode("utf-8")
    status = max((o.status for o in outcomes), key=WORST_LAST.index)
    return PatchPlan(patch, status, tuple(outcomes), files)


def keyed_edits(patch: Patch, version: str, names: Mapping[str, str]) -> Iterator[tuple[str, Edit]]:
    """The edits of a patch for a version, ``names`` filled in, each with the key that its outcome and guard have."""
    seen: Counter[str] = Counter()
    for given in edits_for(patch, version):
        edit = expand_edit(given, dict(names))
        base = f"{edit.file}::{edit.symbol}::{edit.operation.rstrip('_')}"
        seen[base] += 1
        yield (base if seen[base] == 1 else f"{base}#{seen[base]}"), edit


def _holds(series: SeriesState, patch: Patch, condition: Condition) -> bool:
    if condition.version is not None:
        return applicable(condition.version, series.subject.version)
    assert condition.anchor is not None
    names = dict(series.subject.names)
    anchor = condition.anchor
    source = series.source(expand(anchor.file, names))
    symbol = find_symbol(source.tree, expand(anchor.symbol, names)) if source is not None else None
    if source is None or symbol is None:
        return False
    if anchor.match is None:
        return True
    rule = expand(anchor.match, names)
    check_rule(rule, f"{patch.id}: condition on {anchor.file} {anchor.symbol}")
    return bool(find(source, rule, span_of(source, symbol)))


def _describe(condition: Condition) -> str:
    if condition.version is not None:
        return f"version {condition.version}"
    assert condition.anchor is not None
    anchor = condition.anchor
    what = f" with {rule_text(anchor.match)}" if anchor.match is not None else ""
    return f"{anchor.file} has {anchor.symbol}{what}"


def _plan_requirement(series: SeriesState, patch: Patch, anchor: Anchor) -> EditOutcome:
    """Code that the patch relies on: as it was, changed (drift), or missing (conflict)."""
    names = dict(series.subject.names)
    file, symbol = expand(anchor.file, names), expand(anchor.symbol, names)
    key = f"requires:{file}::{symbol}"
    outcome = partial(EditOutcome, patch.name, key, file, symbol)
    if not file.endswith(".py"):
        data = series.subject.read(file)
        if data is None:
            return outcome(Status.CONFLICT, "a file that the patch relies on is missing")
        return _judge(series, patch, key, file, symbol, Guards(hashlib.sha256(data).hexdigest(), ""))
    source = series.source(file)
    node = find_symbol(source.tree, symbol) if source is not None else None
    if source is None or node is None:
        return outcome(Status.CONFLICT, "code that the patch relies on is missing")
    return _judge(series, patch, key, file, symbol, Guards(node_guard(node), ""))


def _plan_overlays(series: SeriesState, patch: Patch) -> list[EditOutcome]:
    """Outcomes of the overlay files, in the order of ``overlays_for``."""
    outcomes = []
    for overlay in overlays_for(patch, series.subject.version):
        key = f"overlay:{overlay.dest}"
        outcome = partial(EditOutcome, patch.name, key, overlay.dest, MODULE)
        current = series.subject.read(overlay.dest)
        taken = overlay.dest in series.overlaid or overlay.dest in series.working
        series.overlaid.add(overlay.dest)
        if taken:
            outcomes.append(outcome(Status.CONFLICT, "another patch of the series writes this file"))
        elif overlay.mode == "new" and current is not None:
            outcomes.append(outcome(Status.CONFLICT, "upstream already has a file of this name"))
        elif overlay.mode == "new":
            outcomes.append(outcome(Status.CLEAN))
        elif current is None:
            outcomes.append(outcome(Status.CONFLICT, "the module to replace is missing"))
        else:
            pristine = series.source(overlay.dest)
            assert pristine is not None
            guards = Guards(node_guard(pristine.tree), "")
            outcomes.append(_judge(series, patch, key, overlay.dest, MODULE, guards))
    return outcomes


def _plan_edit(series: SeriesState, patch: Patch, edit: Edit, key: str) -> EditOutcome:
    where = f"{patch.id}: {edit.file} {edit.symbol}"
    for rule in [*([edit.match] if edit.match is not None else []), *edit.expectations]:
        check_rule(rule, where)
    if edit.file in series.overlaid:
        raise NeaptideError(
            "an edit targets a file that an overlay module replaces", wanted="the change in the overlay itself",
            todo="Move it there.", where=where,
        )  # fmt: skip
    outcome = partial(EditOutcome, patch.name, key, edit.file, edit.symbol)
    try:
        allowed = after_closure(patch, series.patches)
        guards = resolve_edit(series, patch, edit, where, allowed)
        make_edit(series, patch, edit, allowed)
    except Unplaceable as reason:
        change = _upstream_change(series, edit.file, edit.symbol)
        return outcome(Status.CONFLICT, str(reason), upstream_change=change)
    unmet = unmet_expectation(series, edit)
    if unmet:
        change = _upstream_change(series, edit.file, edit.symbol)
        return outcome(Status.UNMET, f"post-condition not met: {unmet}", guards, upstream_change=change)
    return _judge(series, patch, key, edit.file, edit.symbol, guards)


def _unbound(series: SeriesState, patch: Patch, paths: Sequence[str]) -> list[EditOutcome]:
    """Files in which the patch's new code reads a name that nothing binds: a NameError no import would show."""
    out = []
    for path in paths:
        working = series.working[path]
        names = unbound_names(working.source, [(o.start, o.end) for o in working.owned if o.patch == patch.name])
        if names:
            detail = f"post-condition not met: the new code reads {', '.join(names)}, which nothing binds there"
            out.append(EditOutcome(patch.name, f"names:{path}", path, MODULE, Status.UNMET, detail))
    return out


def _judge(series: SeriesState, patch: Patch, key: str, file: str, symbol: str, found: Guards) -> EditOutcome:
    """Clean, moved or drift, by the guards that the pin's lock holds."""
    outcome = partial(EditOutcome, patch.name, key, file, symbol, guards=found)
    recording = series.subject.guards is None
    if recording or not found.symbol:
        return outcome(Status.CLEAN)
    recorded = (series.subject.guards or {}).get(patch.name, {}).get(key)
    if recorded is None and series.subject.unpinned:
        return outcome(Status.DRIFT, "no pin holds a guard of this edit, so nothing says what it was written for")
    if recorded is None:
        raise NeaptideError(
            "the pin's lock holds no guard for this edit", wanted="a recorded guard",
            todo="Run `neaptide pins --lock PIN` and review what it writes.",
            where=f"{patch.id}: {file} {symbol}",
        )  # fmt: skip
    if recorded.symbol == found.symbol:
        return outcome(Status.CLEAN)
    change = _upstream_change(series, file, symbol)
    if recorded.site == found.site and found.site:
        detail = "the symbol changed, the anchored statement did not"
        return outcome(Status.MOVED, detail, upstream_change=change)
    relied_on = key.startswith("requires:")
    what = "code that the patch relies on" if relied_on else "the anchored statement or a block around it"
    return outcome(Status.DRIFT, f"{what} changed", upstream_change=change)


def _upstream_change(series: SeriesState, file: str, symbol: str) -> str:
    """Upstream's own old-to-new diff of a symbol, made from the pin's bytes when they are at hand."""
    if not file.endswith(".py"):
        return ""
    old, new = series.subject.original(file), series.source(file)
    if old is None or new is None:
        return ""
    lines = [_symbol_lines(Source(old.decode("utf-8")), symbol), _symbol_lines(new, symbol)]
    diff = difflib.unified_diff(lines[0], lines[1], f"pin/{file}", f"here/{file}", lineterm="")
    return "\n".join(diff)


def _symbol_lines(source: Source, symbol: str) -> list[str]:
    node = find_symbol(source.tree, symbol)
    if node is None:
        return []
    start, end = span_of(source, node)
    return source.text[start:end].splitlines()
