"""Typed outcomes of a series on upstreams that changed, and what the command does with each of them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
from toy import (
    SCALE_EDIT,
    TOTAL_EDIT,
    Upstream,
    git,
    write_files,
)


def edit(match: Any, symbol: str = "Pool.total", **operation: Any) -> dict[str, Any]:
    return {"file": "core.py", "symbol": symbol, "match": match, "expect": {"kind": "identifier"}, **operation}


@pytest.mark.parametrize(
    ("changes", "status", "code"),
    [
        ([("result = 0\n", "result = (0)  # from nothing\n")], "clean", 0),
        ([("math.floor(item)", "math . floor(\n                    item,\n                )")], "clean", 0),
        ([('"""Sum of the items."""', "'''Another\n        text.'''")], "clean", 0),
        ([("LIMIT = 8", "import os\nLIMIT = 9"), ("factor=2", "factor=3"), ("self.name = name", "pass")], "clean", 0),
        ([("result = 0", "result = 0.0")], "moved", 0),
        ([("result += value", "result += value\n                result *= 1")], "moved", 0),
        ([("        return result\n", "        return -result\n")], "moved", 0),
        ([("self, items", "self, items, *more")], "moved", 0),
        ([("value = math.floor(item)", "value = math.floor(item + 1)")], "drift", 4),
        ([("value = math.floor(item)", "value = math.floor(1)")], "drift", 4),
        ([("item > 0", "item >= 0")], "drift", 4),
        ([("for item in items", "for item in items[1:]")], "drift", 4),
        ([("            if item > 0:\n", "            if True: pass\n            else:\n")], "drift", 4),
        ([("math.floor(item)", "math.ceil(item)")], "conflict", 3),
        ([("result += value", "value = math.floor(value)")], "conflict", 3),
        ([("def total", "def sum")], "conflict", 3),
        ([("    def total", "    def total(self): pass\n    def total")], "conflict", 3),
    ],
)  # fmt: skip
def test_outcome_by_what_upstream_changed(
    upstream: Upstream, changes: list[tuple[str, str]], status: str, code: int
) -> None:
    upstream.toy.add_patch("min", TOTAL_EDIT)
    upstream.toy.lock()
    upstream.change(*changes)
    assert upstream.statuses() == (code, {"min": [status]})
    assert ("min(value, LIMIT)" in upstream.core) == (code == 0)


def test_moved_and_drift_show_upstreams_change(upstream: Upstream) -> None:
    upstream.toy.add_patch("min", TOTAL_EDIT)
    upstream.toy.add_patch("list", SCALE_EDIT)
    upstream.toy.lock()
    upstream.change(("item > 0", "item > 1"), ("factor=2", "factor=3"))
    code, report, text = upstream.run("apply")
    assert code == 4
    for words in ("drift: toy/min: core.py Pool.total", "-            if item > 0:", "+            if item > 1:"):
        assert words in text
    for words in ("moved: toy/list: core.py scale", "-def scale(values, factor=2):", "--accept-drift toy/min"):
        assert words in text
    assert "+            if item > 1:" in report["patches"][0]["edits"][0]["upstream_change"]
    assert report["patches"][0]["edits"][0]["accepted"] is False


def test_accepted_drift_is_remembered_until_upstream_changes_again(upstream: Upstream) -> None:
    upstream.toy.add_patch("min", TOTAL_EDIT)
    upstream.toy.lock()
    upstream.change(("item > 0", "item > 1"))
    assert upstream.run("apply")[0] == 4
    assert upstream.run("apply", "--accept-drift", "toy/min", "--dry-run")[0] == 0
    assert upstream.run("apply")[0] == 4
    assert upstream.run("apply", "--accept-drift", "min")[0] == 0
    head = git(upstream.folder, "rev-parse", "HEAD")
    assert upstream.run("apply")[0] == 0
    assert git(upstream.folder, "rev-parse", "HEAD") == head
    assert upstream.run("verify")[0] == 0
    assert upstream.run("revert")[0] == 0
    code, report, _ = upstream.run("apply")
    assert (code, report["patches"][0]["edits"][0]["accepted"]) == (0, True)
    assert git(upstream.folder, "rev-parse", "HEAD") == head
    assert upstream.run("revert")[0] == 0
    upstream.change(("item > 1", "item > 2"))
    assert upstream.run("apply")[0] == 4


def test_drift_of_one_patch_does_not_accept_another(upstream: Upstream) -> None:
    upstream.toy.add_patch("min", TOTAL_EDIT)
    upstream.toy.add_patch("add", edit("result += value", before="value += 1"))
    upstream.toy.lock()
    upstream.change(("item > 0", "item > 1"))
    assert upstream.run("apply", "--accept-drift", "min")[0] == 4
    assert upstream.run("apply", "--accept-drift", "min", "--accept-drift", "add")[0] == 0


def test_every_outcome_is_reported(upstream: Upstream) -> None:
    """Conflicts do not hide what comes after them, in the same patch or the next."""
    upstream.toy.add_patch("gone", edit("math.floor($X)", after="pass"), edit("return result", before="result += 1"))
    upstream.toy.add_patch("twice", edit("self.size = $A", "Pool.__init__", after="pass"))
    upstream.toy.add_patch("list", SCALE_EDIT)
    upstream.toy.lock()
    upstream.change(
        ("math.floor", "math.ceil"), ("self.name = name", "self.size = 1"), ("sorted(out)", "sorted(values)")
    )
    assert upstream.statuses() == (3, {"gone": ["conflict", "moved"], "twice": ["conflict"], "list": ["drift"]})
    _, _, text = upstream.run("apply")
    assert "toy/gone: core.py Pool.total: the rule has no matches" in text
    assert "toy/twice: core.py Pool.__init__: the rule has 2 matches" in text
    assert "toy/list: core.py scale: " in text


def test_what_people_read_is_what_upstream_wrote(upstream: Upstream) -> None:
    """Lines on a pipe are tab-separated, and nothing in a diff is taken for markup or an emoji code."""
    upstream.toy.add_patch("min", TOTAL_EDIT)
    upstream.toy.lock()
    upstream.change(("result = 0", 'result = items[:x:2]["[bold]"] or "\t"'))
    code, _, text = upstream.run("apply", "--dry-run")
    assert code == 0
    assert '+        result = items[:x:2]["[bold]"] or "\t"\n' in text
    assert "moved\ttoy/min\t" in text


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ({"retire_when": {"version": ">=1.2"}}, "retired"),
        ({"retire_when": {"anchor": {"file": "other.py", "symbol": "RESULT"}}}, "retired"),
        ({"superseded_when": {"version": "==1.2.0"}}, "superseded"),
        ({"superseded_when": {"anchor": {"file": "core.py", "symbol": "scale", "match": "sorted($X)"}}}, "superseded"),
        ({"applies": "<1.2"}, "not-applicable"),
        ({"superseded_when": {"version": ">=1.3"}}, "clean"),
        ({"superseded_when": {"anchor": {"file": "core.py", "symbol": "scale", "match": "min($X)"}}}, "clean"),
        ({"superseded_when": {"anchor": {"file": "none.py", "symbol": "scale"}}}, "clean"),
        ({"superseded_when": {"anchor": {"file": "core.py", "symbol": "{PREFIX}_X"}}}, "superseded"),
        ({"applies": ">=1.2,<2"}, "clean"),
    ],
)  # fmt: skip
def test_patches_that_leave_the_series(upstream: Upstream, header: Mapping[str, Any], status: str) -> None:
    upstream.change(("LIMIT = 8 * 1024", "LIMIT = 8 * 1024\nTOY_X = 1"))
    upstream.toy.add_patch("list", SCALE_EDIT, **header)
    upstream.toy.lock()
    code, report, text = upstream.run("apply")
    gone_since_the_lock = "{PREFIX}" in str(header)
    assert (code, report["patches"][0]["status"]) == (int(gone_since_the_lock), status)
    assert ("to read: the pin's lock holds patches" in text) == gone_since_the_lock
    assert [status, "toy/list"] in [line.split()[:2] for line in text.splitlines()]
    assert ("list(sorted" in upstream.core) == (status == "clean")


FIRST = ("first", edit("value = math.floor($X)", after="value = min(value, len(items))"), [])
SECOND = ("second", edit("result += value", wrap="if value:\n    $MATCH"), [])
ON_FIRST = ("on-first", edit("min($X, $Y)", replace="max($X, $Y)"), ["first"])
THIRD = ("third", edit("for $I in items:\n    $$$B", start="math.floor(1)"), [])
FOURTH = ("fourth", edit("if $C:\n    $$$B", end="pass"), [])
WRAP = ("wrap", edit("math.floor($X)", wrap="math.trunc($MATCH)"), [])
WIDE = ("wide", edit("math.$F($X)", before="pass"), [])
SETS = [[FIRST, SECOND], [FIRST, SECOND, ON_FIRST], [SECOND, THIRD, FIRST], [FIRST, THIRD, FOURTH], [WRAP, WIDE]]


@pytest.mark.parametrize("series", SETS)
def test_every_closed_subset_is_clean(upstream: Upstream, series: list[tuple[str, dict[str, Any], list[str]]]) -> None:
    """Patches of one function, none of which may see the text of another that it does not come after."""
    for name, change, after in series:
        upstream.toy.add_patch(name, change, after=after)
    upstream.toy.lock()
    after_of = {name: set(after) for name, _, after in series}
    for size in range(1, len(series) + 1):
        for names in itertools.combinations(after_of, size):
            if any(after_of[n] - set(names) for n in names):
                continue
            chosen = [a for n in names for a in ("--patch", n)]
            assert upstream.statuses(*chosen) == (0, {n: ["clean"] for n in names}), names
            assert upstream.run("revert")[0] == 0


def test_text_of_another_patch_only_with_after(upstream: Upstream) -> None:
    upstream.toy.add_patch("first", FIRST[1])
    upstream.toy.add_patch("blind", ON_FIRST[1])
    assert upstream.toy.run("pins", "--lock", "current") == 3
    write_files(upstream.toy.root, {"patches/toy/series": "first\n"})
    upstream.toy.add_patch("seeing", ON_FIRST[1], after=["first"])
    upstream.toy.lock()
    assert upstream.statuses() == (0, {"first": ["clean"], "seeing": ["clean"]})
    assert "value = max(value, len(items))" in upstream.core


def test_text_of_a_patch_stays_its_own_when_another_captures_it(upstream: Upstream) -> None:
    """``first`` wrote ``len(items)``; a capture by ``on-first`` does not make it upstream's text."""
    upstream.change(("result = 0", "result = len(items) * 0"))
    upstream.toy.add_patch("first", FIRST[1])
    upstream.toy.add_patch("on-first", ON_FIRST[1], after=["first"])
    upstream.toy.add_patch("blind", edit("len($X)", wrap="int($MATCH)"))
    for subset in ("first\nblind\n", "first\non-first\nblind\n"):
        write_files(upstream.toy.root, {"patches/toy/series": subset})
        assert upstream.run("pins", "--lock", "current")[0] == 0, subset


