"""The operations of an edit: from hits of its rule to splices of the file."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Sequence
from pathlib import Path

from neaptide.anchor import Match
from neaptide.guard import docstring_node
from neaptide.model import STATEMENT_OPERATIONS, Edit
from neaptide.symbols import DEFINITIONS, FUNCTIONS, compound_at, find_parameter, statement_at
from neaptide.templates import load_code, render
from neaptide.text import Segment, Source, Splice

_REST = re.compile(r"[ \t]*(#[^\r\n]*)?(\r\n|\r|\n)?\Z")


class Unplaceable(Exception):
    """The place was found, but the operation cannot be done there; the text says why."""


def splices(edit: Edit, source: Source, symbol: ast.AST, matches: Sequence[Match], folder: Path) -> list[Splice]:
    """The splices that an edit makes in ``source``, one or more for each hit of its rule."""
    placer = _Placer(edit, source, symbol, folder)
    if edit.operation == "import_":
        return [placer.imports()]
    if edit.operation == "default":
        return placer.defaults()
    if edit.operation == "constant":
        return [placer.constant()]
    if not matches:
        return [placer.whole_symbol()]
    found = [splice for match in matches for splice in placer.at(match)]
    found.sort(key=lambda s: (s.start, s.end))
    for one, two in itertools.pairwise(found):
        if two.start < one.end:
            raise Unplaceable("hits of the rule lie inside one another")
    return found


class _Placer:
    def __init__(self, edit: Edit, source: Source, symbol: ast.AST, folder: Path) -> None:
        self.edit, self.source, self.symbol, self.folder = edit, source, symbol, folder
        self.where = f"{folder.name}: {edit.file} {edit.symbol}"

    def _code(self, value: str, *, expression: bool = False, definition: bool = False) -> str:
        return load_code(value, self.folder, expression=expression, definition=definition)

    def _render(self, code: str, match: Match | None, indentation: str) -> tuple[Segment, ...]:
        return render(code, match, self.where, newline=self.source.newline, indentation=indentation)

    # Operations without a rule

    def imports(self) -> Splice:
        """After the last import of the leading block of the module."""
        tree = self.symbol
        assert isinstance(tree, ast.Module)
        last: ast.stmt | None = docstring_node(tree)
        code = self._code(self.edit.import_ or "")
        for statement in tree.body:
            if isinstance(statement, (ast.Import, ast.ImportFrom)):
                last = statement
            elif isinstance(statement, DEFINITIONS):
                break
        if last is not None:
            return self._after(last, code, None)
        comments = 0
        while comments < len(self.source.lines) and self.source.lines[comments].startswith("#"):
            comments += 1
        at = self.source.starts[comments]
        return Splice(at, at, (*self._render(code, None, ""), Segment(self.source.newline)))

    def defaults(self) -> list[Splice]:
        function = self.symbol
        if not isinstance(function, FUNCTIONS):
            raise Unplaceable("the symbol is not a function")
        out = []
        for name, value in (self.edit.default or {}).items():
            found = find_parameter(function, name)
            if found is None:
                raise Unplaceable(f"no parameter {name}")
            parameter, default = found
            code = self._code(value, expression=True)
            if default is not None:
                start, end = self.source.span(default)
                equals = ""
            else:
                start = end = self.source.span(parameter)[1]
                equals = " = " if parameter.annotation else "="
            segments = self._render(code, None, self.source.line_indentation(start))
            out.append(Splice(start, end, (Segment(equals), *segments)))
        return out

    def constant(self) -> Splice:
        node = self.symbol
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            raise Unplaceable("the symbol is not an assignment")
        code = self._code(self.edit.constant or "", expression=True)
        start, end = self.source.span(node.value)
        return Splice(start, end, self._render(code, None, self.source.line_indentation(start)))

    def whole_symbol(self) -> Splice:
        """``replace`` the definition, ``before`` or ``after`` it, or ``start``/``end`` of its body."""
        assert isinstance(self.symbol, ast.stmt)
        if self.edit.before is not None:
            return self._before(self.symbol, self._code(self.edit.before), None)
        if self.edit.after is not None:
            return self._after(self.symbol, self._code(self.edit.after), None)
        if self.edit.replace is not None:
            start, end = self.source.span(self.symbol)
            indentation = self._own_line(self.symbol)
            code = self._code(self.edit.replace, definition=True)
            return Splice(start, end, self._render(code, None, indentation))
        if not isinstance(self.symbol, DEFINITIONS):
            raise Unplaceable("the symbol has no body")
        return self._edge(self.symbol, None)

    # Operations at a hit

    def at(self, match: Match) -> list[Splice]:
        operation = self.edit.operation
        if operation == "argument":
            return self._arguments(match)
        if operation in ("start", "end"):
            block = compound_at(self.source, self.symbol, match.start)
            if block is None:
                raise Unplaceable("the rule does not match a compound statement")
            return [self._edge(block, match)]
        place = statement_at(self.source, self.symbol, match.start, match.end)
        if place is None:
            raise Unplaceable("the rule does not match inside a statement")
        whole = self.source.span(place.statement) == (match.start, match.end)
        if operation in STATEMENT_OPERATIONS:
            code = self._code(getattr(self.edit, operation))
            insert = self._before if operation == "before" else self._after
            return [insert(place.statement, code, match)]
        if operation == "delete":
            if not whole:
                raise Unplaceable("delete removes whole statements, and the rule matches less")
            return [self._delete(place.statement, place.path[-1] if place.path else None)]
        code = self._code(self.edit.replace or self.edit.wrap or "", expression=not whole)
        if whole:
            self._own_line(place.statement)
        indentation = self.source.line_indentation(match.start)
        return [Splice(match.start, match.end, self._render(code, match, indentation))]

    def _own_line(self, statement: ast.stmt) -> str:
        """Indentation of a statement that begins and ends its own lines."""
        start, end = self.source.span(statement)
        indentation = self.source.indentation(start)
        if indentation is None or not _REST.match(self.source.rest_of_line(end)):
            raise Unplaceable("the statement shares its line with other code")
        return indentation

    def _refuse_elif(self, statement: ast.stmt) -> None:
        if self.source.text.startswith("elif", self.source.span(statement)[0]):
            raise Unplaceable("the place is between the branches of an if statement")

    def _before(self, statement: ast.stmt, code: str, match: Match | None) -> Splice:
        self._refuse_elif(statement)
        start = self.source.span(statement)[0]
        indentation = self.source.indentation(start)
        if indentation is None:
            raise Unplaceable("the statement shares its line with other code")
        end = Segment(self.source.newline + indentation)
        return Splice(start, start, (*self._render(code, match, indentation), end))

    def _after(self, statement: ast.stmt, code: str, match: Match | None) -> Splice:
        self._refuse_elif(statement)
        indentation = self._own_line(statement)
        end = self.source.span(statement)[1]
        line_end = end + len(self.source.rest_of_line(end).rstrip("\r\n"))
        first = Segment(self.source.newline + indentation)
        return Splice(line_end, line_end, (first, *self._render(code, match, indentation)))

    def _edge(self, block: ast.stmt, match: Match | None) -> Splice:
        body: list[ast.stmt] = block.body  # type: ignore[attr-defined]
        operation = self.edit.operation
        code = self._code(getattr(self.edit, operation))
        if operation == "end":
            return self._after(body[-1], code, match)
        docstring = docstring_node(block)
        if docstring is None:
            return self._before(body[0], code, match)
        return self._after(docstring, code, match)

    def _delete(self, statement: ast.stmt, parent: tuple[ast.AST, str] | None) -> Splice:
        self._own_line(statement)
        start, end = self.source.span(statement)
        if parent is not None and [statement] in [getattr(parent[0], f, None) for f in ("body", "orelse", "finalbody")]:
            raise Unplaceable("the statement is the only one of its block")
        first = self.source.starts[self.source.line_of(start)]
        return Splice(first, end + len(self.source.rest_of_line(end)), ())

    def _arguments(self, match: Match) -> list[Splice]:
        call = next(
            (
                n
                for n in ast.walk(self.symbol)
                if isinstance(n, ast.Call) and self.source.span(n) == (match.start, match.end)
            ),
            None,
        )
        if call is None:
            raise Unplaceable("the rule does not match a call")
        out, new = [], []
        indentation = self.source.line_indentation(match.start)
        for name, value in (self.edit.argument or {}).items():
            code = self._render(self._code(value, expression=True), match, indentation)
            given = next((k for k in call.keywords if k.arg == name), None)
            if given is not None:
                out.append(Splice(*self.source.span(given.value), code))
            else:
                new.append((Segment(f"{name}="), *code))
        return [*out, self._new_arguments(call, new)] if new else out

    def _new_arguments(self, call: ast.Call, new: Sequence[tuple[Segment, ...]]) -> Splice:
        """All arguments that a call does not have yet, after its last one, in its own layout."""
        call_end = self.source.span(call)[1]
        close = call_end - 1
        given = [*call.args, *(k.value for k in call.keywords)]
        if not given:
            return Splice(close, close, _joined(new, ", "))
        if len(given) == 1 and isinstance(given[0], ast.GeneratorExp) and self.source.span(given[0])[1] == call_end:
            raise Unplaceable("the only argument is a bare generator")
        last = max(given, key=lambda node: self.source.span(node)[1])
        end = self.source.span(last)[1]
        tail = re.sub(r"#[^\r\n]*", lambda found: " " * len(found.group()), self.source.text[end:close])
        comma = tail.find(",")
        if comma < 0:
            at = end + tail.rfind(")") + 1
            return Splice(at, at, (Segment(", "), *_joined(new, ", ")))
        if "\n" not in tail[comma:]:
            at = end + comma + 1
            return Splice(at, at, (Segment(" "), *_joined(new, ", ")))
        keyword = next((k for k in call.keywords if k.value is last), None)
        lead = self.source.newline + self.source.line_indentation(self.source.span(keyword or last)[0])
        at = end + comma + 1
        at += len(self.source.rest_of_line(at).rstrip("\r\n"))
        return Splice(at, at, (Segment(lead), *_joined(new, "," + lead), Segment(",")))


def _joined(parts: Sequence[tuple[Segment, ...]], separator: str) -> tuple[Segment, ...]:
    out: list[Segment] = []
    for i, part in enumerate(parts):
        out += [Segment(separator)] if i else []
        out += part
    return tuple(out)
