"""The drop-in contract: a replacement module still offers what anything upstream takes from the original."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from neaptide.symbols import FUNCTIONS

Function = ast.FunctionDef | ast.AsyncFunctionDef
# An import statement, with names in parentheses or on continued lines, wherever on its line it begins.
_IMPORT = re.compile(rb"\b(?:from|import)\b(?:[^\n(\\]|\\\r?\n)*(?:\([^)]*\))?")
_BINDING_DECORATORS = frozenset({"staticmethod", "classmethod", "property", "cached_property"})


def dotted_name(package: str, path: str) -> str:
    """``a/b.py`` of package ``p`` is ``p.a.b``; ``__init__.py`` is the package itself."""
    parts = path.removesuffix(".py").split("/")
    return ".".join([package, *(parts[:-1] if parts[-1] == "__init__" else parts)])


def broken_promises(package: str, path: str, old: bytes, new: bytes, modules: Mapping[str, bytes]) -> list[str]:
    """What the replacement ``new`` of module ``path`` takes away from upstream's other modules.

    A public definition, or any name that another module takes, must still exist; a function
    must take every call that the old signature took; a class keeps its methods and attributes so.
    """
    before, after = _names(ast.parse(old)), _names(ast.parse(new))
    public = {n for n, s in before.items() if not n.startswith("_") and not isinstance(s, (ast.Import, ast.ImportFrom))}
    problems = []
    for name in sorted((public | _taken(package, path, modules)) & set(before)):
        if name not in after:
            problems.append(f"{name} is gone")
        else:
            problems += _compare(name, before[name], after[name])
    return problems


def _names(tree: ast.Module | ast.ClassDef) -> dict[str, ast.stmt]:
    """Names that a module or class binds, through ``if``, ``try`` and ``with``."""
    out: dict[str, ast.stmt] = {}
    for statement in _statements(tree.body):
        if isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
            out[statement.name] = statement
        elif isinstance(statement, ast.Assign):
            names = [n for t in statement.targets for n in ast.walk(t) if isinstance(n, ast.Name)]
            out.update(dict.fromkeys((n.id for n in names if isinstance(n.ctx, ast.Store)), statement))
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            out[statement.target.id] = statement
        elif isinstance(statement, (ast.Import, ast.ImportFrom)):
            out.update({a.asname or a.name.split(".")[0]: statement for a in statement.names})
    return out


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        yield statement
        if isinstance(statement, (ast.If, ast.Try, ast.With)):
            blocks = [statement.body, getattr(statement, "orelse", []), getattr(statement, "finalbody", [])]
            blocks += [h.body for h in getattr(statement, "handlers", [])]
            for block in blocks:
                yield from _statements(block)


def _taken(package: str, path: str, modules: Mapping[str, bytes]) -> set[str]:
    """Names of module ``path`` that other modules of the package import or reach through it."""
    dotted = dotted_name(package, path)
    found: set[str] = set()
    for other, source in modules.items():
        if other == path or not _may_import(source, dotted):
            continue
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):
            continue  # a template, or syntax of another Python: it imports nothing here
        aliases = {dotted}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                origin = _absolute(package, other, node)
                found |= {a.name for a in node.names} if origin == dotted else set()
                aliases |= {a.asname or a.name for a in node.names if f"{origin}.{a.name}" == dotted}
            elif isinstance(node, ast.Import):
                aliases |= {a.asname for a in node.names if a.name == dotted and a.asname}
        attributes = (n for n in ast.walk(tree) if isinstance(n, ast.Attribute))
        found |= {n.attr for n in attributes if _chain(n.value) in aliases}
    return found


def _may_import(source: bytes, dotted: str) -> bool:
    """Whether to parse a module: it has the dotted name, or the last part of it in an import statement."""
    tail = dotted.rsplit(".", 1)[-1].encode()
    return dotted.encode() in source or (
        tail in source and any(tail in statement.group() for statement in _IMPORT.finditer(source))
    )


def _chain(node: ast.expr) -> str:
    """``a.b.c`` of attributes of a name; empty for other expressions."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join(reversed([*parts, node.id])) if isinstance(node, ast.Name) else ""