def test_overlaps(upstream: Upstream) -> None:
    """Bad input inside one patch, a conflict that names the other patch between two."""
    inner, outer = edit("math.floor($X)", wrap="abs($MATCH)"), edit("value = $V", replace="value = 1")
    upstream.toy.add_patch("both", inner, outer)
    code, report, _ = upstream.run("pins", "--lock", "current")
    assert (code, report["error"]["found"]) == (2, "two edits of one patch overlap")
    write_files(upstream.toy.root, {"patches/toy/series": ""})
    upstream.toy.add_patch("inner", inner)
    upstream.toy.add_patch("outer", outer)
    code, report, text = upstream.run("pins", "--lock", "current")
    assert (code, [p["status"] for p in report["patches"]]) == (3, ["clean", "conflict"])
    assert "overlaps an edit of inner" in text
    assert not list((upstream.toy.root / "patches/pins").glob("*.lock"))


@pytest.mark.parametrize(
    "change",
    [
        {**SCALE_EDIT, "expect": "nothing($X)"},
        {**SCALE_EDIT, "expect": ["out = $X", "nothing($X)"]},
        {**edit("result += value", before="value = other(value)"), "expect": "other($X)"},
        {"file": "core.py", "symbol": "scale", "replace": "def scaled(): pass", "expect": "def scaled(): pass"},
    ],
)
def test_post_conditions_that_do_not_hold(upstream: Upstream, change: Mapping[str, Any]) -> None:
    upstream.toy.add_patch("unmet", change)
    code, report, text = upstream.run("pins", "--lock", "current")
    assert (code, report["patches"][0]["status"]) == (5, "unmet")
    assert "post-condition not met" in text


