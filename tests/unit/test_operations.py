"""Every operation of an edit on small upstream files: the exact text that comes out, or a refusal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from neaptide.outcomes import Plan, Status, Subject
from neaptide.plan import plan_series
from neaptide.series import load_series
from toy import VERSION, ToyRepository, write_files

ANY = {"kind": "identifier"}
SMALL = 'def f(a, b=1):\n    """Doc."""\n    x = g(a)\n    return x\n'


def plan(root: Path, upstream: str | bytes, *edits: Mapping[str, Any], code: str | None = None) -> Plan:
    """The plan of one patch on ``core.py``; ``code`` is the text of its ``code.py``."""
    toy = ToyRepository(root / "repository")
    folder = toy.add_patch("one", *({"file": "core.py", "expect": ANY, **e} for e in edits))
    if code is not None:
        write_files(folder, {"code.py": code})
    data = upstream.encode() if isinstance(upstream, str) else upstream
    names = {"pkg": "toy", "PREFIX": "TOY"}
    subject = Subject("toy", VERSION, names, {"core.py": data}.get)
    return plan_series(subject, load_series(toy.root, "toy"))


def result(root: Path, upstream: str | bytes, *edits: Mapping[str, Any], code: str | None = None) -> str:
    """``core.py`` after the patch, newlines as they are; every edit must be clean (names are not bound here)."""
    done = plan(root, upstream, *edits, code=code)
    assert [o.detail for o in done.outcomes if o.status is not Status.CLEAN and not o.key.startswith("names:")] == []
    return done.files["core.py"].decode()


def conflict(root: Path, upstream: str | bytes, *edits: Mapping[str, Any], code: str | None = None) -> str:
    """The reason why the one edit is refused; nothing of the file may be planned."""
    done = plan(root, upstream, *edits, code=code)
    (outcome,) = done.outcomes
    assert outcome.status is Status.CONFLICT, done.files
    assert done.files == {}
    return outcome.detail


HEAD = 'def f(a, b=1):\n    """Doc."""\n'
FOR = "def f(a):\n    for i in a:\n        g(i)\n        # last\n    else:\n        h()\n"


@pytest.mark.parametrize(
    ("upstream", "edit", "wanted"),
    [
        (SMALL, {"match": "g($X)", "replace": "h($X, $X)"}, HEAD + "    x = h(a, a)\n    return x\n"),
        (SMALL, {"match": "x = g($X)", "replace": "x = h()\ny = $X"}, HEAD + "    x = h()\n    y = a\n    return x\n"),
        (
            SMALL,
            {"match": {"kind": "parameters"}, "replace": "(a, b=1, c=2)"},
            'def f(a, b=1, c=2):\n    """Doc."""\n    x = g(a)\n    return x\n',
        ),
        (SMALL, {"match": "g($X)", "wrap": "list($MATCH)"}, HEAD + "    x = list(g(a))\n    return x\n"),
        (
            SMALL,
            {"match": "x = g($X)", "wrap": "with a:\n    $MATCH"},
            HEAD + "    with a:\n        x = g(a)\n    return x\n",
        ),
        (
            SMALL,
            {"match": "g($X)", "before": "if a:\n    b = 2"},
            HEAD + "    if a:\n        b = 2\n    x = g(a)\n    return x\n",
        ),
        (SMALL, {"match": "x = g($X)", "after": "x += $X"}, HEAD + "    x = g(a)\n    x += a\n    return x\n"),
        ("def f():\n    g(a)  # c\n", {"match": "g($X)", "after": "y"}, "def f():\n    g(a)  # c\n    y\n"),
        (SMALL, {"start": "y = 1"}, HEAD + "    y = 1\n    x = g(a)\n    return x\n"),
        ("def f():\n    # why\n    g()\n", {"start": "y"}, "def f():\n    # why\n    y\n    g()\n"),
        ('class f:\n    "Doc."\n\n    a = 1\n', {"start": "b = 2"}, 'class f:\n    "Doc."\n    b = 2\n\n    a = 1\n'),
        ('def f():\n    "Doc."', {"start": "y"}, 'def f():\n    "Doc."\n    y'),
        (SMALL, {"end": "y = 1"}, SMALL + "    y = 1\n"),
        (FOR, {"match": "for $I in a:\n    $$$B", "start": "y($I)"}, FOR.replace("g(i)", "y(i)\n        g(i)")),
        (FOR, {"match": {"kind": "for_statement"}, "end": "y"}, FOR.replace("g(i)\n", "g(i)\n        y\n")),
        (
            "def f(a):\n    if a:\n        g()\n    elif b:\n        h()\n",
            {"match": {"kind": "elif_clause"}, "start": "y"},
            "def f(a):\n    if a:\n        g()\n    elif b:\n        y\n        h()\n",
        ),
        (SMALL, {"match": "x = g($X)", "delete": True}, HEAD + "    return x\n"),
        ("def f():\n    a\n    x = g(\n  a\n)  # c", {"match": "x = $V", "delete": True}, "def f():\n    a\n"),
        (SMALL + "K = f\n", {"replace": "def f(): pass"}, "def f(): pass\nK = f\n"),
        (
            "class C:\n    @d(\n      1)\n    # c\n    @e\n    async def f(self): pass  # tail\n",
            {"symbol": "C.f", "replace": "@k\ndef f(self):\n    return 2"},
            "class C:\n    @k\n    def f(self):\n        return 2  # tail\n",
        ),
        (SMALL, {"default": {"b": "2"}}, SMALL.replace("b=1", "b=2")),
        (SMALL, {"default": {"a": "0"}}, SMALL.replace("(a,", "(a=0,")),
        ("def f(a: int): a\n", {"default": {"a": "0"}}, "def f(a: int = 0): a\n"),
        (
            "def f(a, /, *, b, c=(1), d): pass\n",
            {"default": {"a": "0", "c": "3", "d": "4"}},
            "def f(a=0, /, *, b, c=(3), d=4): pass\n",
        ),
        ("def f(\n  b  # why\n): pass\n", {"default": {"b": "1"}}, "def f(\n  b=1  # why\n): pass\n"),
        ("f = 1  # c\n", {"constant": "2"}, "f = 2  # c\n"),
        ("class C:\n  f: int = 1 + 2\n", {"symbol": "C.f", "constant": "3"}, "class C:\n  f: int = 3\n"),
        ("f = (\n    1 +\n    2\n)\n", {"constant": "(3)"}, "f = (\n    (3)\n)\n"),
        ("f = g = 1\n", {"constant": "X"}, "f = g = X\n"),
    ],
)  # fmt: skip
def test_the_text_that_comes_out(tmp_path: Path, upstream: str, edit: dict[str, Any], wanted: str) -> None:
    assert result(tmp_path, upstream, {"symbol": "f", **edit}) == wanted


@pytest.mark.parametrize(
    ("call", "argument", "wanted"),
    [
        ("g()", {"k": "1"}, "g(k=1)"),
        ("g( )", {"k": "1"}, "g( k=1)"),
        ("g(a)", {"k": "$X"}, "g(a, k=a)"),
        ("g(a, k=0, z=2)", {"k": "1"}, "g(a, k=1, z=2)"),
        ("g(a, k = (0), z=2)", {"k": "1"}, "g(a, k = (1), z=2)"),
        ("g(a,)", {"k": "1"}, "g(a, k=1)"),
        ("g(*a, **b)", {"k": "1"}, "g(*a, **b, k=1)"),
        ("g(k=0, **b)", {"k": "1"}, "g(k=1, **b)"),
        ("g((a))", {"k": "1"}, "g((a), k=1)"),
        ("g((a) )", {"k": "1"}, "g((a), k=1 )"),
        ("g((\n        a\n    ))", {"k": "1"}, "g((\n        a\n    ), k=1)"),
        ("g((i for i in a))", {"k": "1"}, "g((i for i in a), k=1)"),
        ("g(\n        a,\n        b=1,\n    )", {"k": "1"}, "g(\n        a,\n        b=1,\n        k=1,\n    )"),
        ("g(\n        a,\n        **b,\n    )", {"k": "1"}, "g(\n        a,\n        **b,\n        k=1,\n    )"),
        ("g(\n        a,\n        b  # ,)\n    )", {"k": "1"}, "g(\n        a,\n        b, k=1  # ,)\n    )"),
        ("g(\n        a,  # why a\n    )", {"k": "1"}, "g(\n        a,  # why a\n        k=1,\n    )"),
        ("g(\n        # none\n    )", {"k": "1"}, "g(\n        # none\n    k=1)"),
        ("g()", {"k": "1", "j": "2"}, "g(k=1, j=2)"),
        ("g(a)", {"k": "1", "j": "2"}, "g(a, k=1, j=2)"),
        ("g(a,)", {"k": "1", "j": "2"}, "g(a, k=1, j=2)"),
        ("g(\n        a,\n    )", {"k": "1", "j": "2"}, "g(\n        a,\n        k=1,\n        j=2,\n    )"),
        ("g(a)(b)", {"k": "1"}, "g(a)(b, k=1)"),
    ],
)
def test_arguments(tmp_path: Path, call: str, argument: dict[str, str], wanted: str) -> None:
    upstream = "def f(a, b):\n    return {}\n"
    match = "g($X)" if "$X" in argument["k"] else {"kind": "call", "not": {"inside": {"kind": "call", "stopBy": "end"}}}
    edit = {"symbol": "f", "match": match, "argument": argument}
    assert result(tmp_path, upstream.format(call), edit) == upstream.format(wanted)


@pytest.mark.parametrize(
    ("upstream", "wanted"),
    [
        ('"""Doc."""\nx = 1\n', '"""Doc."""\nimport new\nx = 1\n'),
        ('"""Doc."""', '"""Doc."""\nimport new'),
        ("import a\nfrom b import (\n  c,\n)  # d\nx", "import a\nfrom b import (\n  c,\n)  # d\nimport new\nx"),
        ("import a\nX\nimport b\nclass C: x\nimport c", "import a\nX\nimport b\nimport new\nclass C: x\nimport c"),
        ("import a\r\nx = 1\r\n", "import a\r\nimport new\r\nx = 1\r\n"),
        ("", "import new\n"),
        ("x = 1", "import new\nx = 1"),
        ("#!/usr/bin/env python\n# SPDX: x\nx = 1\n", "#!/usr/bin/env python\n# SPDX: x\nimport new\nx = 1\n"),
    ],
)  # fmt: skip
def test_imports(tmp_path: Path, upstream: str, wanted: str) -> None:
    edit = {"symbol": "<module>", "import": "import new", "expect": []}
    assert result(tmp_path, upstream, edit) == wanted


CODE = '''
"""Module of the patch."""


def block(X, BODY):
    """Not inserted."""
    # A comment.
    if X:
        BODY

    y = """kept
  as it is"""


def value(X):
    """Not inserted."""
    return h(X, x=X)


def text(X):
    return f"""é
{X} {g(X)}"""


@k
def f(a):
    """Inserted."""
    return a


def decorated(X):
    @k(X)
    def inner(): ...
    inner()


def short(X): h(X)


def wrapped(MATCH):
    return h(MATCH)
'''


@pytest.mark.parametrize(
    ("edit", "old", "new"),
    [
        ({"match": "g($X)", "replace": "code.py#value"}, "g(a)", "h(a, x=a)"),
        ({"match": "g($X)", "replace": "code.py#text"}, "g(a)", 'f"""é\n{a} {g(a)}"""'),
        ({"match": "g($X)", "before": "code.py#short"}, "    x = g(a)\n", "    h(a)\n    x = g(a)\n"),
        (
            {"match": "g($X)", "before": "code.py#decorated"},
            "    x = g(a)\n",
            "    @k(a)\n    def inner(): ...\n    inner()\n    x = g(a)\n",
        ),
        ({"match": "g($X)", "wrap": "code.py#wrapped"}, "g(a)", "h(g(a))"),
        ({"match": "g($X)", "argument": {"k": "code.py#value"}}, "g(a)", "g(a, k=h(a, x=a))"),
        ({"replace": "code.py#f"}, SMALL + "K = f\n", '@k\ndef f(a):\n    """Inserted."""\n    return a\nK = f\n'),
    ],
)  # fmt: skip
def test_code_from_a_file(tmp_path: Path, edit: dict[str, Any], old: str, new: str) -> None:
    upstream = SMALL + "K = f\n"
    assert old in upstream
    assert result(tmp_path, upstream, {"symbol": "f", **edit}, code=CODE) == upstream.replace(old, new)


def test_a_block_of_code_from_a_file(tmp_path: Path) -> None:
    """Docstring left out, captures filled, the captured block moved as a whole, strings kept."""
    upstream = 'def f(a):\n  if a:\n    g()\n    for i in a:\n      s = """\n     s"""\n  return 1\n'
    edit = {"symbol": "f", "match": "if $X:\n    $$$BODY", "replace": "code.py#block"}
    assert result(tmp_path, upstream, edit, code=CODE) == (
        'def f(a):\n  if a:\n      g()\n      for i in a:\n        s = """\n     s"""\n\n'
        '  y = """kept\n  as it is"""\n  return 1\n'
    )


@pytest.mark.parametrize(
    ("call", "rule", "code", "wanted"),
    [
        ("g(a, *b, c=1)", "g($$$ARGS)", "h($$$ARGS)", "h(a, *b, c=1)"),
        ("g()", "g($$$ARGS)", "h($$$ARGS)", "h()"),
        ("g(a, b)", "g($X, $Y)", "g($Y, $X)", "g(b, a)"),
        ("g(a, b)", "g(a, $$$)", "h()", "h()"),
        ("g(a)", {"pattern": {"context": "g($X)", "selector": "call"}}, "h($X)", "h(a)"),
        ("g(a)", {"kind": "call", "has": {"pattern": "$X", "kind": "argument_list"}}, "h$X", "h(a)"),
        ("g(a)", "g($X)", "h('潮', $X, '''\n $X''')", "h('潮', a, '''\n a''')"),
        ("g(a)", "g($X)", 'h(f"{$X}")', 'h(f"{a}")'),
    ],
)  # fmt: skip
def test_captures(tmp_path: Path, call: str, rule: Any, code: str, wanted: str) -> None:
    upstream = "def f(a, b):\n    return {}\n"
    edit = {"symbol": "f", "match": rule, "replace": code}
    assert result(tmp_path, upstream.format(call), edit) == upstream.format(wanted)


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("last", ["\n", ""])
@pytest.mark.parametrize("odd", ["ünï", "潮汐", "🌊🌊", "\u2028\x0c"])
def test_offsets_survive_other_alphabets_and_newlines(tmp_path: Path, odd: str, newline: str, last: str) -> None:
    """Code points before the anchor, on its line and earlier, move nothing; newlines stay as found."""
    text = f"# {odd}\ndef f(a):\n    s = '{odd}'; t = '{odd}'\n    u = ('{odd}', g(a), '{odd}')  # {odd}\n    return u"
    edits = [
        {"symbol": "f", "match": "g($X)", "argument": {"k": "'潮'"}},
        {"symbol": "f", "match": "g($$$A)", "after": "if u:\n    h()"},
        {"symbol": "f", "match": "return u", "before": "end()"},
    ]
    wanted = text.replace("g(a)", "g(a, k='潮')").replace("    return", "    if u:\n        h()\n    end()\n    return")
    upstream = (text + last).replace("\n", newline).encode()
    assert result(tmp_path, upstream, *edits) == (wanted + last).replace("\n", newline)


def test_tabs_and_deep_nesting(tmp_path: Path) -> None:
    upstream = "class C:\n\tdef f(self):\n\t\tif a:\n\t\t\tg()\n"
    edit = {"symbol": "C.f", "match": "g()", "after": 'x = """\n  kept\n"""\n\ny = (\n    1,\n)'}
    wanted = upstream + '\t\t\tx = """\n  kept\n"""\n\n\t\t\ty = (\n\t\t\t    1,\n\t\t\t)\n'
    assert result(tmp_path, upstream, edit) == wanted


@pytest.mark.parametrize(
    ("body", "edit"),
    [
        ("    if a: g(a)\n", {"match": "g($X)", "before": "y"}),
        ("    if a: g(a)\n", {"match": "g($X)", "after": "y"}),
        ("    if a: g(a)\n", {"match": {"kind": "if_statement"}, "start": "y"}),
        ("    if a: g(a)\n", {"match": {"kind": "if_statement"}, "end": "y"}),
        ("    if a: g(a)\n", {"match": "g($X)", "delete": True}),
        ("    if a: g(a)\n", {"match": "g($X)", "replace": "h()\nk()"}),
        ("    b; g(a)\n", {"match": "g($X)", "before": "y"}),
        ("    g(a); b\n", {"match": "g($X)", "after": "y"}),
        ("    g(a);\n", {"match": "g($X)", "after": "y"}),
        ("    b; g(a)\n", {"match": "g($X)", "delete": True}),
        ("    b; g(a)\n", {"end": "y"}),
        ('    """Doc."""; g(a)\n', {"start": "y"}),
        ("    if a:\n        g(a)\n", {"match": "g($X)", "delete": True}),
        ("    try:\n        b\n    except E:\n        g(a)\n", {"match": "g($X)", "delete": True}),
        ("    b = g(a)\n", {"match": "g($X)", "delete": True}),
        ("    b = g(a)\n", {"match": "g($X)", "start": "y"}),
        ("    b = g(a)\n", {"match": "a", "argument": {"k": "1"}}),
        ("    return g(i for i in a)\n", {"match": "g($X)", "argument": {"k": "1"}}),
        ("    b = g(a)\n", {"match": "g($X)", "replace": "h("}),
        ("    b = g(a)\n", {"match": "g($X)", "after": "return ]"}),
        ("    b = g(a)\n", {"default": {"c": "1"}}),
        ("    b = g(a)\n", {"constant": "1"}),
        ("    b = g(a)\n", {"match": {"kind": "function_definition"}, "before": "y"}),
        ("    if a:\n        b\n    elif g(a):\n        c\n", {"match": "g($X)", "before": "y"}),
        ("    if a:\n        b\n    elif g(a):\n        c\n", {"match": "g($X)", "before": "if y:\n    pass"}),
        ("    b = g(g(a)) - -a\n", {"match": "g($X)", "count": 2, "count_reason": "both", "replace": "$X"}),
    ],
)  # fmt: skip
def test_places_that_are_refused(tmp_path: Path, body: str, edit: dict[str, Any]) -> None:
    """A conflict with a reason, whatever the text would have become."""
    assert conflict(tmp_path, f"def f(a, b):\n{body}", {"symbol": "f", **edit})


@pytest.mark.parametrize(
    ("upstream", "edit"),
    [
        ("def f(): pass\n", {"end": "y"}),
        ("class f:\n    def __init__(self, a=1): pass\n", {"default": {"a": "2"}}),
        ("f = 1\n", {"default": {"a": "2"}}),
        ("f: int\n", {"constant": "2"}),
        ("f = 1\n", {"start": "y"}),
        ("f = 1; x = 2\n", {"replace": "f = 3"}),
        ("class C:\n    f = 1\nclass C:\n    f = 2\n", {"symbol": "C.f", "constant": "3"}),
    ],
)  # fmt: skip
def test_symbols_that_do_not_fit_the_operation(tmp_path: Path, upstream: str, edit: dict[str, Any]) -> None:
    assert conflict(tmp_path, upstream, {"symbol": "f", **edit})


def test_several_hits_of_one_rule(tmp_path: Path) -> None:
    upstream = "def f(a):\n    x = g(1)\n    y = g(2) + g(3)\n"
    edit = {"symbol": "f", "match": "g($X)", "count": 3, "count_reason": "all", "wrap": "h($MATCH)"}
    assert result(tmp_path, upstream, edit) == "def f(a):\n    x = h(g(1))\n    y = h(g(2)) + h(g(3))\n"
    assert "2 matches" not in conflict(tmp_path / "two", upstream, {**edit, "count": 2, "count_reason": "x"})
