"""The new code of an edit: from its text or file to segments ready for a place."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from neaptide.anchor import Capture, Match
from neaptide.errors import NeaptideError
from neaptide.model import CODE_REF
from neaptide.symbols import DEFINITIONS, find_symbol
from neaptide.text import Segment, Source, reindent, string_lines

_CAPTURE = re.compile(r"\${1,3}([A-Z_][A-Z0-9_]*)")


def load_code(value: str, folder: Path, *, expression: bool, definition: bool) -> str:
    """``code: text`` as it is, or the body of ``file.py#function``.

    In a file, parameters of the function stand for captures: ``def code(BUDGET)`` uses ``BUDGET``
    where a text would say ``$BUDGET``. An expression is what the function returns; a replaced
    definition takes the definition whole.

    Raises:
        NeaptideError: no such definition, or a body that does not fit.
    """
    found = CODE_REF.match(value)
    if found is None:
        return value.rstrip("\n")
    path = folder / found["file"]
    where = f"{path}#{found['function']}"
    source = parse_code(path)
    node = find_symbol(source.tree, found["function"])
    if not isinstance(node, DEFINITIONS) or (isinstance(node, ast.ClassDef) and not definition):
        raise _refuse(where, "no such definition", "a function of that name")
    if definition:
        start, end = source.span(node)
        return source.text[start:end]
    assert not isinstance(node, ast.ClassDef)
    body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
    if not body:
        raise _refuse(where, "a body without code", "the statements to insert")
    if expression:
        if len(body) != 1 or not isinstance(body[0], ast.Return) or body[0].value is None:
            raise _refuse(where, "the body is not a single return", "return EXPRESSION")
        start, end = source.span(body[0].value)
    else:
        start, end = source.span(body[0])[0], source.span(body[-1])[1]
        if body[0].lineno != node.lineno:
            start = source.starts[source.line_of(start)]
    return _parameters_to_captures(source, node, start, end)


def parse_code(path: Path) -> Source:
    """A code file of a patch; a clear error where it is missing or no Python."""
    try:
        source = Source(path.read_text(encoding="utf-8"))
        _ = source.tree
        return source
    except (OSError, SyntaxError, ValueError) as error:
        raise _refuse(str(path), str(error), "a Python file in UTF-8") from error


def _refuse(where: str, found: str, wanted: str) -> NeaptideError:
    return NeaptideError(found, wanted=wanted, todo="Mend the code file.", where=where)


def _parameters_to_captures(
    source: Source, function: ast.FunctionDef | ast.AsyncFunctionDef, start: int, end: int
) -> str:
    names = {a.arg for a in function.args.args}
    spots = sorted(
        source.offset(n.lineno, n.col_offset) for n in ast.walk(function) if isinstance(n, ast.Name) and n.id in names
    )
    out, at = "", start
    for spot in spots:
        if start <= spot < end:
            out += source.text[at:spot] + "$"
            at = spot
    return out + source.text[at:end]


def render(code: str, match: Match | None, where: str, *, newline: str, indentation: str) -> tuple[Segment, ...]:
    """Segments of ``code`` with captures filled in.

    All lines but the first, which stands where the caller puts it, are moved to ``indentation``.
    """
    code = reindent(code, indentation, first_line=False)
    captures = match.captures if match is not None else {}
    segments: list[Segment] = []
    at = 0
    for found in _CAPTURE.finditer(code):
        name = found.group(1)
        if name not in captures:
            raise NeaptideError(
                f"the code uses ${name}", wanted=f"a capture of the rule ({', '.join(sorted(captures)) or 'none'})",
                todo="Mend the patch.", where=where,
            )  # fmt: skip
        segments.append(Segment(code[at : found.start()].replace("\n", newline)))
        segments.append(Segment(_placed(code, found.start(), captures[name]), captures[name].origin))
        at = found.end()
    segments.append(Segment(code[at:].replace("\n", newline)))
    return tuple(s for s in segments if s.text)


def _placed(code: str, at: int, capture: Capture) -> str:
    """A captured block alone on a line of the code moves as a whole to that line's indentation."""
    before = code[code.rfind("\n", 0, at) + 1 : at]
    if before.strip() or "\n" not in capture.text:
        return capture.text
    inside = string_lines(capture.text.replace("\r\n", "\n"))
    lines = capture.text.split("\n")
    moved = [
        before + line.removeprefix(capture.indentation) if line.strip() and i not in inside else line
        for i, line in enumerate(lines)
    ]
    return "\n".join([lines[0], *moved[1:]])
