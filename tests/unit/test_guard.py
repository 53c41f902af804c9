"""Guards: one golden hash on every interpreter, blind to form, sensitive to meaning."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from neaptide import guard

FIXTURE = r'''
"""Module docstring, left out."""
from __future__ import annotations

import os.path as path, sys
from . import sibling
from ..up import (name as alias, other,)

__all__: list[str] = ["Tide", "neap"]
EMPTY = f""
PLAIN = f"ebb" "flow"
NESTED = f"{f'{1 + 1:>{2}}'!r:^{len('ab')}.{3}}" "tail" f"{EMPTY=}" rf"\d{PLAIN}"
SPECS = (f"{EMPTY:}", f"{EMPTY = }", f"{EMPTY=:>4}", f"{EMPTY=!s}", f"{1:%H:%M}", f"{{}}{EMPTY!a}")
JOINED = ("" f"" "x" f"{1}" "")
LINES = f"""high
{
    EMPTY
} low {PLAIN
!r}"""
NUMBERS = [0, -0.0, 1, 1.0, True, 1j, 1e999, -2.5e-7, 0xFF, 0b10, 0o17, 1_000, 10**40, ..., None]
BYTES = b"\x00\xff" b'tail', rb"\n"
TEXTS = ("ünï", "潮汐", "\N{WATER WAVE}", '\ud800', u"kind", 'it\'s', """two
lines""")
ключ = {**{}, "a": 1, None: {*()}, }


@property
@path.join(*[])("x", **{})
class Tide(sibling.Base, *other, metaclass=type, **alias):
    """Class docstring."""

    level: int
    (self_level): float = 0.5
    low = high = 0  # type: int

    def __init__(self, a, b: int = 1, /, c=..., *rest: str, d, e: "x" = None, **more) -> None:
        """Method docstring."""
        "a string that is not the docstring"
        self.a, [b, *self.rest] = a, (b, c), *rest
        del self.b[1:2, ::3, ...], (a)

    async def flow(self):
        async with open() as f, g as (h, i):
            return [x async for x in f if await x if not x] + [y := 1, (yield)]
        async for z in g: await z
        else: pass

    only = lambda self, *, k=1, **_: (yield k)


def neap(kind, *args, **kwargs):  # type: (...) -> int
    global EMPTY
    match kind, *args:
        case [1 | -1 | 2.5 | -3j | 1 + 2j | "s" | b"b" | None | True as got, *_] if (n := len(got)) > 1:
            return n
        case {"k": sys.maxsize, **others} | Tide(level, low=0):
            raise ValueError from None
        case (*_, [first, second]): ...
        case _:
            pass
    try:
        assert kind, f"{kind!r}"
    except* (OSError, ValueError) as group:
        print(*group.exceptions, sep="", **kwargs)
    else:
        while not kind < 1 <= 2 is not None in args: break
        else: kind @= kind << 1 // 2 ** -~+3
    finally:
        nonlocal_ = kind if kind else None or kind and 1
    if kind: x = 1; y = 2
    elif args:
        for i, (j, *k) in {1: 2}.items(): continue
    else:
        def inner() -> int:
            """Only a docstring."""
        with (open("a") as a, open("b")): pass
    try: pass
    except Exception: raise
    return {i: j for i in args for j in i}, {*args}, (i for i in ()), not kind
'''
GOLDEN = "7557d1e950446c906c3688e221efb00f2055177e5e233b459e57737a9625a4df"
# Text that the interpreters parse into differently cut trees.
CUT = {
    "named character in a spec": r'x = f"{1:\N{BULLET}>5}"',
    "named character after a field": r'x = f"{1:{2}\N{BULLET}>5}"',
    "escapes in a spec": r'x = f"{1:\x20>5\t}"',
    "nested empty spec": 'x = f"{1:{2:}}"',
    "braces in a piece": 'x = f"a{{b}}c{1}{{"',
}


def _version(python: str) -> tuple[int, ...]:
    command = [python, "-c", "import sys; print(*sys.version_info[:2])"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return tuple(int(n) for n in done.stdout.split()) if done.returncode == 0 else ()


@cache
def interpreters() -> dict[str, list[str]]:
    """Working interpreters by ``MAJOR.MINOR``; a pyenv shim without a version is none."""
    found: dict[str, list[str]] = {}
    names = [f"python3.{minor}" for minor in range(11, 15)]
    folders = subprocess.run(["which", "-a", *names], capture_output=True, text=True, check=False).stdout.splitlines()
    pyenv = (Path.home() / ".pyenv" / "versions").glob("*/bin/python")
    for python in [*folders, *(str(p) for p in pyenv)]:
        version = _version(python)
        if version >= (3, 11):
            found.setdefault(".".join(map(str, version)), []).append(python)
    return found


def guards_on(version: str, *paths: Path) -> list[list[str]]:
    """The guards of ``paths`` by every interpreter of a version; a skip where there is none."""
    pythons = interpreters().get(version, [])
    if not pythons:
        pytest.skip(f"no working python{version} on PATH or in ~/.pyenv")
    out = []
    for python in pythons:
        command = [python, "-W", "ignore", guard.__file__, *map(str, paths)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        out.append([json.loads(line)[1] for line in done.stdout.splitlines()])
    return out


def test_golden_hash_in_process() -> None:
    assert guard.module_guard(FIXTURE) == GOLDEN


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13", "3.14"])
def test_golden_hash_on_other_interpreters(version: str, tmp_path: Path) -> None:
    path = tmp_path / "fixture.py"
    path.write_text(FIXTURE, encoding="utf-8")
    for found in guards_on(version, path):
        assert found == [GOLDEN]


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13", "3.14"])
@pytest.mark.parametrize("name", CUT)
def test_pieces_of_fstrings_do_not_depend_on_the_interpreter(name: str, version: str, tmp_path: Path) -> None:
    """The same text has one guard, here and there, however an interpreter cuts the f-string."""
    path = tmp_path / "cut.py"
    path.write_text(CUT[name])
    for found in guards_on(version, path):
        assert found == [guard.module_guard(CUT[name])]


BASE = 'def f(a, b=1):\n    """Doc."""\n    x = g(a, b)  # note\n    return "t" if x else [1, 2]\n'


@pytest.mark.parametrize(
    "same",
    [
        BASE.replace("# note", "# another"),
        BASE.replace("g(a, b)", "g(\n        a,\n        b,\n    )"),
        BASE.replace("g(a, b)", "((g)(a, (b)))"),
        BASE.replace('"""Doc."""', "'''Other, longer.'''"),
        BASE.replace('    """Doc."""\n', ""),
        BASE.replace('"t"', "'t'"),
        BASE.replace('"t"', "r't'"),
        BASE.replace('"t"', "u't'"),
        BASE.replace('"t"', "''  't'"),
        BASE.replace("\n", "\r\n"),
        BASE.replace("    ", "\t"),
        BASE.replace("[1, 2]", "[1, 0x2,]"),
        BASE.replace("x = g(a, b)", "x = g(a, b);"),
    ],
)
def test_form_does_not_change_a_guard(same: str) -> None:
    assert same != BASE
    assert guard.module_guard(same) == guard.module_guard(BASE)


@pytest.mark.parametrize(
    "other",
    [
        BASE.replace("x = g", "x += g"),
        BASE.replace("x", "y"),
        BASE.replace("g(a, b)", "g(b, a)"),
        BASE.replace("g(a, b)", "g(a, b=b)"),
        BASE.replace("g(a, b)", "g(a, *b)"),
        BASE.replace("b=1", "b=1.0"),
        BASE.replace("b=1", "b=True"),
        BASE.replace("b=1", "b=1j"),
        BASE.replace("b=1", 'b="1"'),
        BASE.replace("b=1", "*, b=1"),
        BASE.replace("a, b=1", "a, /, b=1"),
        BASE.replace('"t"', 'b"t"'),
        BASE.replace('"t"', 'f"t"'),
        BASE.replace('"t"', '"T"'),
        BASE.replace("[1, 2]", "(1, 2)"),
        BASE.replace("[1, 2]", "{1, 2}"),
        BASE.replace("def f", "async def f"),
        BASE.replace("def f", "@d\ndef f"),
        BASE.replace('"""Doc."""', '"""Doc."""\n    "kept"'),
        BASE.replace("f(a", "f(a: int"),
    ],
)
def test_meaning_changes_a_guard(other: str) -> None:
    assert other != BASE
    assert guard.module_guard(other) != guard.module_guard(BASE)


@pytest.mark.parametrize("pair", [('f"{x}"', 'f"{x!s}"'), ('f"{x:>4}"', 'f"{x:<4}"'), ('f"{x=}"', 'f"{x}"')])
def test_meaning_inside_an_fstring(pair: tuple[str, str]) -> None:
    assert guard.module_guard(pair[0]) != guard.module_guard(pair[1])


def test_script_needs_only_the_standard_library(tmp_path: Path) -> None:
    """``python -I guard.py FILE...`` prints a line of JSON for each file."""
    (tmp_path / "a.py").write_text("x = 1\n")
    command = [sys.executable, "-I", "-S", guard.__file__, str(tmp_path / "a.py"), str(tmp_path / "a.py")]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [json.loads(line) for line in lines] == [[str(tmp_path / "a.py"), guard.module_guard("x=1")]] * 2
