"""Whatever upstream writes: what has nothing to do with an anchor changes no outcome, and no edit lands elsewhere."""

from __future__ import annotations

import ast
import itertools
import random
import re
from collections.abc import Callable

import bumped
import pytest
from bump_cases import CASES, Case, check
from bumped import CORE, FILES, Bump
from neaptide.outcomes import Status
from neaptide.rebase.describe import todo
from neaptide.symbols import find_symbol
from neaptide.text import Source

SEEDS = range(8)
Random = random.Random
WORDS = ("ticket", "window", "shard", "router", "stamp", "ledger", "beacon", "anchor", "folio", "margin")


bump = bumped.bump


# Unrelated changes: each takes a module's text and gives another.


def new_function(text: str, rng: Random) -> str:
    """A function that nothing else resembles, between two definitions of the module."""
    name = "_".join(rng.sample(WORDS, 3))
    body = [
        f"    {rng.choice(WORDS)} = {rng.choice(WORDS)}_{rng.randrange(100)}({rng.randrange(100)})" for _ in range(6)
    ]
    added = f"def {name}({rng.choice(WORDS)}):\n" + "\n".join([*body, f"    return {rng.choice(WORDS)}"])
    return "\n\n\n".join(_inserted(_blocks(text), added, rng))


def new_order(text: str, rng: Random) -> str:
    """The definitions of the module in another order; what stands before the first stays there."""
    blocks = _blocks(text)
    head = next((i for i, b in enumerate(blocks) if re.match(r"(@|def |class |async )", b)), len(blocks))
    tail = blocks[head:]
    rng.shuffle(tail)
    return "\n\n\n".join([*blocks[:head], *tail])


def comments(text: str, rng: Random) -> str:
    """Comment lines, blank lines, and comments at the ends of statements."""
    lines, at = text.split("\n"), _statement_lines(text)
    for line, column in sorted(rng.sample(at, min(4, len(at))), reverse=True):
        lines[line:line] = rng.choice(
            ([" " * column + f"# {rng.choice(WORDS)} = {rng.random()}"], [""], ["", "# here"])
        )
    return "\n".join(lines)


def docstrings(text: str, rng: Random) -> str:
    """Other docstrings, and docstrings where there were none."""
    lines = text.split("\n")
    found = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)]
    for node in sorted(rng.sample(found, min(2, len(found))), key=lambda n: n.lineno, reverse=True):
        first, indent = node.body[0], " " * node.body[0].col_offset
        if first.lineno == node.lineno:
            continue
        new = [f'{indent}"""{rng.choice(WORDS)} of the {rng.choice(WORDS)}.', f'{indent}"""']
        old = first if ast.get_docstring(node) is not None else None
        lines[first.lineno - 1 : (old.end_lineno if old and old.end_lineno else first.lineno - 1)] = new
    return "\n".join(lines)


def other_layout(text: str, rng: Random) -> str:
    """The whole module printed anew: quotes, parentheses, line breaks."""
    return ast.unparse(ast.parse(text)) + "\n"


def other_names(text: str, rng: Random) -> str:
    """Symbols that no anchor is about get other names."""
    new = {old: f"{rng.choice(WORDS)}_{rng.randrange(1000)}" for old in ("MODES", "POOLS", "R")}
    return re.sub(r"\b(MODES|POOLS|R)\b", lambda found: new[found[1]], text)


def new_constant(text: str, rng: Random) -> str:
    return f"{text}\n\n\n{rng.choice(WORDS).upper()}_{rng.randrange(1000)} = {rng.randrange(1000)}\n"


UNRELATED: tuple[Callable[[str, Random], str], ...] = (
    new_function, new_order, comments, docstrings, other_layout, other_names, new_constant,
)  # fmt: skip


def _blocks(text: str) -> list[str]:
    """A module's text cut at its top-level definitions."""
    starts = [n.lineno for n in ast.parse(text).body if isinstance(n, (ast.FunctionDef, ast.ClassDef))]
    lines = text.split("\n")
    cuts = [0, *(s - 1 for s in starts), len(lines)]
    blocks = ["\n".join(lines[a:b]).strip("\n") for a, b in itertools.pairwise(cuts)]
    return [b for b in blocks if b] or [""]


def _inserted(blocks: list[str], block: str, rng: Random) -> list[str]:
    at = rng.randrange(1, len(blocks) + 1)
    return [*blocks[:at], block, *blocks[at:]]


def _statement_lines(text: str) -> list[tuple[int, int]]:
    """Lines on which a statement begins, with its column."""
    lines = text.split("\n")
    found = {(n.lineno - 1, n.col_offset) for n in ast.walk(ast.parse(text)) if isinstance(n, ast.stmt)}
    return sorted((line, column) for line, column in found if not lines[line][:column].strip())


