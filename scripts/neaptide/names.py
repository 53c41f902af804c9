"""Names that inserted code reads and nothing binds: a NameError that no import would show."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Sequence

from neaptide.symbols import DEFINITIONS
from neaptide.text import Source

_SCOPES = (*DEFINITIONS, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_STAR = re.compile(r"\bimport\s+\*")
_ALWAYS = frozenset(dir(builtins)) | {"__file__", "__name__", "__doc__", "__package__", "__spec__", "__class__"}

_OF_CLASSES = frozenset({"__qualname__", "__module__"})


def unbound_names(source: Source, ranges: Sequence[tuple[int, int]]) -> list[str]:
    """Names read or deleted inside the code-point ``ranges`` that no enclosing scope binds.

    A scope binds a name wherever in it the binding stands; that it runs first is not checked. A module with
    ``import *`` is taken to bind everything.
    """
    if _STAR.search(source.text) and _imports_star(source.tree):
        return []
    unbound: set[str] = set()
    visited: set[int] = set()
    lines = [(source.line_of(low) + 1, source.line_of(max(low, high - 1)) + 1) for low, high in ranges]

    def visit(node: ast.AST, here: frozenset[str], inside: frozenset[str]) -> None:
        """``here``: what the code around the node may read; ``inside``: what a function in it may."""
        if not _on_lines(node, lines):
            return
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store) and node.id not in here:
            start = source.span(node)[0]
            if any(low <= start < high for low, high in ranges):
                unbound.add(node.id)
        if isinstance(node, _SCOPES):
            own, parameters = _bound_in(node), _type_parameters(node)
            for part in _run_around(node):
                visit(part, here | parameters, inside | parameters)
                visited.add(id(part))
            # What a class binds its functions do not see, but for its type parameters.
            of_class = isinstance(node, ast.ClassDef)
            here = inside | own | (_OF_CLASSES if of_class else frozenset())
            inside = inside | (parameters if of_class else own)
        for child in ast.iter_child_nodes(node):
            if id(child) not in visited:
                visit(child, here, inside)

    declared = {name for node in ast.walk(source.tree) if isinstance(node, ast.Global) for name in node.names}
    known = _ALWAYS | _bound_in(source.tree) | declared
    visit(source.tree, known, known)
    return sorted(unbound)


def _on_lines(node: ast.AST, lines: Sequence[tuple[int, int]]) -> bool:
    """Whether a node reaches into one of the line ranges, decorators included; a node without a place may."""
    last = getattr(node, "end_lineno", None)
    if last is None:
        return True
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])  # type: ignore[attr-defined]
    return any(first <= end and start <= last for start, end in lines)


def _imports_star(tree: ast.Module) -> bool:
    return any(isinstance(n, ast.ImportFrom) and n.names[0].name == "*" for n in ast.walk(tree))


def _bound_in(scope: ast.AST) -> frozenset[str]:
    """Names that a scope binds itself, not those of the scopes inside it."""
    names: set[str] = set()
    todo = list(ast.iter_child_nodes(scope))
    while todo:
        node = todo.pop()
        if isinstance(node, DEFINITIONS):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {a.asname or a.name.split(".")[0] for a in node.names}
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            names |= set(node.names)
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
            names.add(node.name)
        elif isinstance(node, ast.MatchMapping) and node.rest:
            names.add(node.rest)
        elif type(node).__name__ in ("TypeVar", "ParamSpec", "TypeVarTuple"):
            names.add(node.name)  # type: ignore[attr-defined]
        if not isinstance(node, _SCOPES):
            todo.extend(ast.iter_child_nodes(node))
        elif isinstance(node, DEFINITIONS):
            todo.extend(_run_around(node))
        else:
            # A walrus inside a comprehension binds around it.
            todo.extend(n for n in ast.walk(node) if isinstance(n, ast.NamedExpr))
    return frozenset(names)


def _type_parameters(node: ast.AST) -> frozenset[str]:
    return frozenset(parameter.name for parameter in getattr(node, "type_params", ()))


def _run_around(node: ast.AST) -> list[ast.AST]:
    """What of a scope reads the names around it: decorators, defaults, annotations, bases; the first of what a
    comprehension goes through.
    """
    if generators := getattr(node, "generators", ()):
        return [generators[0].iter]
    arguments = getattr(node, "args", None)
    parts = [*getattr(node, "decorator_list", ()), *getattr(node, "bases", ()), getattr(node, "returns", None)]
    parts += [keyword.value for keyword in getattr(node, "keywords", ())]
    if isinstance(arguments, ast.arguments):
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        parts += [*arguments.defaults, *arguments.kw_defaults, *(a.annotation for a in every if a is not None)]
    return [part for part in parts if part is not None]
