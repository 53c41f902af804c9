"""Planning one edit: found in the pristine file for its guards, then made on the text so far."""

from __future__ import annotations

import ast
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from neaptide.anchor import Match, find, rule_text
from neaptide.errors import NeaptideError
from neaptide.guard import node_guard
from neaptide.model import Edit, Patch
from neaptide.operations import Unplaceable, splices
from neaptide.outcomes import Guards, Subject
from neaptide.symbols import (
    FUNCTIONS,
    MODULE,
    ambiguous_part,
    find_symbol,
    parameter_guard,
    signature_guard,
    site_guard,
    statement_at,
)
from neaptide.text import Source, Splice, parsed
from neaptide.working import Part, WorkingFile

_AROUND = ("inside", "follows", "precedes", "nthChild")


@dataclass
class SeriesState:
    """State of one planning run."""

    subject: Subject
    patches: Sequence[Patch]
    pristine: dict[str, Source | None] = field(default_factory=dict)
    working: dict[str, WorkingFile] = field(default_factory=dict)
    touched: dict[str, list[tuple[int, int, str]]] = field(default_factory=dict)
    overlaid: set[str] = field(default_factory=set)

    def source(self, path: str) -> Source | None:
        if path not in self.pristine:
            data = self.subject.read(path)
            self.pristine[path] = None if data is None else _parsed(path, data)
        return self.pristine[path]


def _parsed(path: str, data: bytes) -> Source:
    try:
        return parsed(data)
    except (SyntaxError, ValueError) as error:
        raise NeaptideError(
            f"Python {platform.python_version()} cannot parse it ({error})", wanted="a module in UTF-8 without a BOM",
            todo="Run neaptide with a Python that the target supports.", where=path,
        ) from error  # fmt: skip


def span_of(source: Source, symbol: ast.AST) -> tuple[int, int]:
    return (0, len(source.text)) if isinstance(symbol, ast.Module) else source.span(symbol)


def resolve_edit(series: SeriesState, patch: Patch, edit: Edit, where: str, allowed: set[str]) -> Guards:
    """Guards of an edit on the pristine file, where its place must exist and be free.

    An edit whose rule matches only what a patch in ``allowed`` wrote has no pristine site.

    Raises:
        Unplaceable: a missing file or symbol, a wrong number of matches, an overlap with another patch.
        NeaptideError: an overlap with another edit of the same patch.
    """
    source = series.source(edit.file)
    if source is None:
        raise Unplaceable(f"no file {edit.file} in the package")
    symbol = _symbol(source, edit.symbol)
    if edit.symbol == MODULE:
        return Guards("", "")
    matches = find(source, edit.match, span_of(source, symbol)) if edit.match is not None else []
    ours_only = not matches and edit.match is not None and bool(allowed)
    if edit.match is not None and not ours_only:
        _check_count(edit, len(matches))
    guards = Guards(node_guard(symbol), "" if ours_only else _site(edit, source, symbol, matches))
    if not ours_only:
        found = splices(edit, source, symbol, matches, patch.folder)
        _check_overlap(series, patch, edit, found, where, allowed)
    return guards


def _symbol(source: Source, name: str) -> ast.AST:
    symbol = find_symbol(source.tree, name)
    if symbol is None:
        raise Unplaceable(f"no symbol {name}")
    part = ambiguous_part(source.tree, name)
    if part:
        raise Unplaceable(f"{part} is defined more than once; say which with {part}#1")
    return symbol


def _check_count(edit: Edit, found: int) -> None:
    if found != edit.count:
        wanted = "exactly one" if edit.count == 1 else f"exactly {edit.count}"
        raise Unplaceable(f"the rule has {found or 'no'} matches, wanted {wanted}")


def _site(edit: Edit, source: Source, symbol: ast.AST, matches: Sequence[Match]) -> str:
    if edit.operation == "default":
        if not isinstance(symbol, FUNCTIONS):
            raise Unplaceable("the symbol is not a function")
        return "+".join(parameter_guard(symbol, name) for name in edit.default or {})
    if not matches:
        return signature_guard(symbol) if edit.operation in ("start", "end") else node_guard(symbol)
    guards = []
    for match in matches:
        place = statement_at(source, symbol, match.start, match.end)
        if place is None:
            raise Unplaceable("the rule does not match inside a statement of the symbol")
        whole = source.span(place.statement) == (match.start, match.end)
        header_only = not whole or edit.operation in ("start", "end")
        guards.append(site_guard(place, symbol, header_only=header_only))
    return "+".join(guards)


def _check_overlap(
    series: SeriesState, patch: Patch, edit: Edit, found: Sequence[Splice], where: str, allowed: set[str]
) -> None:
    """Refuse edits whose pristine ranges overlap: in one patch as bad input, between two as a conflict."""
    spots = series.touched.setdefault(edit.file, [])
    for splice in found:
        for start, end, owner in spots:
            if not _overlap(splice.start, splice.end, start, end) or owner in allowed:
                continue
            if owner == patch.name:
                raise NeaptideError(
                    "two edits of one patch overlap", wanted="edits that touch separate text",
                    todo="Join them into one edit.", where=where,
                )  # fmt: skip
            raise Unplaceable(f"overlaps an edit of {owner}; if that is meant, say after: [{owner}]")
    spots.extend((s.start, s.end, patch.name) for s in found)


