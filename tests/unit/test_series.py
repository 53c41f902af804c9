"""Bad input: every refusal is exit 2 with one clear error that names the place, and nothing on disk changes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from neaptide.series import load_series, read_series
from toy import HEADER, SCALE_EDIT, TOTAL_EDIT, ToyRepository, git, make_checkout, write_files

Refused = Callable[..., dict[str, str]]
TEXT = yaml.safe_dump({**HEADER, "edits": [SCALE_EDIT]}, sort_keys=False)
PATCH = "patches/toy/one/patch.yaml"


def snapshot(*folders: Path) -> dict[str, bytes]:
    """Every file outside git's own folders."""
    files = (p for folder in folders for p in folder.rglob("*") if p.is_file() and ".git" not in p.parts)
    return {str(p): p.read_bytes() for p in files}


@pytest.fixture
def refused(toy: ToyRepository, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Apply to a checkout, which must refuse; returns the error object."""
    checkout = make_checkout(tmp_path / "upstream")

    def run(*args: str) -> dict[str, str]:
        before, head = snapshot(toy.root, checkout), git(checkout, "rev-parse", "HEAD")
        capsys.readouterr()
        code = toy.run("apply", "--checkout", f"toy={checkout}", "--json", *args)
        out, err = capsys.readouterr()
        report = json.loads(out)
        assert (code, report["exit_code"]) == (2, 2), report
        assert [line.split(":")[0] for line in err.splitlines()] == ["error"]
        assert snapshot(toy.root, checkout) == before
        assert (git(checkout, "rev-parse", "HEAD"), git(checkout, "status", "--porcelain")) == (head, "")
        error = report["error"]
        assert error["found"]
        assert "no guard" not in error["found"]
        assert error["wanted"]
        assert error["todo"]
        return error

    return run


def put(toy: ToyRepository, text: str | bytes) -> None:
    """A series of one patch with this very ``patch.yaml``."""
    toy.add_patch("one")
    write_files(toy.root, {PATCH: text})


@pytest.mark.parametrize(
    ("old", "new", "marker", "found"),
    [
        ("title: a title", "title: a: title", "title", "not YAML"),
        ("title: a title", "\ttitle: a title", "title", "not YAML"),
        ("title: a title", "title: *nowhere", "title", "not YAML"),
        ("title: a title", "title: !!python/name:os.system a", "title", "not YAML"),
        ("title: a title", "title: a title\n---", "---", "not YAML"),
        ("title: a title", "title: a \x07 title", "title", "not YAML"),
        ("title: a title", "title: &a [*a]", "title", ""),
        ("title: a title", "title: a title\n{pkg}: b", "{pkg}", ""),
        ("title: a title", "title: a title\ntitle: b", "title: b", "stands twice"),
        ("  symbol: scale", "  symbol: scale\n  symbol: b", "symbol: b", "stands twice"),
        ("  match: sorted($X)", "  match:\n    any: []\n    any: [{kind: call}]", "[{kind", "stands twice"),
        ("title: a title", "title: a title\ntitel: b", "titel", "unknown field"),
        ("  symbol: scale", "  symbol: scale\n  smybol: b", "smybol", "unknown field"),
        ("  version: '>=99'", "  version: '>=99'\n  verison: '1'", "verison", "unknown field"),
        ("title: a title", "title: [a title]", "title", "Expected `str`"),
        ("title: a title", "title: ''", "title", "length >= 1"),
        ("title: a title", "title: 2026-01-02", "title", "Expected `str`"),
        ("- bytes: 1", "- bytes: 1.5", "bytes", "Expected `int`"),
        ("    toy: true", "    toy: 1", "reached", "Expected `bool`"),
        ("reason: temporary", "reason: because", "reason", "Invalid enum value"),
        ("  match: sorted($X)", "  match: 3", "match", "Expected"),
        ("  match: sorted($X)", "  match: sorted($X)\n  count: 0", "count", ">= 1"),
        ("  match: sorted($X)", "  match: sorted($X)\n  count: two", "count", "Expected `int`"),
        ("  wrap: list($MATCH)", "  argument: [k]", "argument", "Expected"),
        ("  wrap: list($MATCH)", "  delete: 1", "delete", "Expected"),
        ("  symbol: scale\n", "", "- file", "missing required field `symbol`"),
        ("origin: a test\n", "", "title", "missing required field `origin`"),
        (TEXT, "", "", "empty"),
        (TEXT, "# nothing\n", "#", "empty"),
        (TEXT, "- a\n- b\n", "- a", "Expected `object`"),
        (TEXT, "just text\n", "just", "Expected `object`"),
    ],
)
def test_malformed_yaml_names_the_line(
    toy: ToyRepository, refused: Refused, old: str, new: str, marker: str, found: str
) -> None:
    assert old in TEXT
    text = TEXT.replace(old, new, 1)
    put(toy, text)
    lines = [n for n, line in enumerate(text.splitlines(), 1) if marker in line] or [1]
    error = refused()
    assert error["where"] == f"{toy.root / PATCH}:{lines[0]}"
    assert found in error["found"]


def test_text_that_is_not_utf8(toy: ToyRepository, refused: Refused) -> None:
    put(toy, TEXT.encode().replace(b"a title", b"a t\xeftle"))
    assert PATCH in refused()["where"]


def without(key: str) -> dict[str, Any]:
    return {k: v for k, v in SCALE_EDIT.items() if k != key}


@pytest.mark.parametrize(
    ("edit", "found"),
    [
        ({**SCALE_EDIT, "file": "../pyproject.toml"}, "leaves the package"),
        ({**SCALE_EDIT, "file": "a/../../b.py"}, "leaves the package"),
        ({**SCALE_EDIT, "file": "/etc/passwd"}, "leaves the package"),
        ({**SCALE_EDIT, "file": "a\\b.py"}, "leaves the package"),
        ({**SCALE_EDIT, "file": "."}, "leaves the package"),
        ({**SCALE_EDIT, "before": "x"}, "before, wrap"),
        ({**SCALE_EDIT, "delete": False}, "wrap"),
        ({**without("wrap"), "delete": False}, "delete"),
        (without("wrap"), "no operation"),
        (without("expect"), "no expect"),
        ({**SCALE_EDIT, "expect": []}, "no expect"),
        (without("match"), "wrap without match"),
        ({**without("wrap"), "constant": "1"}, "constant with match"),
        ({**without("wrap"), "default": {"factor": "1"}}, "default with match"),
        ({**SCALE_EDIT, "symbol": "<module>"}, "wrap"),
        ({**without("wrap"), "import": "import a"}, "import"),
        ({"file": "core.py", "symbol": "<module>", "match": "import $X", "import": "import a"}, "import with match"),
        ({**SCALE_EDIT, "symbol": "scale()"}, "scale()"),
        ({**SCALE_EDIT, "symbol": "scale#0"}, "scale#0"),
        ({**SCALE_EDIT, "count": 2}, "count 2"),
        ({**SCALE_EDIT, "count_reason": "why"}, "count 1"),
        ({**SCALE_EDIT, "wrap": "list($X)"}, "wrap without $MATCH"),
        ({**without("wrap"), "replace": "code.py#there"}, "no file code.py"),
        ({**without("wrap"), "replace": "new.py#missing"}, "no function missing"),
        ({**without("wrap"), "argument": {"k": "code.py#there"}}, "no file code.py"),
        ({**without("wrap"), "argument": {"k": "new.py#missing"}}, "no function missing"),
        ({"file": "core.py", "symbol": "scale", "default": {"factor": "new.py#missing"}, "expect": "$X"}, "missing"),
        ({**without("wrap"), "before": "broken.py#f"}, ""),
        ({**without("wrap"), "before": "new.py#only_docstring"}, ""),
        ({**without("wrap"), "replace": "new.py#two_statements"}, "not a single return"),
        ({**without("wrap"), "argument": {}}, ""),
        ({"file": "core.py", "symbol": "scale", "default": {}, "expect": "$X"}, ""),
        ({**SCALE_EDIT, "match": "sorted("}, "does not parse"),
        ({**SCALE_EDIT, "match": ""}, "does not parse"),
        ({**SCALE_EDIT, "match": {}}, "ast-grep refuses"),
        ({**SCALE_EDIT, "match": {"kind": "no_such_kind"}}, "ast-grep refuses"),
        ({**SCALE_EDIT, "expect": ["out = $X", "x ="]}, "does not parse"),
        ({**SCALE_EDIT, "wrap": "list($MATCH, $OTHER)"}, "$OTHER"),
    ],
)
def test_refused_edits(toy: ToyRepository, refused: Refused, edit: Mapping[str, Any], found: str) -> None:
    folder = toy.add_patch("one", edit)
    new = 'def only_docstring():\n    """No code."""\ndef two_statements():\n    a = 1\n    return a\n'
    write_files(folder, {"new.py": new, "broken.py": "def f(:\n"})
    error = refused()
    assert found in error["found"]
    assert "one" in error["where"]


CONDITION = {"file": "core.py", "symbol": "scale"}


@pytest.mark.parametrize(
    ("header", "found"),
    [
        ({"applies": "banana"}, "'banana'"),
        ({"applies": "1.2"}, "'1.2'"),
        ({"retire_when": {"version": ">=x.y"}}, "'>=x.y'"),
        ({"eras": [{"applies": "=>1", "edits": [SCALE_EDIT]}]}, "'=>1'"),
        ({"overlay": [{"src": "new.py", "dest": "new.py", "mode": "new", "applies": "~1"}]}, "'~1'"),
        ({"retire_when": {}}, "exactly one of version and anchor"),
        ({"superseded_when": {"version": ">=2", "anchor": CONDITION}}, "exactly one of version and anchor"),
        ({"superseded_when": {"anchor": {**CONDITION, "file": "../x.py"}}}, "leaves the package"),
        ({"superseded_when": {"anchor": {**CONDITION, "symbol": "scale()"}}}, "scale()"),
        ({"superseded_when": {"anchor": {**CONDITION, "match": "x ="}}}, "does not parse"),
        ({"forwarded": "maybe"}, "forwarded: 'maybe'"),
        ({"forwarded": "http://example.org/1"}, "forwarded"),
        ({"after": ["later"]}, "'later'"),
        ({"after": ["one"]}, "'one'"),
        ({"after": ["nowhere"]}, "'nowhere'"),
        ({"eras": [{"applies": ">=1", "edits": [{**SCALE_EDIT, "file": "../x.py"}]}]}, "leaves the package"),
        ({"overlay": [{"src": "../new.py", "dest": "new.py", "mode": "new"}]}, "leaves the package"),
        ({"overlay": [{"src": "new.py", "dest": "/new.py", "mode": "new"}]}, "leaves the package"),
        ({"overlay": [{"src": "gone.py", "dest": "new.py", "mode": "new"}]}, "no overlay file gone.py"),
        ({"overlay": [{"src": "new.py", "dest": "core.py", "mode": "replace"}]}, "an edit targets the overlay file"),
        ({"overlay": [{"src": "new.py", "dest": "new.py", "mode": "add"}]}, "Invalid enum value"),
    ],
)
def test_refused_headers(toy: ToyRepository, refused: Refused, header: Mapping[str, Any], found: str) -> None:
    toy.add_overlay("new.py", "NEW = 1\n")
    toy.add_patch("one", SCALE_EDIT, **header)
    toy.add_patch("later", TOTAL_EDIT)
    error = refused()
    assert found in error["found"]
    assert "one" in error["where"]


def test_a_patch_without_anything_to_do(toy: ToyRepository, refused: Refused) -> None:
    toy.add_patch("one")
    assert "neither edits, eras nor overlay" in refused()["found"]


@pytest.mark.parametrize(
    ("series", "line", "found"),
    [
        ("one\none\n", 2, "'one'"),
        ("# a comment\n\nOne\n", 3, "'One'"),
        ("one two\n", 1, "'one two'"),
        ("../one\n", 1, "'../one'"),
        ("one  # why\n  one", 2, "'one'"),
    ],
)
def test_refused_series_lines(toy: ToyRepository, refused: Refused, series: str, line: int, found: str) -> None:
    toy.add_patch("one", SCALE_EDIT)
    write_files(toy.root, {"patches/toy/series": series})
    error = refused()
    assert error["where"] == f"{toy.root}/patches/toy/series:{line}"
    assert error["found"] == found


@pytest.mark.parametrize("lost", ["patches/toy/series", PATCH])
def test_lost_files(toy: ToyRepository, refused: Refused, lost: str) -> None:
    toy.add_patch("one", SCALE_EDIT)
    (toy.root / lost).unlink()
    assert refused()["where"] == str(toy.root / lost)


def test_the_series_reads_comments_and_blank_lines(toy: ToyRepository) -> None:
    write_files(toy.root, {"patches/toy/series": "# one\n\n a-1 # two\r\nb\n"})
    assert read_series(toy.root / "patches" / "toy") == ["a-1", "b"]


@pytest.mark.parametrize(
    ("args", "found"),
    [
        (["--patch", "thre"], "'thre'"),
        (["--without", "toy/thre"], "'toy/thre'"),
        (["--accept-drift", "thre"], "'thre'"),
        (["--patch", "three"], "toy/three is chosen without two"),
        (["--without", "toy/two"], "toy/three is chosen without two"),
        (["--patch", "two", "--patch", "toy/three", "--without", "two"], "toy/three is chosen without two"),
        (["--target", "vllm"], "'vllm'"),
        (["--pin", "other"], "'other'"),
        (["--installed"], "--installed with --checkout"),
    ],
)
def test_refused_choices(toy: ToyRepository, refused: Refused, args: list[str], found: str) -> None:
    for name, after in (("one", []), ("two", []), ("three", ["two"])):
        toy.add_patch(name, SCALE_EDIT, after=after)
    assert found in refused(*args)["found"]


@pytest.mark.parametrize(
    "change",
    [
        {"patches/toy/one/whole.py": "def code(MATCH):\n    return list(MATCH)\n"},
        {"patches/toy/one/part.py": "def code():\n    return True\n"},
        {"overlay/toy/new.py": "NEW = 2\n"},
        {PATCH: TEXT},
    ],
)
def test_all_that_decides_the_bytes_counts_for_the_digest(toy: ToyRepository, change: dict[str, str]) -> None:
    """The header, every code file that an edit names in any form, and the overlay files; not a cache."""
    toy.add_overlay("new.py", "NEW = 1\n")
    edits = {**without("wrap"), "replace": "whole.py#code"}, {**without("wrap"), "argument": {"k": "part.py#code"}}
    folder = toy.add_patch("one", *edits, overlay=[{"src": "new.py", "dest": "new.py", "mode": "new"}])
    files = {"whole.py": "def code(MATCH):\n    return MATCH\n", "part.py": "def code():\n    return False\n"}
    write_files(folder, {**files, "__pycache__/x.pyc": ""})
    (before,) = load_series(toy.root, "toy")
    write_files(folder, {"__pycache__/x.pyc": "cache"})
    assert load_series(toy.root, "toy")[0].digest == before.digest
    write_files(toy.root, change)
    assert load_series(toy.root, "toy")[0].digest != before.digest
