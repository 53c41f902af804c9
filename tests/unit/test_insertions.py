"""Code that several patches put at one place: each behind those before it, and in its own block."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from neaptide.outcomes import Plan, Status, Subject
from neaptide.plan import plan_series
from neaptide.series import load_series
from toy import VERSION, ToyRepository

UPSTREAM = (
    "class C:\n    def f(self, a):\n        if a:\n            g(a)\n\n    def h(self): pass\n\n\ndef k(): pass\n"
)
IN_IF = {"symbol": "C.f", "match": "g($X)", "after": "in_if($X)"}
BESIDE_IF = {"symbol": "C.f", "match": "if $C:\n    $$$B", "after": "beside_if()"}
METHOD = {"symbol": "C.f", "after": "def method(self):\n    pass"}
STATEMENT_OF_F = {"symbol": "C.f", "end": "end_of_f()"}
TOP = {"symbol": "C", "after": "at_top()"}


def plan(root: Path, upstream: str, *edits: Mapping[str, Any]) -> Plan:
    """A patch an edit."""
    toy = ToyRepository(root / "repository")
    for number, edit in enumerate(edits):
        toy.add_patch(f"p{number}", {"file": "core.py", "expect": {"kind": "identifier"}, **edit})
    subject = Subject("toy", VERSION, {"pkg": "toy", "PREFIX": "TOY"}, {"core.py": upstream.encode()}.get)
    return plan_series(subject, load_series(toy.root, "toy"))


def blocks(text: str) -> dict[str, str]:
    """Which definition or block each of the edits' own names stands directly in, as ``class.function/if``."""
    out: dict[str, str] = {}

    def visit(node: ast.AST, where: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                out[child.name] = where
                visit(child, f"{where}.{child.name}")
            elif isinstance(child, ast.If):
                visit(child, f"{where}/if")
            elif isinstance(child, ast.Call) and isinstance(child.func, ast.Name):
                out[child.func.id] = where
            else:
                visit(child, where)

    visit(ast.parse(text), "")
    return out


WHERE = {
    "in_if": ".C.f/if", "beside_if": ".C.f", "method": ".C", "end_of_f": ".C.f", "at_top": "", "g": ".C.f/if",
    "h": ".C", "k": "",
}  # fmt: skip
ALL = {"in_if": IN_IF, "beside_if": BESIDE_IF, "method": METHOD, "end_of_f": STATEMENT_OF_F, "at_top": TOP}
SOME = [*itertools.permutations(ALL, 2), *itertools.permutations(ALL, 3)]


@pytest.mark.parametrize("names", SOME, ids=" ".join)
def test_each_stands_in_the_block_that_it_is_for(tmp_path: Path, names: tuple[str, ...]) -> None:
    """All of them begin where the text of ``f`` ends, but for the last, which is behind the class."""
    done = plan(tmp_path, UPSTREAM, *(ALL[name] for name in names))
    assert {o.status for o in done.outcomes if not o.key.startswith("names:")} == {Status.CLEAN}
    wanted = {name: WHERE[name] for name in (*names, "g", "h", "k")}
    assert blocks(done.files["core.py"].decode()) == {**wanted, "f": ".C", "C": ""}


OPENED = {"symbol": "C.f", "match": "g($X)", "after": "if k():\n    in_opened()"}
CONTINUED = [
    {"symbol": "C.f", "match": "in_opened()", "after": "more_in_opened()"},
    {"symbol": "C.f", "match": "if k():\n    $$$B", "end": "more_in_opened()"},
]
THIRD = {
    "an if": "if h2():\n    in_third()", "a loop": "for _ in k2():\n    in_third()", "a call": "in_third()",
}  # fmt: skip


@pytest.mark.parametrize("continued", CONTINUED, ids=["after", "end"])
@pytest.mark.parametrize("third", THIRD)
def test_a_third_stands_behind_all_of_a_block_that_the_first_has_opened(
    tmp_path: Path, continued: dict[str, str], third: str
) -> None:
    """Also behind what a second patch put at the end of that block."""
    text = THIRD[third]
    last = {"symbol": "C.f", "match": "g($X)", "after": text}
    toy = ToyRepository(tmp_path / "repository")
    for name, edit, after in (("p0", OPENED, []), ("p1", continued, ["p0"]), ("p2", last, [])):
        toy.add_patch(name, {"file": "core.py", "expect": {"kind": "identifier"}, **edit}, after=after)
    subject = Subject("toy", VERSION, {"pkg": "toy", "PREFIX": "TOY"}, {"core.py": UPSTREAM.encode()}.get)
    done = plan_series(subject, load_series(toy.root, "toy"))
    assert {o.status for o in done.outcomes if not o.key.startswith("names:")} == {Status.CLEAN}
    indented = "".join(f"            {line}\n" for line in text.splitlines())
    wanted = f"            g(a)\n            if k():\n{' ' * 16}in_opened()\n{' ' * 16}more_in_opened()\n{indented}"
    assert wanted in done.files["core.py"].decode()


@pytest.mark.parametrize("second", [{"match": "g($X)", "after": "later()"}, {"end": "later()"}], ids=["after", "end"])
@pytest.mark.parametrize("first", ["h()\n# more", "h()\n\n# more\n# and more", "# only this"])
def test_a_comment_at_the_end_of_the_first_is_the_firsts(tmp_path: Path, first: str, second: dict[str, str]) -> None:
    upstream = "def f(a):\n    g(a)\n\n\ndef k(): pass\n"
    done = plan(
        tmp_path, upstream, {"symbol": "f", "match": "g($X)", "after": first}, {"symbol": "f", **second}
    )  # fmt: skip
    assert {o.status for o in done.outcomes if not o.key.startswith("names:")} == {Status.CLEAN}
    indented = "".join(f"    {line}".rstrip() + "\n" for line in first.splitlines())
    assert done.files["core.py"].decode() == upstream.replace("g(a)\n", f"g(a)\n{indented}    later()\n")


@pytest.mark.parametrize(("name", "between"), [(one, other) for one in ALL for other in ("", *ALL) if one != other])
def test_a_second_of_a_kind_follows_the_first(tmp_path: Path, name: str, between: str) -> None:
    """Whatever another patch changes between the two."""
    first = ALL[name]
    second = {k: v.replace(name, "later") if k in ("after", "end") else v for k, v in first.items()}
    done = plan(tmp_path, UPSTREAM, first, *([ALL[between]] if between else []), second)
    assert {o.status for o in done.outcomes if not o.key.startswith("names:")} == {Status.CLEAN}
    text = done.files["core.py"].decode()
    assert text.index(name) < text.index("later")
    found = blocks(text)
    assert found["later"] == found[name] == WHERE[name]


def test_a_rule_that_looks_around_the_method_sees_the_class(tmp_path: Path) -> None:
    """What a rule asks of the surroundings is asked of the whole file, not of the function alone."""
    upstream = UPSTREAM.replace("class C:\n", "class C:\n    marked = True\n\n")
    inside = {"kind": "class_definition", "stopBy": "end", "has": {"pattern": "marked = True", "stopBy": "end"}}
    edit = {"symbol": "C.f", "match": {"pattern": "g($X)", "inside": inside}, "after": "in_if()"}
    done = plan(tmp_path, upstream, edit)
    assert [o.status for o in done.outcomes if not o.key.startswith("names:")] == [Status.CLEAN]
    assert "in_if()" in done.files["core.py"].decode()
    lacking = plan(tmp_path / "lacking", UPSTREAM, edit)
    assert [o.status for o in lacking.outcomes] == [Status.CONFLICT]


@pytest.mark.parametrize(("first", "rest"), [("\n", "\r\n"), ("\r\n", "\n")])
def test_new_lines_end_as_the_first_of_the_file(tmp_path: Path, first: str, rest: str) -> None:
    """Also in a function whose own lines end otherwise."""
    upstream = f"import os{first}" + (UPSTREAM + "def top(a):\n    t(a)\n").replace("\n", rest)
    in_top = {"symbol": "top", "match": "t($X)", "after": "in_top()"}
    again = {"symbol": "top", "end": "again()"}
    text = plan(tmp_path, upstream, IN_IF, in_top, again).files["core.py"].decode()
    with_if = upstream.replace("g(a)", f"g(a){first}            in_if(a)")
    assert text == with_if.replace("    t(a)", f"    t(a){first}    in_top(){first}    again()")


def test_a_result_that_does_not_parse_is_refused_without_the_line_of_a_part(tmp_path: Path) -> None:
    done = plan(tmp_path, UPSTREAM, {"symbol": "C.f", "match": "g($X)", "replace": "yield = 1"})
    (outcome,) = done.outcomes
    assert outcome.status is Status.CONFLICT
    assert "does not parse" in outcome.detail
    assert "line" not in outcome.detail