def _overlap(a: int, b: int, c: int, d: int) -> bool:
    if a == b:
        return c < a < d
    if c == d:
        return a < c < b
    return a < d and c < b


def make_edit(series: SeriesState, patch: Patch, edit: Edit, allowed: set[str]) -> None:
    """Match again on the text that earlier patches left, outside what they wrote, and splice."""
    if edit.file not in series.working:
        pristine = series.source(edit.file)
        assert pristine is not None
        series.working[edit.file] = WorkingFile(pristine)
    file = series.working[edit.file]
    part = _part(file, edit)
    working = part or file.whole
    source = working.source
    symbol = _symbol(source, edit.symbol)

    def keep(start: int, end: int) -> bool:
        return not working.framed_by(start, end) - allowed

    matches: list[Match] = []
    if edit.match is not None:
        matches = find(source, edit.match, span_of(source, symbol), keep)
        if len(matches) != edit.count:
            writers = ", ".join(sorted({o.patch for o in file.owned})) or "nobody"
            raise Unplaceable(f"the rule has {len(matches)} matches after the edits of {writers}, wanted {edit.count}")
    found = splices(edit, source, symbol, matches, patch.folder)
    if edit.operation in ("after", "end"):
        found = [_after_ours(working, s) for s in found]
    for splice in found:
        owners = working.owners_at(splice.start, splice.end) - allowed
        if owners:
            names = ", ".join(sorted(owners))
            raise Unplaceable(f"would change text that {names} wrote; if that is meant, say after: [{names}]")
    try:
        working.apply(found, patch.name)
    except SyntaxError as error:
        # Without the line, which would be one of the part.
        raise Unplaceable(f"the result does not parse ({error.msg})") from error
    if part is not None:
        file.part_changed()
    else:
        file.whole_changed()


def _after_ours(working: Part, splice: Splice) -> Splice:
    """An insertion after a statement, behind those that earlier patches made there in the same block.

    Theirs begin with the same new line and indentation, and all that follows them deeper is theirs, too. What begins
    deeper without one of them is of a block around the statement, and stays behind the insertion.
    """
    source, at, lead = working.source, splice.start, splice.segments[0].text
    passed = False
    for item in working.owned:
        if item.start < at < item.reach and _only_comments(source.text[at : item.reach]):
            at, passed = item.reach, True
            continue
        text = source.text[item.start : item.end]
        deeper = text[len(lead) : len(lead) + 1].isspace()
        if item.start != at or not text.startswith(lead) or (deeper and not passed):
            continue
        if source.line_end(item.reach) != item.reach:
            raise Unplaceable(f"where the code ends that {item.patch} put there cannot be told")
        at, passed = item.reach, True
    return replace(splice, start=at, end=at)


def _only_comments(text: str) -> bool:
    """Whether whole lines follow, none of them code."""
    first, *lines = text.splitlines() or [""]
    return not first.strip() and all(line.strip()[:1] in ("", "#") for line in lines)


def _part(file: WorkingFile, edit: Edit) -> Part | None:
    """The definition that an edit stays inside.

    None for one that is about the module, that replaces a symbol whole, or whose rules look around what they match.
    """
    if edit.symbol == MODULE or _whole_symbol(edit) or _looks_around([edit.match, *edit.expectations]):
        return None
    return file.part_of(edit.symbol)


def _looks_around(rule: object) -> bool:
    """Whether a rule, or one of several, asks for what stands around its hits: perhaps around the symbol, too."""
    if isinstance(rule, dict):
        return any(key in _AROUND or _looks_around(value) for key, value in rule.items())
    return isinstance(rule, list) and any(map(_looks_around, rule))


def _whole_symbol(edit: Edit) -> bool:
    return edit.match is None and edit.operation in ("replace", "before", "after")


def expectation_span(source: Source, edit: Edit) -> tuple[int, int] | None:
    """Where ``expect`` is asked: the symbol; the module, where the edit replaces it whole or stands beside it."""
    symbol = find_symbol(source.tree, edit.symbol)
    if symbol is None:
        return None
    return span_of(source, source.tree if _whole_symbol(edit) else symbol)


def unmet_expectation(series: SeriesState, edit: Edit) -> str:
    """The first ``expect`` rule without a hit that reaches upstream's own text, or nothing."""
    file = series.working[edit.file]
    working = _part(file, edit) or file.whole
    span = expectation_span(working.source, edit)
    if span is None:
        return f"the symbol {edit.symbol} is gone"
    for rule in edit.expectations:
        if not find(working.source, rule, span, lambda s, e: not working.inside_ours(s, e)):
            return f"{rule_text(rule)} has no match that reaches upstream's code"
    return ""
