"""Qualified symbols, and what a site guard holds and leaves out."""

from __future__ import annotations

import ast

import pytest
from neaptide.anchor import find
from neaptide.edits import span_of
from neaptide.model import Rule
from neaptide.symbols import (
    ambiguous_part,
    find_parameter,
    find_symbol,
    is_symbol_name,
    parameter_guard,
    signature_guard,
    site_guard,
    statement_at,
)
from neaptide.text import Source

MODULE = """
import os
LIMIT: int = 1
A = B = 2
C, D = 3, 4
E += 1

class Outer:
    SIZE = 10
    class Inner:
        def go(self): local = 11
    @property
    def x(self): return 12
    @x.setter
    def x(self, v): self.y = 13

if os.name:
    def picked(): return 20
else:
    def picked(): return 21

try:
    def tried(): return 30
except ImportError:
    def tried(): return 31
else:
    def tried(): return 32
finally:
    def tried(): return 33

with os.x:
    async def within(): return 40

def outer():
    for i in []:
        def nested(): return 50
    match i:
        case 1:
            matched = 51
    return nested
"""


def line_of(symbol: str, text: str = MODULE) -> str | None:
    """The last line of what ``symbol`` names."""
    node = find_symbol(ast.parse(text), symbol)
    return None if node is None else text.splitlines()[node.end_lineno - 1].strip()


@pytest.mark.parametrize(
    ("symbol", "line"),
    [
        ("LIMIT", "LIMIT: int = 1"),
        ("A", "A = B = 2"),
        ("B", "A = B = 2"),
        ("Outer.SIZE", "SIZE = 10"),
        ("Outer.Inner.go", "def go(self): local = 11"),
        ("Outer.Inner.go.local", "def go(self): local = 11"),
        ("Outer.x", "def x(self): return 12"),
        ("Outer.x#2", "def x(self, v): self.y = 13"),
        ("picked#1", "def picked(): return 20"),
        ("picked#2", "def picked(): return 21"),
        ("within", "async def within(): return 40"),
        ("outer.nested", "def nested(): return 50"),
        ("outer.matched", "matched = 51"),
    ],
)
def test_symbols_are_found(symbol: str, line: str) -> None:
    assert line_of(symbol) == line


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_numbers_follow_the_text(number: int) -> None:
    """``name#2`` is the second in the file, also where a ``try`` has all of its blocks."""
    assert line_of(f"tried#{number}") == f"def tried(): return {29 + number}"


@pytest.mark.parametrize("symbol", ["x", "go", "Inner", "nested", "picked#3", "Outer.y", "LIMIT.x", "E", "os", "C#2"])
def test_symbols_that_are_not_there(symbol: str) -> None:
    assert line_of(symbol) is None


@pytest.mark.parametrize("symbol", ["a.b#0", "a#", "a b", "a.", ".a", "", "a[0]", "<module>.a", "1a"])
def test_malformed_names(symbol: str) -> None:
    assert not is_symbol_name(symbol)


@pytest.mark.parametrize(
    ("symbol", "part"),
    [("Outer.x", "x"), ("picked", "picked"), ("tried", "tried"), ("Outer.x#2", ""), ("<module>", "")],
)
def test_ambiguity_is_named(symbol: str, part: str) -> None:
    assert ambiguous_part(ast.parse(MODULE), symbol) == part


def test_ambiguity_of_an_outer_name() -> None:
    assert ambiguous_part(ast.parse("class P:\n    f = 1\nclass P:\n    f = 2\n"), "P.f") == "P"


def test_an_outer_name_can_be_numbered() -> None:
    assert line_of("P#2.f", "class P:\n    f = 1\nclass P:\n    f = 2\n") == "f = 2"


FUNCTION = """
def f(a, b=1):
    first = 1
    if a:
        for i in b:
            target(i)
            other(i)
    elif b:
        later(a)
    else:
        pass
    try:
        risky(a)
    except OSError as error:
        handle(error)
    with open(a) as handle_:
        match a:
            case 1:
                chosen(a)
    return first
"""


def guard_of(text: str, rule: Rule, *, header_only: bool = False, name: str = "f") -> str:
    source = Source(text)
    symbol = find_symbol(source.tree, name)
    assert symbol is not None
    (match,) = find(source, rule, span_of(source, symbol))
    place = statement_at(source, symbol, match.start, match.end)
    assert place is not None
    return site_guard(place, symbol, header_only=header_only)