def test_a_later_patch_must_keep_the_post_condition_of_an_earlier_one(upstream: Upstream) -> None:
    upstream.toy.add_patch("first", {**FIRST[1], "expect": "result += value"})
    upstream.toy.add_patch("breaks", edit("result += value", replace="result -= value"), after=["first"])
    code, report, _ = upstream.run("pins", "--lock", "current")
    assert code == 5
    assert "toy/first: core.py Pool.total: result += value does not hold" in report["error"]["found"]


def test_eras_and_names(upstream: Upstream) -> None:
    """Common edits, then those of each era that applies; names stand in code and rules alike."""
    named = {"file": "core.py", "symbol": "<module>", "import": "from {pkg} import __name__ as us  # {PREFIX} {keep}"}
    eras = [
        {"applies": ">=1.2,<2", "edits": [edit("return result", before="result += len('{PREFIX}_X')")]},
        {"applies": ">=1.0", "edits": [{**SCALE_EDIT, "match": "sorted($X)", "expect": "out = $X"}]},
        {"applies": ">=2", "edits": [edit("nowhere()", before="x")]},
    ]
    upstream.change(("LIMIT = 8 * 1024", "LIMIT = 8 * 1024\nTOY_X = 1"))
    upstream.toy.add_patch("eras", named, eras=eras)
    upstream.toy.lock()
    assert upstream.statuses("--dry-run") == (0, {"eras": ["clean", "clean", "clean"]})
    upstream.run("apply")
    assert "import math\nfrom toy import __name__ as us  # TOY {keep}\n" in upstream.core
    assert "        result += len('TOY_X')\n        return result\n" in upstream.core
