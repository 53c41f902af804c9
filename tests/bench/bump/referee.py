"""One judgement for every tool: does an edit stand where it belongs, by the text alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from enum import StrEnum

from neaptide.anchor import find
from neaptide.edits import expectation_span
from neaptide.model import Edit
from neaptide.symbols import MODULE, find_symbol
from neaptide.text import Source

_WORD = re.compile(r"\w+|\S")


class Verdict(StrEnum):
    """Right: all of it inside the symbol. Wrong: elsewhere in the file, or no Python. Not: neither."""

    RIGHT = "right"
    WRONG = "wrong"
    NOT = "not applied"


def plain(text: str) -> str:
    """Words and signs without white space, each by itself: no name is found inside a longer one."""
    return "".join(f"<{word}>" for word in _WORD.findall(text))


class Reading:
    """A file: parsed if it can be, and its text by scope."""

    def __init__(self, data: bytes | None) -> None:
        self.source = Source((data or b"").decode("utf-8"))
        self.whole = plain(self.source.text)
        self._scopes: dict[str, str] = {}
        try:
            _ = self.source.tree
            self.parses = data is not None
        except SyntaxError:
            self.parses = False

    def inside(self, scope: str) -> str:
        """The text of a symbol; nothing where there is none."""
        if scope not in self._scopes:
            node = find_symbol(self.source.tree, scope) if self.parses else None
            if isinstance(node, ast.Module):
                self._scopes[scope] = self.whole
            elif node is None:
                self._scopes[scope] = ""
            else:
                start, end = self.source.span(node)
                self._scopes[scope] = plain(self.source.text[start:end])
        return self._scopes[scope]


def scope_of(edit: Edit) -> str:
    """The symbol that holds what an edit writes: around the anchored one where the edit is about the whole of it."""
    if edit.match is None and edit.operation in ("replace", "before", "after"):
        return edit.symbol.rpartition(".")[0] or MODULE
    return edit.symbol


def grown(scope: str, text: str, before: Reading, after: Reading) -> tuple[int, int]:
    """How many more times a text stands in a scope and in the rest of the file than before."""
    wanted = plain(text)
    counts = [(r.inside(scope).count(wanted), r.whole.count(wanted)) for r in (before, after)]
    inside = counts[1][0] - counts[0][0]
    return inside, counts[1][1] - counts[0][1] - inside


def judge(
    edit: Edit, texts: Sequence[str], reference: Sequence[tuple[int, int]], before: Reading, after: Reading
) -> Verdict:
    """The verdict on one edit after its patch.

    Args:
        texts: what the edit writes (or takes away), one a splice.
        reference: for each text how it grows, inside and outside the scope, on the pin's own files.
    """
    found = [grown(scope_of(edit), text, before, after) for text in texts]
    if not after.parses:
        # No scope can be told: any change of the count is of this edit.
        return Verdict.WRONG if any(f != (0, 0) for f in found) else Verdict.NOT
    inside = [f[0] for f in found] == [r[0] for r in reference]
    if inside and holds(edit, after) and at_top(edit, after):
        return Verdict.RIGHT
    taken = edit.operation == "delete"
    elsewhere = any(abs(f[1]) > abs(r[1]) for f, r in zip(found, reference, strict=True))
    misplaced = elsewhere if not taken else any(f[1] < r[1] for f, r in zip(found, reference, strict=True))
    return Verdict.WRONG if misplaced or (inside and not at_top(edit, after)) else Verdict.NOT


def holds(edit: Edit, after: Reading) -> bool:
    """Whether every ``expect`` of the edit has a match."""
    span = expectation_span(after.source, edit)
    return span is not None and all(find(after.source, rule, span) for rule in edit.expectations)


def at_top(edit: Edit, after: Reading) -> bool:
    """Whether an import stands among the statements of the module, not in a definition."""
    if edit.import_ is None:
        return True
    there = {ast.dump(s) for s in _module_statements(after.source.tree)}
    return all(ast.dump(s) in there for s in ast.parse(edit.import_).body)


def _module_statements(tree: ast.Module) -> list[ast.stmt]:
    out, todo = [], list(tree.body)
    while todo:
        statement = todo.pop()
        if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            out.append(statement)
            todo += [child for child in ast.iter_child_nodes(statement) if isinstance(child, ast.stmt)]
    return out