def noisy(case: Case, rng: Random) -> Case:
    """The same release with unrelated changes in every module."""
    files = dict(case.files)
    for name, text in sorted(files.items()):
        for change in rng.choices(UNRELATED, k=rng.randrange(1, 5)):
            text = change(text, rng)
        files[name] = text
    files[f"toy/{rng.choice(WORDS)}.py"] = new_function(new_function("import os\n", rng), rng)
    return Case(case.patch, case.symbol, files, case.status, case.fate, case.first, case.says, case.version)


# Of a symbol defined twice the first is looked at, and which that is depends on the order.
@pytest.mark.parametrize("name", [n for n in CASES if n != "defined twice"])
def test_unrelated_changes_change_no_outcome(bump: Bump, name: str) -> None:
    for seed in SEEDS:
        case = noisy(CASES[name], Random(f"{name} {seed}"))
        check(bump.on(case.files, case.version), case)


# Changes of anything: whole statements and definitions, wherever they stand.


def _statements(tree: ast.Module) -> list[tuple[list[ast.stmt], int]]:
    """Every statement as its block and its place there."""
    blocks = [b for n in ast.walk(tree) for f in ("body", "orelse") if isinstance(b := getattr(n, f, None), list)]
    return [(block, i) for block in blocks for i in range(len(block))]


def mangled(text: str, rng: Random, times: int) -> str:
    """A module after some moves, copies, removals, renamings and wrappings of its statements."""
    tree = ast.parse(text)
    for _ in range(times):
        spots = _statements(tree)
        if not spots:
            break
        (block, at), (other, there) = rng.choice(spots), rng.choice(spots)
        kind = rng.choice(("remove", "copy", "swap", "rename", "wrap", "constant"))
        if kind == "remove" and len(block) > 1:
            del block[at]
        elif kind == "copy":
            other.insert(there, ast.parse(ast.unparse(block[at])).body[0])
        elif kind == "swap" and block is other:
            block[at], block[there] = block[there], block[at]
        elif kind == "rename" and isinstance(block[at], (ast.FunctionDef, ast.ClassDef)):
            block[at].name = rng.choice(("admit", "total", "subtotal", "scale", "Pool", "dismiss"))
        elif kind == "wrap":
            block[at] = ast.If(ast.Name(rng.choice(WORDS)), [block[at]], [])
        elif kind == "constant":
            for node in ast.walk(block[at]):
                if isinstance(node, ast.Constant) and isinstance(node.value, int):
                    node.value += rng.randrange(2)
        try:
            tree = ast.parse(ast.unparse(ast.fix_missing_locations(tree)))
            compile(tree, "core.py", "exec")  # no `break` outside of a loop, say
        except (SyntaxError, ValueError):
            return text
    return ast.unparse(tree) + "\n"


EDITS = {"total": "mark_total = 1", "admit": "mark_admit = 1", "limit": "mark_limit()"}
# What each edit writes, where it may stand, and what stands just before it.
MARKS = {
    "mark_total = 1": ("Pool.total", "value = math.floor("), "mark_admit = 1": ("admit", "remaining -= needed"),
    "mark_limit()": ("LIMIT", None),
}  # fmt: skip


def test_nothing_is_ever_put_in_a_wrong_place(bump: Bump) -> None:
    """On upstreams that come to every outcome: on those all in conflict, or all clean, it would say little."""
    seen: set[Status] = set()
    for seed in range(80):
        rng = Random(seed)
        core = mangled(CORE, rng, rng.randrange(1, 7))
        planned = bump.on({**FILES, "toy/core.py": core, "toy/spare.py": mangled(CORE, rng, 3)})
        assert set(planned.plan.files) <= {"core.py", "new.py"}, seed
        for outcome in planned.plan.outcomes:
            if outcome.status is not Status.CLEAN:
                assert all((outcome.symbol, outcome.detail, todo(planned, outcome, frozenset()))), seed
            if outcome.patch in EDITS and outcome.symbol != "<module>":
                patch = next(p for p in planned.plan.patches if p.patch.name == outcome.patch)
                text = patch.files.get("core.py", core.encode()).decode()
                check_place(text, EDITS[outcome.patch], outcome.status, seed)
                seen.add(outcome.status)
    assert seen >= {Status.CLEAN, Status.MOVED, Status.DRIFT, Status.UNMET, Status.CONFLICT}


def check_place(text: str, mark: str, status: Status, seed: int) -> None:
    """A conflict leaves no trace; anything else stands once, in its symbol, behind its statement."""
    symbol, follows = MARKS[mark]
    if status is Status.CONFLICT:
        assert mark not in text, seed
        return
    source = Source(text)
    node = find_symbol(source.tree, symbol)
    assert node is not None, seed
    start, end = source.span(node)
    assert text.count(mark) == 1, seed
    assert start <= text.index(mark) < end, seed
    if follows is not None:
        lines = [line.strip() for line in text.splitlines()]
        assert lines[lines.index(mark) - 1].startswith(follows), seed
    compile(text, "core.py", "exec")
