"""Finding a qualified symbol in a module, and the statements and blocks around a place in it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from neaptide.guard import BODY_FIELDS, digest, header, node_guard, serialise
from neaptide.text import Source

MODULE = "<module>"
_PART = re.compile(r"^(?P<name>[A-Za-z_]\w*)(?:#(?P<index>[1-9]\d*))?$")
DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def is_symbol_name(symbol: str) -> bool:
    return symbol == MODULE or all(_PART.match(part) for part in symbol.split("."))


def _blocks(node: ast.AST) -> Iterator[tuple[str, list[ast.stmt]]]:
    """The statement lists directly below a node, with the label of each."""
    for name in BODY_FIELDS:
        for child in getattr(node, name, None) or []:
            if isinstance(child, (ast.ExceptHandler, ast.match_case)):
                yield f"{name}:{header(child)}", child.body
        if name in ("body", "orelse", "finalbody") and isinstance(getattr(node, name, None), list):
            yield name, getattr(node, name)


def _scope_statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Statements of one scope in order, through ``if``/``try``/``with`` but not into definitions."""
    for _, block in _blocks(node):
        for statement in block:
            yield statement
            if not isinstance(statement, DEFINITIONS):
                yield from _scope_statements(statement)


def _binds(statement: ast.stmt, name: str) -> bool:
    if isinstance(statement, DEFINITIONS):
        return statement.name == name
    if isinstance(statement, ast.Assign):
        return any(isinstance(t, ast.Name) and t.id == name for t in statement.targets)
    if isinstance(statement, ast.AnnAssign):
        return isinstance(statement.target, ast.Name) and statement.target.id == name
    return False


def find_symbol(tree: ast.Module, symbol: str) -> ast.AST | None:
    """The definition or assignment that ``symbol`` names, the module for ``<module>``, or None."""
    node: ast.AST = tree
    if symbol == MODULE:
        return tree
    for part in symbol.split("."):
        found = _PART.match(part)
        if found is None:
            return None
        index = int(found["index"] or 1)
        hits = _bindings(node, found["name"])
        if len(hits) < index:
            return None
        node = hits[index - 1]
    return node


def bound_names(scope: ast.AST) -> Iterator[str]:
    """Names of definitions and assignments of a scope, each as often as it is bound."""
    for statement in _scope_statements(scope):
        if isinstance(statement, DEFINITIONS):
            yield statement.name
        elif isinstance(statement, ast.Assign):
            yield from (t.id for t in statement.targets if isinstance(t, ast.Name))
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id


def _bindings(scope: ast.AST, name: str) -> list[ast.stmt]:
    """Statements of a scope that bind ``name``, in the order of the text."""
    hits = [s for s in _scope_statements(scope) if _binds(s, name)]
    return sorted(hits, key=lambda s: (s.lineno, s.col_offset))


def ambiguous_part(tree: ast.Module, symbol: str) -> str:
    """The first unnumbered part of ``symbol`` that is defined more than once in its scope, or nothing."""
    scope: ast.AST | None = tree
    parts = [] if symbol == MODULE else symbol.split(".")
    for i, part in enumerate(parts):
        assert scope is not None
        if "#" not in part and len(_bindings(scope, part)) > 1:
            return part
        scope = find_symbol(tree, ".".join(parts[: i + 1]))
    return ""


@dataclass(frozen=True)
class Place:
    """A statement inside a symbol and the blocks that lead to it, outermost first."""

    statement: ast.stmt
    path: tuple[tuple[ast.AST, str], ...]


def statement_at(source: Source, symbol: ast.AST, start: int, end: int) -> Place | None:
    """The innermost statement of ``symbol`` that covers ``[start, end)``; a definition itself, for its header."""

    def descend(node: ast.AST, path: tuple[tuple[ast.AST, str], ...]) -> Place | None:
        for label, block in _blocks(node):
            for statement in block:
                low, high = source.span(statement)
                if low <= start and end <= high:
                    here = (*path, (node, label))
                    return descend(statement, here) or Place(statement, here)
        return None

    if isinstance(symbol, (ast.Assign, ast.AnnAssign)):
        return Place(symbol, ())
    if isinstance(symbol, DEFINITIONS) and source.span(symbol)[0] <= start and end <= source.span(symbol.body[0])[0]:
        return Place(symbol, ())
    return descend(symbol, ())


def compound_at(source: Source, symbol: ast.AST, start: int) -> ast.stmt | None:
    """The compound statement of ``symbol`` that begins exactly at ``start``."""
    for node in ast.walk(symbol):
        if isinstance(node, ast.stmt) and isinstance(getattr(node, "body", None), list):
            if source.span(node)[0] == start:
                return node
    return None


def site_guard(place: Place, symbol: ast.AST, *, header_only: bool) -> str:
    """Guard of the matched statement and of the headers of the blocks around it, inside the symbol.

    Args:
        place: the matched statement and its path.
        symbol: the anchored symbol; its own header is not part of the site.
        header_only: for an edit in the header of a compound statement, or at an edge of its
            block: the other statements of its blocks are not part of the site.
    """
    around = [f"{'' if node is symbol else header(node)}|{label}" for node, label in place.path]
    compound = bool(getattr(place.statement, "body", None))
    own = header(place.statement) if header_only and compound else serialise(place.statement)
    return digest(*around, own)


def signature_guard(node: ast.AST) -> str:
    """Guard of a definition's header: name, decorators, parameters or bases."""
    return digest(header(node)) if isinstance(node, DEFINITIONS) else node_guard(node)


def parameter_guard(function: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> str:
    """Guard of one parameter: its name, annotation and default."""
    found = find_parameter(function, name)
    if found is None:
        return digest("absent")
    parameter, default = found
    return digest(serialise(parameter), serialise(default))


def find_parameter(
    function: ast.FunctionDef | ast.AsyncFunctionDef, name: str
) -> tuple[ast.arg, ast.expr | None] | None:
    """A parameter and its default expression."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    gap = len(positional) - len(arguments.defaults)
    pairs: list[tuple[ast.arg, ast.expr | None]] = [
        (arg, arguments.defaults[i - gap] if i >= gap else None) for i, arg in enumerate(positional)
    ]
    pairs += list(zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True))
    return next(((a, d) for a, d in pairs if a.arg == name), None)
