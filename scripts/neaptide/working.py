"""A file while the series is planned. An edit inside one function costs the parsing of that function alone."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from neaptide.symbols import DEFINITIONS, FUNCTIONS, bound_names
from neaptide.text import Source, Splice


@dataclass(frozen=True)
class Owned:
    """A range of code points that a patch wrote.

    Attributes:
        reach: where the new text of that edit ends, with what it captured of the old.
    """

    start: int
    end: int
    patch: str
    reach: int

    def moved(self, by: int) -> Owned:
        return Owned(self.start + by, self.end + by, self.patch, self.reach + by)

    def within(self, low: int, high: int) -> Owned:
        return Owned(max(self.start, low), min(self.end, high), self.patch, min(self.reach, high))


@dataclass
class Part:
    """A stretch of a file while the series is planned: its current text, and the ranges that patches wrote."""

    source: Source
    owned: list[Owned] = field(default_factory=list)

    def owners_at(self, start: int, end: int) -> set[str]:
        """Patches whose text ``[start, end)`` touches (for an empty range: strictly inside)."""
        if start == end:
            return {o.patch for o in self.owned if o.start < start < o.end}
        return {o.patch for o in self.owned if o.start < end and start < o.end}

    def inside_ours(self, start: int, end: int) -> bool:
        """Whether patches wrote every character of ``[start, end)``."""
        for item in self.owned:
            if item.start <= start < item.end:
                start = item.end
        return start >= end

    def framed_by(self, start: int, end: int) -> set[str]:
        """Patches that wrote both the first and the last character of ``[start, end)``, or one of two each.

        Such a hit is made of our text, whatever it wraps; empty where upstream wrote either end.
        """
        first = {o.patch for o in self.owned if o.start <= start < o.end}
        last = {o.patch for o in self.owned if o.start < end <= o.end}
        return first | last if first and last else set()

    def apply(self, splices: Iterable[Splice], patch: str) -> None:
        """Apply splices given in offsets of the current text; raises SyntaxError if the result does not parse."""
        text, owned = self.source.text, list(self.owned)
        for splice in sorted(splices, key=lambda s: (s.start, s.end), reverse=True):
            kept = _kept(owned, splice, text)
            text = text[: splice.start] + splice.text + text[splice.end :]
            owned = _shifted(owned, splice) + kept + _owned_by(splice, patch)
        source = Source(text, self.source.newline)
        _ = source.tree
        self.source, self.owned = source, sorted(owned, key=lambda o: (o.start, o.end))


class WorkingFile:
    """One file: whole, and cut at its functions and methods, whichever an edit needs."""

    def __init__(self, source: Source) -> None:
        self._whole: Part | None = Part(source)
        self._pieces: list[_Piece] = []
        self._by_name: dict[str, Part] = {}

    @property
    def whole(self) -> Part:
        """The file as one part; an edit of it has to be told with :meth:`whole_changed`."""
        if self._whole is None:
            texts, owned, at = [], [], 0
            for piece in self._pieces:
                skip, text = len(piece.frame), piece.part.source.text
                owned += [item.moved(at - skip) for item in piece.part.owned]
                texts.append(text[skip:])
                at += len(text) - skip
            self._whole = Part(Source("".join(texts)), owned)
        return self._whole

    @property
    def source(self) -> Source:
        return self.whole.source

    @property
    def owned(self) -> list[Owned]:
        return self.whole.owned

    def part_of(self, symbol: str) -> Part | None:
        """The part that holds ``symbol``: a function or a method, of a name that nothing else binds; or None."""
        if not self._pieces:
            self._cut()
        names = symbol.split(".")
        return self._by_name.get(names[0]) or self._by_name.get(".".join(names[:2]))

    def part_changed(self) -> None:
        self._whole = None

    def whole_changed(self) -> None:
        self._pieces, self._by_name = [], {}

    def _cut(self) -> None:
        whole, at = self.whole, 0
        for name, frame, node in _functions(whole.source.tree, whole.source.newline):
            span = _whole_lines(whole, node)
            if span is None or span[0] < at:
                continue
            self._pieces.append(_Piece("", _cut_out(whole, at, span[0], "")))
            self._pieces.append(_Piece(frame, _cut_out(whole, *span, frame)))
            self._by_name[name] = self._pieces[-1].part
            at = span[1]
        self._pieces.append(_Piece("", _cut_out(whole, at, len(whole.source.text), "")))


@dataclass(frozen=True)
class _Piece:
    """A part, and the line before its text that makes a method a module of its own."""

    frame: str
    part: Part


def _functions(tree: ast.Module, newline: str) -> Iterator[tuple[str, str, ast.stmt]]:
    """Top-level functions, and methods of top-level classes, in order: name, frame, definition."""
    bound = Counter(bound_names(tree))
    for node in tree.body:
        if not isinstance(node, DEFINITIONS) or bound[node.name] != 1:
            continue
        if not isinstance(node, ast.ClassDef):
            yield node.name, "", node
            continue
        inner = Counter(bound_names(node))
        for child in node.body:
            if isinstance(child, FUNCTIONS) and inner[child.name] == 1:
                yield f"{node.name}.{child.name}", f"class {node.name}:{newline}", child


def _whole_lines(whole: Part, node: ast.AST) -> tuple[int, int] | None:
    """The lines of a definition, and of what patches put at their end; None where it shares one with something else."""
    source = whole.source
    low, high = source.span(node)
    start, end = source.starts[source.line_of(low)], source.starts[source.line_of(max(low, high - 1)) + 1]
    if source.text[start:low].strip() or source.text[high:end].strip():
        return None
    for item in whole.owned:
        if item.start < end < item.reach:
            end = source.starts[source.line_of(item.reach - 1) + 1]
    return start, end


def _cut_out(whole: Part, start: int, end: int, frame: str) -> Part:
    shift = len(frame) - start
    owned = [o.within(start, end).moved(shift) for o in whole.owned if o.start < end and start < o.end]
    return Part(Source(frame + whole.source.text[start:end], whole.source.newline), owned)


def _shifted(owned: Sequence[Owned], splice: Splice) -> list[Owned]:
    delta = len(splice.text) - (splice.end - splice.start)
    out = []
    for item in owned:
        reach = item.reach if item.reach <= splice.start else max(item.reach, splice.end) + delta
        if item.end <= splice.start:
            out.append(replace(item, reach=reach))
        elif item.start >= splice.end:
            out.append(item.moved(delta))
        else:
            if item.start < splice.start:
                out.append(Owned(item.start, splice.start, item.patch, reach))
            if item.end > splice.end:
                out.append(Owned(splice.start + len(splice.text), item.end + delta, item.patch, reach))
    return out


def _owned_by(splice: Splice, patch: str) -> list[Owned]:
    """The new text of a splice, in one range from one captured piece to the next."""
    out: list[Owned] = []
    at = splice.start
    for segment in splice.segments:
        end = at + len(segment.text)
        if segment.text and segment.origin is None:
            start = out.pop().start if out and out[-1].end == at else at
            out.append(Owned(start, end, patch, splice.start + len(splice.text)))
        at = end
    return out


def _kept(owned: Sequence[Owned], splice: Splice, text: str) -> list[Owned]:
    """Text of earlier patches that the splice captures, where it stands afterwards."""
    out, at = [], splice.start
    for segment in splice.segments:
        low, high = segment.origin or (0, 0)
        moved_whole = segment.text == text[low:high]
        for item in owned:
            mine, end = item.within(low, high), at + len(segment.text)
            if mine.start < mine.end:
                out.append(mine.moved(at - low) if moved_whole else Owned(at, end, item.patch, end))
        at += len(segment.text)
    return out
