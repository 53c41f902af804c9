"""The new code of an edit: from its text or file to segments ready for a place."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from neaptide.anchor import Capture, Match
from neaptide.errors import NeaptideError
from neaptide.series import CODE_REF
from neaptide.text import Segment, Source, reindent, string_lines

_CAPTURE = re.compile(r"\${1,3}([A-Z_][A-Z0-9_]*)")


def load_code(value: str, folder: Path, *, expression: bool, definition: bool) -> str:
    """``code: text`` as it is, or the body of ``file.py#function``.

    In a file, parameters of the function stand for captures: ``def code(BUDGET)`` uses ``BUDGET``
    where a text would say ``$BUDGET``. An expression is what the function returns; a replaced
    definition takes the function whole.
    """
    found = CODE_REF.match(value)
    if found is None:
        return value.rstrip("\n")
    source = Source((folder / found["file"]).read_text(encoding="utf-8"))
    function = next(n for n in source.tree.body if isinstance(n, ast.FunctionDef) and n.name == found["function"])
    if definition:
        start, end = source.span(function)
        return source.text[start:end]
    body = function.body[1:] if ast.get_docstring(function) else function.body
    if expression:
        if len(body) != 1 or not isinstance(body[0], ast.Return) or body[0].value is None:
            raise NeaptideError(
                "the function is not a single return", wanted="return EXPRESSION",
                todo="Mend the code file.", where=f"{folder / found['file']}#{function.name}",
            )  # fmt: skip
        start, end = source.span(body[0].value)
    else:
        start = source.starts[body[0].lineno - 1]
        end = source.span(body[-1])[1]
    return _parameters_to_captures(source, function, start, end)


def _parameters_to_captures(source: Source, function: ast.FunctionDef, start: int, end: int) -> str:
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
        segments.append(Segment(_placed(code, found.start(), captures[name]), upstream=True))
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