@pytest.mark.parametrize(
    ("rule", "old", "new"),
    [
        ("target(i)", "other(i)", "other(i, 2)"),
        ("target(i)", "first = 1", "first = 2"),
        ("target(i)", "elif b", "elif not b"),
        ("target(i)", "def f(a, b=1)", "def f(a, b=2, *c)"),
        ("target(i)", "def f", "@cached\ndef f"),
        (
            "target(i)",
            "            target(i)\n            other(i)",
            "            other(i)\n            target( i )  # x",
        ),
        ("risky(a)", "handle(error)", "handle(None)"),
        ("chosen(a)", "return first", "return None"),
    ],
)
def test_other_statements_are_not_part_of_a_site(rule: str, old: str, new: str) -> None:
    assert old in FUNCTION
    assert guard_of(FUNCTION.replace(old, new), rule) == guard_of(FUNCTION, rule)


@pytest.mark.parametrize(
    ("rule", "old", "new"),
    [
        ("target($A)", "target(i)", "target(i + 1)"),
        ("target(i)", "target(i)", "x = target(i)"),
        ("target(i)", "for i in b", "for i in a"),
        ("target(i)", "if a", "if not a"),
        ("later(a)", "if a", "if not a"),
        ("later(a)", "elif b", "elif a"),
        ("later(a)", "        later(a)\n    else:\n        pass", "        pass\n    else:\n        later(a)"),
        ("later(a)", "        later(a)\n", "        if a:\n            later(a)\n"),
        ("handle(error)", "OSError", "ValueError"),
        ("handle(error)", "as error", "as error_"),
        (
            "risky(a)",
            "        risky(a)\n    except OSError as error:\n        handle(error)",
            "        pass\n    finally:\n        risky(a)",
        ),
        ("chosen(a)", "open(a)", "open(b)"),
        ("chosen(a)", "case 1", "case 2"),
        ("chosen(a)", "match a", "match b"),
    ],
)
def test_statement_and_blocks_around_it_are_the_site(rule: str, old: str, new: str) -> None:
    assert old in FUNCTION
    assert guard_of(FUNCTION.replace(old, new), rule) != guard_of(FUNCTION, rule)


def test_an_edit_in_a_header_does_not_hold_the_block() -> None:
    changed = FUNCTION.replace("other(i)", "other(2)")
    assert guard_of(changed, "open($A)", header_only=True) == guard_of(FUNCTION, "open($A)", header_only=True)
    assert guard_of(FUNCTION.replace("chosen(a)", "0"), "open(a)", header_only=True) == guard_of(
        FUNCTION, "open(a)", header_only=True
    )
    rule = "for $I in $B:\n    $$$REST"
    assert guard_of(changed, rule, header_only=True) == guard_of(FUNCTION, rule, header_only=True)
    assert guard_of(changed, rule) != guard_of(FUNCTION, rule)


CLASS = """class K(Base, key=1):
    field = 1

    def method(self):
        return K
"""
NAME: Rule = {"kind": "identifier", "regex": "^K$", "inside": {"kind": "class_definition", "field": "name"}}


def header_guard(text: str) -> str:
    return guard_of(text, NAME, header_only=True, name="K")


def test_a_definitions_own_header_is_a_site() -> None:
    """Bases and keywords are held, the body is not."""
    assert header_guard(CLASS.replace("field = 1", "field = 2")) == header_guard(CLASS)
    for old, new in (("Base", "Other"), ("key=1", "key=2"), ("class", "@cached\nclass")):
        assert header_guard(CLASS.replace(old, new)) != header_guard(CLASS)


def function(text: str) -> ast.FunctionDef:
    node = ast.parse(text).body[0]
    assert isinstance(node, ast.FunctionDef)
    return node


@pytest.mark.parametrize("name", ["a", "b", "c", "d"])
def test_parameters_of_every_kind(name: str) -> None:
    text = "def f(a=1, /, b=2, *args, c=3, d=4, **more): pass"
    found = find_parameter(function(text), name)
    assert found is not None
    assert ast.unparse(found[1] or ast.Pass()) == str(" abcd".index(name))
    changed = text.replace(f"{name}=", f"{name}=9+")
    assert parameter_guard(function(changed), name) != parameter_guard(function(text), name)
    others = [n for n in "abcd" if n != name]
    assert all(parameter_guard(function(changed), n) == parameter_guard(function(text), n) for n in others)


def test_signature_guard_leaves_the_body_out() -> None:
    assert signature_guard(function("def f(a): return 1")) == signature_guard(function("def f(a):\n    pass"))
    assert signature_guard(function("def f(a): return 1")) != signature_guard(function("def f(b): return 1"))
