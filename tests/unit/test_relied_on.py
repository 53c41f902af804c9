"""What a patch relies on without editing it: names, other code, the version, and the other targets."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from neaptide.names import unbound_names
from neaptide.text import Source
from toy import (
    MODULE,
    PACKAGE,
    SCALE_EDIT,
    TOTAL_EDIT,
    VERSION,
    ToyRepository,
    Upstream,
    git,
    make_checkout,
    write_files,
)

SCOPES = """
import os.path as where
from math import floor

def outer(a, *b, c=1, **d):
    e = [f for f in b if (g := f)]
    with open(a) as h, h as (i, j):
        for k, l in e:
            try:
                m: int = 1
            except OSError as n:
                print(n)
    def inner(o): return o
    class Kept(dict): p = 1
    match a:
        case {"x": q, **r}: pass
        case [s, *t]: pass
        case str() as u: pass
    return READ
"""


@pytest.mark.parametrize("name", [*"abcdefghijklmqrstu", "inner", "Kept", "floor", "where", "outer", "len", "__name__"])
def test_bound_names(name: str) -> None:
    source = Source(SCOPES.replace("READ", name).replace(" f)", " 1)") if name == "f" else SCOPES.replace("READ", name))
    expected = ["f"] if name == "f" else []  # a comprehension keeps its own names
    at = source.text.rindex("return") + 7
    assert unbound_names(source, [(at, at + len(name))]) == expected


@pytest.mark.parametrize("name", ["o", "p", "missing", "os"])
def test_unbound_names(name: str) -> None:
    source = Source(SCOPES.replace("READ", name))
    at = source.text.rindex("return") + 7
    assert unbound_names(source, [(at, at + len(name))]) == [name]
    assert unbound_names(source, [(0, 3)]) == []


CLASSES = """
class Around:
    Kept = 1
    def method(self, a: READ1 = READ2) -> READ3: return READ4
    Part = [READ5 for x in READ6 if READ7]
    other = lambda self, b=READ8: READ9
    class Inner(READ10):
        y = READ11
