"""Guards: sha256 of a serialised ``ast`` subtree, equal on CPython 3.11 to 3.14.

``ast.dump`` is not usable for this: its output follows each interpreter's field
list and its omission rules. The serialisation here writes node names and
the fields that carry meaning, and leaves out what differs between
interpreters or does not reach the compiled code: absent and empty fields, ``ctx``,
``kind``, type comments, positions, docstrings, and how the text of an f-string is cut into
pieces (3.11, 3.12 and 3.13 disagree on that).

The module imports the standard library only, so any interpreter can run it
as a script: ``python guard.py FILE...`` prints one line of JSON per file.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from collections.abc import Iterable, Sequence

_LEFT_OUT = frozenset({"ctx", "kind", "type_comment", "type_ignores"})
_VALUE_NODES = (ast.Constant, ast.MatchSingleton)
BODY_FIELDS = ("body", "orelse", "finalbody", "handlers", "cases")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def _is_docstring(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def docstring_node(node: ast.AST) -> ast.Expr | None:
    """The docstring statement of a module, class or function, if it has one."""
    if isinstance(node, _DOCUMENTED) and node.body and _is_docstring(node.body[0]):
        statement = node.body[0]
        assert isinstance(statement, ast.Expr)
        return statement
    return None


def _scalar(value: object) -> str:
    """One constant, written without ``repr`` of strings (its escapes follow Unicode tables)."""
    if isinstance(value, str):
        return "s" + value.encode("utf-8", "surrogatepass").hex()
    if isinstance(value, bytes):
        return "b" + value.hex()
    if isinstance(value, bool) or value is None or value is Ellipsis:
        return f"k{value}"
    if isinstance(value, float):
        return "f" + value.hex()
    if isinstance(value, complex):
        return f"c{value.real.hex()},{value.imag.hex()}"
    if isinstance(value, int):
        return f"i{value:x}"
    raise TypeError(f"no serialisation for a constant of type {type(value).__name__}")


def _pieces(values: Sequence[object]) -> list[object]:
    """The parts of an f-string with adjacent texts joined and empty ones left out."""
    out: list[object] = []
    for item in values:
        if isinstance(item, ast.Constant) and isinstance(item.value, str):
            last = out[-1] if out else None
            if isinstance(last, ast.Constant) and isinstance(last.value, str):
                out[-1] = ast.Constant(last.value + item.value)
            elif item.value:
                out.append(item)
        else:
            out.append(item)
    return out


def _items(owner: ast.AST, name: str, values: Sequence[object]) -> list[object]:
    if name == "body" and docstring_node(owner) is not None:
        return list(values[1:])
    if isinstance(owner, ast.JoinedStr):
        return _pieces(values)
    return list(values)


def serialise(node: object, skip: Iterable[str] = ()) -> str:
    """Text form of a node; ``skip`` names fields of this node (not of its children) left out."""
    if not isinstance(node, ast.AST):
        return "~" if node is None else _scalar(node)
    skipped = _LEFT_OUT.union(skip)
    parts = []
    for name, value in ast.iter_fields(node):
        if name in skipped:
            continue
        if isinstance(node, _VALUE_NODES) and name == "value":
            parts.append(f"value={_scalar(value)}")
        elif isinstance(value, list):
            items = _items(node, name, value)
            if items:
                parts.append(f"{name}=[{','.join(serialise(i) for i in items)}]")
        elif name == "format_spec" and value is not None:
            pieces = _pieces(value.values if isinstance(value, ast.JoinedStr) else [value])
            if pieces:
                parts.append(f"{name}=[{','.join(serialise(p) for p in pieces)}]")
        elif value is not None:
            parts.append(f"{name}={serialise(value)}")
    return f"{type(node).__name__}({';'.join(sorted(parts))})"


def digest(*texts: str) -> str:
    """sha256 over the given serialisations, as hexadecimal text."""
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def node_guard(node: ast.AST) -> str:
    """Guard of a whole subtree: the symbol guard of a definition, say."""
    return digest(serialise(node))


def header(node: ast.AST) -> str:
    """A compound statement without its blocks: ``for`` target and iterable, ``if`` test, ..."""
    return serialise(node, BODY_FIELDS)


def module_guard(source: str | bytes) -> str:
    """Guard of a whole module."""
    return node_guard(ast.parse(source))


def _main(paths: Sequence[str]) -> int:
    for path in paths:
        with open(path, "rb") as handle:
            print(json.dumps([path, module_guard(handle.read())]))
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
