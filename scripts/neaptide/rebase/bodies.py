"""How alike two definitions are, by the statements in them."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator

from neaptide.guard import BODY_FIELDS, digest, docstring_node, serialise
from neaptide.symbols import DEFINITIONS

Bag = Counter[str]


def definitions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Every class and function of a module with its qualified name, through blocks, outermost first."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, DEFINITIONS):
            name = f"{prefix}{child.name}"
            yield name, child
            yield from definitions(child, f"{name}.")
        elif not isinstance(child, ast.expr):
            yield from definitions(child, prefix)


def bag(node: ast.AST) -> Bag:
    """Digests of the simple statements and block headers of a definition, its own header and docstring left out."""
    own = docstring_node(node)
    out: Bag = Counter()
    for child in ast.walk(node):
        if isinstance(child, ast.stmt) and child is not node and child is not own:
            out[digest(serialise(child, BODY_FIELDS))] += 1
    return out


def likeness(first: Bag, second: Bag) -> float:
    """Twice the common statements over all of both (Dice's coefficient): 0 for nothing in common, 1 for all."""
    total = sum(first.values()) + sum(second.values())
    return 2 * sum((first & second).values()) / total if total else 0.0


def share(part: Bag, whole: Bag) -> float:
    """How much of ``whole`` stands in ``part``."""
    total = sum(whole.values())
    return sum((part & whole).values()) / total if total else 0.0


def identifiers(node: ast.AST, most: int) -> list[str]:
    """The longest names that a definition reads, calls or assigns; what a copy of it is most likely to hold."""
    names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    names |= {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
    return sorted(names, key=lambda n: (-len(n), n))[:most]
