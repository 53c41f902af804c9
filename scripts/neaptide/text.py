"""A Python text with its newlines, and conversions between the positions of ``ast`` and code points."""

from __future__ import annotations

import ast
import bisect
import re
from dataclasses import dataclass

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


class Source:
    """Immutable view of a Python text with conversions between ``ast`` and code-point positions.

    Args:
        newline: what ends the lines of new text; without it that of the first line.
    """

    def __init__(self, text: str, newline: str = "") -> None:
        self.text = text
        self.lines = [m.group() for m in _LINE.finditer(text) if m.group()]
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line))
        self.newline = newline or ("\r\n" if self.lines and self.lines[0].endswith("\r\n") else "\n")
        self._tree: ast.Module | None = None
        self._root: SgNode | None = None

    @property
    def tree(self) -> ast.Module:
        """Raises SyntaxError."""
        if self._tree is None:
            self._tree = ast.parse(self.text)
        return self._tree

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

    def line_end(self, offset: int) -> int:
        """The end of the line that holds ``offset``, before its newline."""
        return offset + len(self.rest_of_line(offset).rstrip("\r\n"))

    def rest_of_line(self, offset: int) -> str:
        line = self.line_of(offset)
        return self.text[offset : self.starts[line + 1]]


def parsed(data: bytes) -> Source:
    """A module's text; raises SyntaxError or ValueError where it is no Python, or no UTF-8."""
    source = Source(data.decode("utf-8"))
    _ = source.tree
    return source


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
