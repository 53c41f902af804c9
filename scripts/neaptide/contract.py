"""The drop-in contract: a replacement module still offers what anything upstream takes from the original."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from neaptide.symbols import FUNCTIONS

Function = ast.FunctionDef | ast.AsyncFunctionDef


def broken_promises(package: str, path: str, old: bytes, new: bytes, modules: Mapping[str, bytes]) -> list[str]:
    """What the replacement ``new`` of module ``path`` takes away from upstream's other modules.

    A public name, or any name that another module imports, must still exist; a function
    must take every call that the old signature took; a class keeps its methods so.
    """
    before, after = _names(ast.parse(old)), _names(ast.parse(new))
    wanted = {n for n in before if not n.startswith("_")} | _imported(package, path, modules)
    problems = []
    for name in sorted(wanted & set(before)):
        if name not in after:
            problems.append(f"{name} is gone")
            continue
        problems += _compare(name, before[name], after[name])
    return problems


def _names(tree: ast.Module) -> dict[str, ast.stmt]:
    """Names that a module binds at its top, through ``if`` and ``try``."""
    out: dict[str, ast.stmt] = {}
    for statement in _statements(tree.body):
        if isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
            out[statement.name] = statement
        elif isinstance(statement, ast.Assign):
            out.update({t.id: statement for t in statement.targets if isinstance(t, ast.Name)})
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            out[statement.target.id] = statement
        elif isinstance(statement, (ast.Import, ast.ImportFrom)):
            out.update({a.asname or a.name.split(".")[0]: statement for a in statement.names})
    return out


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        yield statement
        if isinstance(statement, (ast.If, ast.Try)):
            for block in (statement.body, statement.orelse, getattr(statement, "finalbody", [])):
                yield from _statements(block)


def _imported(package: str, path: str, modules: Mapping[str, bytes]) -> set[str]:
    """Names of module ``path`` that other modules of the package import or reach through it."""
    dotted = ".".join([package, *path.removesuffix(".py").removesuffix("/__init__").split("/")])
    tail = dotted.rsplit(".", 1)[-1].encode()
    found: set[str] = set()
    for other, source in modules.items():
        if other == path or tail not in source:
            continue
        tree = ast.parse(source)
        aliases = {dotted}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                origin = _absolute(package, other, node)
                if origin == dotted:
                    found |= {a.name for a in node.names}
                aliases |= {a.asname or a.name for a in node.names if f"{origin}.{a.name}" == dotted}
            elif isinstance(node, ast.Import):
                aliases |= {a.asname for a in node.names if a.name == dotted and a.asname}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in aliases:
                found.add(node.attr)
    return found


def _absolute(package: str, path: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = [package, *path.split("/")[:-1]]
    parts = parts[: len(parts) - node.level + 1]
    return ".".join([*parts, *([node.module] if node.module else [])])


def _compare(name: str, old: ast.stmt, new: ast.stmt) -> list[str]:
    if isinstance(old, ast.ClassDef):
        if not isinstance(new, ast.ClassDef):
            return [f"{name} is no longer a class"]
        methods = {s.name: s for s in new.body if isinstance(s, FUNCTIONS)}
        problems = []
        for method in (s for s in old.body if isinstance(s, FUNCTIONS)):
            if method.name.startswith("_") and method.name != "__init__":
                continue
            if method.name in methods:
                problems += _fits(f"{name}.{method.name}", method, methods[method.name])
            elif not new.bases:
                problems.append(f"{name}.{method.name} is gone")
        return problems
    if isinstance(old, FUNCTIONS):
        return _fits(name, old, new) if isinstance(new, FUNCTIONS) else []
    return []


def _fits(name: str, old: Function, new: Function) -> list[str]:
    """Whether every call that fits ``old`` fits ``new``."""
    was, now = old.args, new.args
    had, has = [a.arg for a in was.args], [a.arg for a in now.args]
    problems = []
    if not now.vararg and has[: len(had)] != had:
        problems.append(f"{name} takes positional ({', '.join(has)}), was ({', '.join(had)})")
    optional = len(was.defaults)
    for arg in had[len(had) - optional :] if optional else []:
        if arg in has and has.index(arg) < len(has) - len(now.defaults):
            problems.append(f"{name}: {arg} lost its default")
    for arg in has[len(had) :]:
        if has.index(arg) < len(has) - len(now.defaults):
            problems.append(f"{name}: new parameter {arg} has no default")
    named = set(has) | {a.arg for a in now.kwonlyargs}
    problems += [f"{name}: keyword {a.arg} is gone" for a in was.kwonlyargs if a.arg not in named and not now.kwarg]
    known = {a.arg for a in was.kwonlyargs} | set(had)
    problems += [
        f"{name}: new keyword {a.arg} has no default"
        for a, default in zip(now.kwonlyargs, now.kw_defaults, strict=True)
        if default is None and a.arg not in known
    ]
    return problems
