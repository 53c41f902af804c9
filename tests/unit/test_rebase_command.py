"""``neaptide rebase`` on a toy: exit codes, what is written and remembered; what it and ``check`` refuse."""

from __future__ import annotations

import json
from typing import Any

import pytest
import rebasing
from neaptide.cli import main
from rebasing import AROUND, AT, AWAY, Rebase, Shown
from toy import SCALE_EDIT, commit_all, git

rebase = rebasing.rebase


@pytest.mark.parametrize(
    ("changes", "code", "statuses"),
    [
        ([], 0, ["clean", "clean"]),
        ([AROUND], 0, ["moved", "clean"]),
        ([AT], 4, ["drift", "clean"]),
        ([AWAY], 3, ["conflict", "clean"]),
        ([AWAY, ("sorted(out)", "sorted(values)")], 3, ["conflict", "drift"]),
        ([("result += value", "result = result + value")], 5, ["unmet", "clean"]),
    ],
)
@pytest.mark.parametrize("kind", ["revision", "release"])
def test_the_series_on_a_release_or_a_commit(
    rebase: Rebase, kind: str, changes: list[tuple[str, str]], code: int, statuses: list[str]
) -> None:
    before, head = rebase.pins, rebase.revision(*changes)
    asked = f"toy@{head}" if kind == "revision" else rebase.release("1.3.0", *changes)
    assert rebase.statuses(asked) == (code, statuses)
    assert rebase.pins == before
    assert git(rebase.checkout, "rev-parse", "HEAD") == head
    assert git(rebase.checkout, "status", "--porcelain") == ""


def report_of(rebase: Rebase, out: dict[str, Any]) -> str:
    name = next(n for n in out["written"] if n.endswith("report.md"))
    return (rebase.toy.build / "rebase" / name).read_text()


def test_the_report_shows_upstreams_change_and_the_range_diff(rebase: Rebase) -> None:
    beside = ("result += value\n", "result += value\n                result *= 1\n")
    code, out, text = rebase.run("rebase", f"toy@{rebase.revision(AROUND, beside)}")
    assert code == 0
    report = report_of(rebase, out)
    assert "moved: toy/min: core.py Pool.total (changed)" in text
    for shown in (text, report):
        assert "-        result = 0\n+        result = 0.0\n" in shown
    assert "## Range-diff of the two series" in report
    difference = report.split("## Range-diff of the two series")[1]
    assert "1:  " in difference
    assert " ! " in difference
    assert "result *= 1\n" in difference
    assert "value = min(value, LIMIT)" in difference


def test_a_range_diff_of_many_patches_with_an_equals_sign(rebase: Rebase) -> None:
    """From ten on git pads the numbers, and a title may hold what stands between two equal commits."""
    for number in range(9):
        rebase.toy.add_overlay(f"new{number}.py", "X = 1\n")
        new = [{"src": f"new{number}.py", "dest": f"new{number}.py", "mode": "new"}]
        rebase.toy.add_patch(f"new{number}", overlay=new, title=f"number {number} = another")
    patch = rebase.toy.root / "patches/toy/min/patch.yaml"
    patch.write_text(patch.read_text().replace("title: a title", "title: a = b"))
    rebase.toy.lock()
    _, out, _ = rebase.run("rebase", f"toy@{rebase.revision()}")
    assert "Range-diff" not in report_of(rebase, out)
    beside = ("result += value\n", "result += value\n                result *= 1\n")
    _, out, _ = rebase.run("rebase", f"toy@{rebase.revision(beside)}")
    assert " 1:  " in report_of(rebase, out).split("## Range-diff of the two series")[1]


@pytest.mark.parametrize(
    ("declares", "tag", "version"),
    [
        ('[project]\nname = "toy"\nversion = "1.2.9"\n', "v1.3.0", "1.2.9"),
        ("# toy\n", "v1.3.0", "1.3.0"), ("# toy\n", "1.3.0rc1", "1.3.0rc1"), ("# toy\n", None, "1.2.0"),
    ],
)  # fmt: skip
def test_a_commit_has_the_version_that_it_declares_or_its_nearest_tag(
    rebase: Rebase, declares: str, tag: str | None, version: str
) -> None:
    (rebase.checkout / "pyproject.toml").write_text(declares)
    rebase.revision()
    if tag:
        git(rebase.checkout, "tag", tag)
    _, out, _ = rebase.run("rebase", f"toy@{rebase.revision(AROUND)}")
    assert out["plan"]["artefact"]["version"] == version


@pytest.mark.parametrize(("tag", "says"), [(None, "no version at"), ("nightly", "'nightly' is the version at")])
def test_a_commit_without_a_version_is_refused(rebase: Rebase, tag: str | None, says: str) -> None:
    git(rebase.checkout, "tag", "-d", "v1.2.0")
    if tag:
        git(rebase.checkout, "tag", tag)
    code, out, _ = rebase.run("rebase", f"toy@{rebase.revision()}")
    assert (code, out["error"]["todo"]) == (2, "Fetch the tags.")
    assert says in out["error"]["found"]


def test_without_range_diff_where_nothing_is_to_see_or_nothing_fits(rebase: Rebase) -> None:
    for changes in ([], [AWAY]):
        _, out, _ = rebase.run("rebase", f"toy@{rebase.revision(*changes)}")
        assert "Range-diff" not in report_of(rebase, out)


def test_a_conflict_names_the_new_place(rebase: Rebase) -> None:
    code, out, text = rebase.run("rebase", f"toy@{rebase.revision(AWAY)}")
    assert code == 3
    edit = out["plan"]["patches"][0]["edits"][0]
    best = {"file": "core.py", "likeness": 1.0, "rule_matches": 1, "symbol": "Pool.sum"}
    assert (edit["fate"], edit["candidates"]) == ("renamed", [best])
    assert edit["todo"] in text
    assert edit["todo"] in report_of(rebase, out)
    assert "next: mend the patches in conflict and run the same again" in text