"""


@pytest.mark.parametrize("place", range(1, 12))
def test_names_of_a_class_are_for_its_own_block(place: int) -> None:
    """Defaults, annotations, bases and what a comprehension goes through are read there; functions do not see it."""
    text = re.sub(r"READ(\d+)", lambda found: "Kept" if int(found[1]) == place else "int", CLASSES)
    at = text.index("Kept", text.index("Kept") + 1)
    sees = place in (1, 2, 3, 6, 8, 10)
    assert unbound_names(Source(text), [(at, at + 4)]) == ([] if sees else ["Kept"])


@pytest.mark.parametrize(
    ("text", "unbound"),
    [
        ("def f(a, b=a): pass\n", ["a"]),
        ("@a\ndef f(a): pass\n", ["a"]),
        ("class C(y):\n    y = 1\n", ["y"]),
        ("def f(b=(c := 1)): return c\n", []),
        ("def f(x):\n    def g(): return x\n    return g\n", []),
        ("def f():\n    def g(): return later\n    later = 1\n    return g\n", []),
        ("x = [y for y in y]\n", ["y"]),
        ("x = [z for y in [1] for z in y]\n", []),
        ("def f():\n    global S\n    S = 1\ndef g(): return S\n", []),
        ("class C:\n    a = __qualname__, __module__\n    def f(self): return __qualname__\n", ["__qualname__"]),
    ],
)
def test_what_runs_around_a_scope_reads_the_names_around_it(text: str, unbound: list[str]) -> None:
    assert unbound_names(Source(text), [(0, len(text))]) == unbound


@pytest.mark.skipif(sys.version_info < (3, 12), reason="type parameters came with Python 3.12")
def test_type_parameters_of_a_class_are_seen_by_its_methods() -> None:
    text = "class C[T](list[T]):\n    def f[U](self, a: U) -> T: return T, U\n    x = U\n"
    assert unbound_names(Source(text), [(0, len(text))]) == ["U"]


def test_an_upstream_name_that_goes_is_found(upstream: Upstream) -> None:
    """A renamed local that the new code reads would be a NameError that no import shows."""
    total = {**TOTAL_EDIT, "after": "value = min(value, result)"}
    upstream.toy.add_patch("min", total)
    upstream.toy.lock()
    upstream.change(
        ("        result = 0", "        whole = 0"),
        ("result += value", "whole += value"),
        ("return result", "return whole"),
    )
    code, _, text = upstream.run("apply")
    assert code == 5
    assert "reads result, which nothing binds there" in text


RELIES = {"requires": [{"file": "core.py", "symbol": "LIMIT"}, {"file": "kernel.cu", "symbol": "<module>"}]}


def test_code_that_is_relied_on_is_guarded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {**PACKAGE, "toy/kernel.cu": "int tables = 2;\n"}
    toy = ToyRepository(tmp_path / "repository", files)
    toy.add_patch("scale-list", SCALE_EDIT, **RELIES)
    toy.lock()
    for name, changed, code in [
        ("same", {"toy/core.py": MODULE.replace("LIMIT = 8 * 1024", "LIMIT = (8 * 1024)  # bytes")}, 0),
        ("python", {"toy/core.py": MODULE.replace("LIMIT = 8", "LIMIT = 16")}, 4),
        ("native", {"toy/kernel.cu": "int tables = 3;\n"}, 4),
        ("gone", {"toy/core.py": MODULE.replace("LIMIT", "BOUND")}, 3),
    ]:
        folder = make_checkout(tmp_path / name, {**files, **changed})
        assert toy.run("apply", "--checkout", f"toy={folder}") == code, name
    assert "code that the patch relies on changed" in capsys.readouterr().err


def test_beside_a_constant(toy: ToyRepository) -> None:
    """Without a rule, ``before`` and ``after`` stand beside the symbol itself; another value is drift."""
    edit = {"file": "core.py", "symbol": "LIMIT", "after": "TWICE = 2 * LIMIT", "expect": {"kind": "import_statement"}}
    toy.add_patch("twice", edit)
    toy.lock()
    assert toy.run("apply") == 0
    assert "LIMIT = 8 * 1024\nTWICE = 2 * LIMIT\n" in (toy.tree / "toy/core.py").read_text()
    changed = {**PACKAGE, "toy/core.py": MODULE.replace("LIMIT = 8 * 1024", "LIMIT: int = 8 << 10")}
    assert toy.run("apply", "--checkout", f"toy={make_checkout(toy.root.parent / 'other', changed)}") == 4


@pytest.mark.parametrize(
    ("files", "code"),
    [
        ({"pyproject.toml": f'[project]\nversion = "{VERSION}"\n'}, 0),
        ({"pyproject.toml": '[project]\nversion = "1.1.0"\n'}, 2),
        ({"PKG-INFO": "Metadata-Version: 2.1\nVersion: 1.1.0\n"}, 2),
        ({"pyproject.toml": '[project]\ndynamic = ["version"]\n'}, 0),
    ],
)
def test_a_checkout_of_another_version_is_refused(
    toy: ToyRepository, tmp_path: Path, files: dict[str, str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    toy.add_patch("scale-list", SCALE_EDIT)
    toy.lock()
    folder = make_checkout(tmp_path / "checkout", {**PACKAGE, **files})
    assert toy.run("apply", "--checkout", f"toy={folder}") == code
    assert ("declares version 1.1.0" in capsys.readouterr().err) == (code == 2)


def twin(toy: ToyRepository) -> ToyRepository:
    """A second target of the same package."""
    pin = toy.root / "patches/pins/current.toml"
    text = pin.read_text()
    pin.write_text(text + text[text.index("[targets.toy]") :].replace("[targets.toy]", "[targets.twin]"))
    write_files(toy.root, {"patches/twin/series": "", "overlay/twin/bad.py": "raise RuntimeError('on import')\n"})
    toy.given = (*toy.given, "--sdist", f"twin={toy.sdist}")
    return toy


def test_one_failing_target_puts_all_back(toy: ToyRepository) -> None:
    twin(toy).add_patch("scale-list", SCALE_EDIT)
    folder = toy.add_patch("bad", overlay=[{"src": "bad.py", "dest": "bad.py", "mode": "new"}])
    folder.rename(toy.root / "patches/twin/bad")
    write_files(toy.root, {"patches/toy/series": "scale-list\n", "patches/twin/series": "bad\n"})
    toy.lock()
    assert toy.run("apply") == 5
    for target in ("toy", "twin"):
        tree = toy.build / "current" / target
        assert git(tree, "rev-list", "--count", "HEAD") == "1"
        assert git(tree, "status", "--porcelain") == ""


def test_choosing_a_patch_leaves_other_targets_alone(toy: ToyRepository, capsys: pytest.CaptureFixture[str]) -> None:
    twin(toy).add_patch("scale-list", SCALE_EDIT)
    toy.add_patch("total-min", TOTAL_EDIT).rename(toy.root / "patches/twin/total-min")
    toy.add_patch("other-min", TOTAL_EDIT)
    write_files(toy.root, {"patches/toy/series": "scale-list\nother-min\n", "patches/twin/series": "total-min\n"})
    toy.lock()
    assert toy.run("apply") == 0
    capsys.readouterr()
    assert toy.run("apply", "--patch", "toy/scale-list") == 0
    assert "takes out toy/other-min" in capsys.readouterr().err
    assert git(toy.build / "current/twin", "rev-list", "--count", "HEAD") == "2"


def test_accepted_drift_outlives_a_smaller_series(upstream: Upstream) -> None:
    upstream.toy.add_patch("scale-list", SCALE_EDIT)
    upstream.toy.add_patch("total-min", TOTAL_EDIT)
    upstream.toy.lock()
    upstream.change(("value = math.floor(item)", "value = math.floor(item + 0)"))
    assert upstream.run("apply")[0] == 4
    assert upstream.run("apply", "--accept-drift", "total-min")[0] == 0
    assert upstream.run("apply", "--without", "total-min")[0] == 0
    assert upstream.run("apply")[0] == 0