def _absolute(package: str, path: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = [package, *path.split("/")[:-1]]
    parts = parts[: len(parts) - node.level + 1]
    return ".".join([*parts, *([node.module] if node.module else [])])


def _compare(name: str, old: ast.stmt, new: ast.stmt) -> list[str]:
    if isinstance(old, ast.ClassDef):
        return _compare_class(name, old, new) if isinstance(new, ast.ClassDef) else [f"{name} is no longer a class"]
    if isinstance(old, FUNCTIONS):
        return _fits(name, old, new) if isinstance(new, FUNCTIONS) else []
    return []


def _compare_class(name: str, old: ast.ClassDef, new: ast.ClassDef) -> list[str]:
    had, has = _names(old), _names(new)
    problems = []
    for member in had:
        private = member.startswith("_") and not (member.startswith("__") and member.endswith("__"))
        if private:
            continue
        if member in has:
            problems += _compare(f"{name}.{member}", had[member], has[member])
        elif not new.bases:
            problems.append(f"{name}.{member} is gone")
    return problems


@dataclass(frozen=True)
class _Signature:
    """``positional`` and ``keyword`` map names to whether they are optional; positional ones are in order."""

    positional: dict[str, bool]
    positional_only: frozenset[str]
    keyword: dict[str, bool]
    takes_more: bool
    takes_any_keyword: bool

    @classmethod
    def of(cls, function: Function) -> _Signature:
        args = function.args
        names = [a.arg for a in (*args.posonlyargs, *args.args)]
        required = len(names) - len(args.defaults)
        return cls(
            positional={n: i >= required for i, n in enumerate(names)},
            positional_only=frozenset(a.arg for a in args.posonlyargs),
            keyword={a.arg: d is not None for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True)},
            takes_more=args.vararg is not None,
            takes_any_keyword=args.kwarg is not None,
        )

    def optional(self, name: str) -> bool | None:
        """Whether ``name`` can be passed by keyword, and if so whether it may be left out; None if it cannot."""
        if name in self.keyword:
            return self.keyword[name]
        if name in self.positional and name not in self.positional_only:
            return self.positional[name]
        return True if self.takes_any_keyword else None


def _fits(name: str, old: Function, new: Function) -> list[str]:
    """Whether every call that fits ``old`` fits ``new``."""
    was, now = _Signature.of(old), _Signature.of(new)
    problems = []
    if isinstance(old, ast.AsyncFunctionDef) != isinstance(new, ast.AsyncFunctionDef):
        problems.append(f"{name} changed between def and async def")
    if _bindings(old) != _bindings(new):
        problems.append(f"{name} changed how it is bound ({', '.join(sorted(_bindings(old) ^ _bindings(new)))})")
    order = list(now.positional)
    for i, (parameter, optional) in enumerate(was.positional.items()):
        if i >= len(order) and not now.takes_more:
            problems.append(f"{name}: positional parameter {parameter} is gone")
            continue
        if i < len(order) and optional and not now.positional[order[i]]:
            problems.append(f"{name}: {parameter} lost its default")
        if parameter in was.positional_only:
            continue
        if now.optional(parameter) is None or (i < len(order) and order[i] != parameter and parameter in order):
            problems.append(f"{name}: {parameter} can no longer be passed by its name and place")
    for parameter, optional in was.keyword.items():
        still = now.optional(parameter)
        if still is None:
            problems.append(f"{name}: keyword {parameter} is gone")
        elif optional and not still:
            problems.append(f"{name}: {parameter} lost its default")
    problems += [f"{name}: *{lost} is gone" for lost in _lost_stars(was, now)]
    known = set(was.keyword) | set(was.positional)
    new_ones = [*list(now.positional.items())[len(was.positional) :], *now.keyword.items()]
    problems += [f"{name}: new parameter {n} has no default" for n, free in new_ones if not free and n not in known]
    return problems


def _bindings(function: Function) -> set[str]:
    names = {ast.unparse(d).rsplit(".", 1)[-1] for d in function.decorator_list}
    return names & _BINDING_DECORATORS


def _lost_stars(was: _Signature, now: _Signature) -> list[str]:
    lost = ["args"] if was.takes_more and not now.takes_more else []
    return lost + (["*kwargs"] if was.takes_any_keyword and not now.takes_any_keyword else [])