def test_accepted_drift_is_remembered_for_that_commit_only(rebase: Rebase) -> None:
    first = f"toy@{rebase.revision(AT)}"
    assert rebase.statuses(first)[0] == 4
    assert rebase.statuses(first, "--accept-drift", "toy/list")[0] == 4
    code, out, text = rebase.run("rebase", first, "--accept-drift", "toy/min")
    assert (code, out["plan"]["patches"][0]["edits"][0]["accepted"]) == (0, True)
    assert "drift (accepted): toy/min" in text
    state = json.loads((rebase.toy.build / "rebase" / first.replace("@", "-") / "state.json").read_text())
    assert [a[0] for a in state["accepted"]] == ["min"]
    code, out, text = rebase.run("rebase", first)
    assert (code, out["plan"]["patches"][0]["edits"][0]["accepted"]) == (0, True)
    assert "since the last run: 0 settled, 0 new, 1 to read in all" in text
    second = f"toy@{rebase.revision(('item > 0', 'item > 2'))}"
    assert rebase.statuses(second)[0] == 4


def test_the_next_run_says_what_was_settled(rebase: Rebase) -> None:
    asked = f"toy@{rebase.revision(AWAY)}"
    assert rebase.statuses(asked)[0] == 3
    folder = rebase.toy.root / "patches" / "toy" / "min"
    mended = (folder / "patch.yaml").read_text().replace("Pool.total", "Pool.sum")
    (folder / "patch.yaml").write_text(mended)
    code, _, text = rebase.run("rebase", asked)
    assert code == 4
    assert "since the last run: 1 settled, 1 new, 1 to read in all" in text
    assert "no pin holds a guard of this edit" in text


@pytest.mark.parametrize("more", [(), ("--accept-drift", "min"), ("--accept-drift", "min", "--accept"),
                                  ("--accept-drift", "min", "--accept", "--as", "next")])  # fmt: skip
def test_dry_run_writes_nothing(rebase: Rebase, more: tuple[str, ...]) -> None:
    asked = f"toy@{rebase.revision(AT)}"
    before = rebase.everything()
    code, out, _ = rebase.run("rebase", asked, "--dry-run", *more)
    assert (code, out["written"]) == (0 if more else 4, [])
    assert rebase.everything() == before


def test_retired_patches_are_something_to_read(rebase: Rebase) -> None:
    rebase.toy.add_patch("old", {**SCALE_EDIT, "match": "[$$$X]"}, retire_when={"version": ">=1.3"})
    assert rebase.statuses(rebase.release("1.3.0")) == (1, ["clean", "clean", "retired"])


WRONG: dict[str, tuple[tuple[str, ...], str]] = {
    "no operator": (("toy",), "'toy'"),
    "another operator": (("toy>=1.3",), "'toy>=1.3'"),
    "an option as revision": (("toy@--all",), "'toy@--all'"),
    "no version": (("toy==1..3",), "'1..3'"),
    "unknown target": (("nope==1.0",), "'nope'"),
    "unknown target at a commit": (("nope@main",), "'nope'"),
    "unknown revision": (("toy@nowhere",), "'nowhere'"),
    "unknown pin": (("toy@main", "--pin", "nope"), "'nope'"),
    "unknown patch": (("toy@main", "--accept-drift", "nope"), "'nope'"),
    "a release that is not here": (("toy==9.9",), "toy-9.9.tar.gz"),
    "--as alone": (("toy@main", "--as", "next"), "--as without --accept"),
    "a taken name": (("toy@main", "--accept", "--as", "current"), "'current'"),
    "a name that is a path": (("toy@main", "--accept", "--as", "../next"), "'../next'"),
    "nothing": ((), "required"),
    "no such folder": (("toy@main", "--checkout", "toy=/nowhere"), "/nowhere"),
    "another package": (("toy@empty",), "no package"),
}


ROWS = ("unknown revision", "a release that is not here", "another package")
OF_REBASE = {"--accept-drift", "--as", "--pin"}
CALLS = [("rebase", n) for n in WRONG] + [("check", n) for n, (args, _) in WRONG.items() if not OF_REBASE & set(args)]


@pytest.mark.parametrize(("command", "name"), CALLS)
def test_wrong_input_is_refused(rebase: Rebase, command: str, name: str) -> None:
    args, says = WRONG[name]
    if command == "check":
        args, says = ("--against", *args), says.replace("required", "--against")
    git(rebase.checkout, "checkout", "-q", "--orphan", "empty")
    git(rebase.checkout, "mv", "toy", "tot")
    commit_all(rebase.checkout, "another package")
    git(rebase.checkout, "checkout", "-q", "main")
    before = rebase.everything()
    code, out, text = rebase.run(command, *args)
    # A release that is not there is a row of `check`: the others are looked at all the same.
    begin = f"{args[-1]} was not planned: " if command == "check" and name in ROWS else "error:"
    errors = [line for line in text.splitlines() if line.startswith(begin)]
    assert (code, len(errors)) == (2, 1), text
    assert says in errors[0]
    assert "; wanted" in errors[0]
    assert out["exit_code"] == 2
    assert rebase.everything() == before


def test_a_commit_needs_its_checkout(rebase: Rebase, capsys: Shown) -> None:
    for command in (("rebase",), ("check", "--against")):
        assert main([command[0], "--root", str(rebase.toy.root), *command[1:], "toy@main"]) == 2
        assert "wanted --checkout toy=DIR" in capsys.readouterr().err
