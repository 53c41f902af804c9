"""A source file being edited: its text, its newlines, and which ranges of it we wrote."""

from __future__ import annotations

import ast
import bisect
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ast_grep_py import SgNode, SgRoot

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n|\Z)")


@dataclass(frozen=True)
class Segment:
    """A piece of inserted text.

    ``origin`` is where a captured piece stood: it stays whose it was, upstream's or an earlier patch's.
    """

    text: str
    origin: tuple[int, int] | None = None


@dataclass(frozen=True)
class Splice:
    """Replace code points ``[start, end)`` of a file with ``segments``."""

    start: int
    end: int
    segments: tuple[Segment, ...]

    @property
    def text(self) -> str:
        return "".join(s.text for s in self.segments)


@dataclass(frozen=True)
class Owned:
    """A range of code points that a patch wrote."""

    start: int
    end: int
    patch: str


class Source:
    """Immutable view of a Python text with conversions between ``ast`` and code-point positions."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.lines = [m.group() for m in _LINE.finditer(text) if m.group()]
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line))
        self.tree = ast.parse(text)
        self._root: SgNode | None = None

    @property
    def newline(self) -> str:
        return "\r\n" if self.lines and self.lines[0].endswith("\r\n") else "\n"

    @property
    def root(self) -> SgNode:
        if self._root is None:
            self._root = SgRoot(self.text, "python").root()
        return self._root

    def offset(self, line: int, column: int) -> int:
        """Code-point offset of an ``ast`` position (1-based line, column in UTF-8 bytes)."""
        content = self.lines[line - 1] if line <= len(self.lines) else ""
        if content.isascii():
            return self.starts[line - 1] + column
        return self.starts[line - 1] + len(content.encode()[:column].decode())

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Code-point range of a node, decorators included."""
        start = self.offset(node.lineno, node.col_offset)  # type: ignore[attr-defined]
        decorators = getattr(node, "decorator_list", None)
        if decorators:
            start = self.text.rindex("@", 0, self.offset(decorators[0].lineno, decorators[0].col_offset))
        return start, self.offset(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def line_of(self, offset: int) -> int:
        """0-based index of the line that holds ``offset``."""
        return bisect.bisect_right(self.starts, offset) - 1 if offset < len(self.text) else max(0, len(self.lines) - 1)

    def indentation(self, offset: int) -> str | None:
        """White space before ``offset`` on its line, or None where code stands before it."""
        before = self.text[self.starts[self.line_of(offset)] : offset]
        return before if not before.strip() else None

    def line_indentation(self, offset: int) -> str:
        """Leading white space of the line that holds ``offset``."""
        line = self.lines[self.line_of(offset)]
        return line[: len(line) - len(line.lstrip(" \t"))]

    def rest_of_line(self, offset: int) -> str:
        line = self.line_of(offset)
        return self.text[offset : self.starts[line + 1]]


@dataclass
class WorkingFile:
    """One file while the series is planned: current text plus the ranges that patches wrote."""

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

    def after_ours(self, offset: int) -> int:
        """Past the text that patches put at ``offset``, so that a second insertion follows the first."""
        for item in self.owned:
            if item.start == offset:
                offset = item.end
        return offset

    def apply(self, splices: Iterable[Splice], patch: str) -> None:
        """Apply splices given in offsets of the current text; raises SyntaxError if the result does not parse."""
        text, owned = self.source.text, list(self.owned)
        for splice in sorted(splices, key=lambda s: (s.start, s.end), reverse=True):
            kept = _kept(owned, splice, text)
            text = text[: splice.start] + splice.text + text[splice.end :]
            owned = _shifted(owned, splice) + kept + _owned_by(splice, patch)
        self.source = Source(text)
        self.owned = sorted(owned, key=lambda o: (o.start, o.end))


def _shifted(owned: Sequence[Owned], splice: Splice) -> list[Owned]:
    delta = len(splice.text) - (splice.end - splice.start)
    out = []
    for item in owned:
        if item.end <= splice.start:
            out.append(item)
        elif item.start >= splice.end:
            out.append(Owned(item.start + delta, item.end + delta, item.patch))
        else:
            if item.start < splice.start:
                out.append(Owned(item.start, splice.start, item.patch))
            if item.end > splice.end:
                out.append(Owned(splice.start + len(splice.text), item.end + delta, item.patch))
    return out


def _owned_by(splice: Splice, patch: str) -> list[Owned]:
    out, at = [], splice.start
    for segment in splice.segments:
        if segment.text and segment.origin is None:
            out.append(Owned(at, at + len(segment.text), patch))
        at += len(segment.text)
    return out


def _kept(owned: Sequence[Owned], splice: Splice, text: str) -> list[Owned]:
    """Text of earlier patches that the splice captures, where it stands afterwards."""
    out, at = [], splice.start
    for segment in splice.segments:
        low, high = segment.origin or (0, 0)
        moved_whole = segment.text == text[low:high]
        for item in owned:
            start, end = max(item.start, low), min(item.end, high)
            if start < end and moved_whole:
                out.append(Owned(at + start - low, at + end - low, item.patch))
            elif start < end:
                out.append(Owned(at, at + len(segment.text), item.patch))
        at += len(segment.text)
    return out


def string_lines(text: str) -> set[int]:
    """0-based lines of a snippet that begin inside a multi-line string, and so must keep their indentation."""
    inside: set[int] = set()
    for node in SgRoot(text, "python").root().find_all(kind="string"):
        place = node.range()
        inside.update(range(place.start.line + 1, place.end.line + 1))
    return inside


def reindent(text: str, indentation: str, *, first_line: bool = True) -> str:
    """Dedent a snippet and indent it by ``indentation``; the inside of multi-line strings is kept."""
    lines = text.split("\n")
    protected = string_lines(text)
    code = [line for i, line in enumerate(lines) if line.strip() and i not in protected]
    margin = min((len(line) - len(line.lstrip(" \t")) for line in code), default=0)
    out = []
    for i, line in enumerate(lines):
        if i in protected:
            out.append(line)
        elif not line.strip():
            out.append("")
        else:
            out.append((indentation if i or first_line else "") + line[margin:])
    return "\n".join(out)
