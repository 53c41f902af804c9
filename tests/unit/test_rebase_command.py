"""``neaptide rebase`` and ``neaptide check`` on a toy: exit codes, what is written and remembered, what is refused."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from neaptide import pinning, verify
from neaptide.cli import main
from neaptide.fetch import cache_folder
from neaptide.pins import Pin, TargetPin, load_lock, load_pin
from neaptide.rebase.newpin import encode_pin
from toy import (
    PACKAGE,
    SCALE_EDIT,
    TOTAL_EDIT,
    ToyRepository,
    commit_all,
    git,
    make_checkout,
    make_sdist,
    write_files,
)  # fmt: skip

Shown = pytest.CaptureFixture[str]
AROUND = ("result = 0\n", "result = 0.0\n")
AT = ("item > 0", "item > 1")
AWAY = ("def total", "def sum")


def core(*changes: tuple[str, str]) -> str:
    text = str(PACKAGE["toy/core.py"])
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    return text


@dataclass
class Rebase:
    """A locked toy with two patches, its sdist in the cache, and a checkout of upstream."""

    toy: ToyRepository
    checkout: Path
    shown: Shown

    def revision(self, *changes: tuple[str, str]) -> str:
        """Upstream's next commit, with these changes to the pin's ``core.py`` and to nothing else."""
        write_files(self.checkout, {"toy/core.py": core(*changes)})
        git(self.checkout, "commit", "-q", "--allow-empty", "-a", "-m", "upstream moves on")
        return git(self.checkout, "rev-parse", "HEAD")

    def release(self, version: str, *changes: tuple[str, str]) -> str:
        """A release in the cache."""
        files = {**PACKAGE, "toy/core.py": core(*changes)}
        path = cache_folder() / f"toy-{version}.tar.gz"
        if changes or not path.is_file():  # the pin's own keeps its sha256: an archive has its time in it
            make_sdist(path, files, f"toy-{version}")
        return f"toy=={version}"

    def run(self, command: str, *args: str) -> tuple[int, dict[str, Any], str]:
        """Exit code, JSON and what people read; releases come from the cache."""
        self.shown.readouterr()
        given = ("--root", str(self.toy.root), "--checkout", f"toy={self.checkout}", "--frozen", "--json")
        code = main([command, *given, *args])
        out, err = self.shown.readouterr()
        return code, json.loads(out), err

    def statuses(self, *args: str) -> tuple[int, list[str]]:
        code, out, _ = self.run("rebase", *args)
        return code, [p["status"] for p in out["plan"]["patches"]]

    @property
    def pins(self) -> dict[str, bytes]:
        return {p.name: p.read_bytes() for p in sorted((self.toy.root / "patches" / "pins").iterdir())}

    def everything(self) -> dict[str, bytes]:
        """Every file of the repository and the checkout; of git directories only where HEAD is."""
        return {
            str(p): p.read_bytes() for top in (self.toy.root, self.checkout) for p in sorted(top.rglob("*"))
            if p.is_file() and (".git" not in p.parts or p.name == "HEAD")
        }  # fmt: skip


@pytest.fixture
def rebase(toy: ToyRepository, tmp_path: Path, capsys: Shown, monkeypatch: pytest.MonkeyPatch) -> Rebase:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    toy.add_patch("min", TOTAL_EDIT)
    toy.add_patch("list", SCALE_EDIT)
    toy.lock()
    cache_folder().mkdir(parents=True)
    (cache_folder() / toy.sdist.name).write_bytes(toy.sdist.read_bytes())
    return Rebase(toy, make_checkout(tmp_path / "checkout"), capsys)


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


@pytest.mark.parametrize(("changes", "code"), [([AWAY], 3), ([AT], 4), ([("result += value", "pass")], 5)])
def test_accept_refuses_what_does_not_hold(rebase: Rebase, changes: list[tuple[str, str]], code: int) -> None:
    before = rebase.pins
    for more in ((), ("--as", "next")):
        found, out, text = rebase.run("rebase", f"toy@{rebase.revision(*changes)}", "--accept", *more)
        assert (found, rebase.pins) == (code, before)
        assert "the series does not hold on this release" in out["error"]["found"]
        assert sum(line.startswith("error:") for line in text.splitlines()) == 1


@pytest.mark.parametrize("kind", ["revision", "release"])
@pytest.mark.parametrize("name", [None, "next"])
def test_accept_writes_pin_and_lock_that_apply_frozen(rebase: Rebase, kind: str, name: str | None) -> None:
    before, old = rebase.pins, load_pin(rebase.toy.root, "current")
    changes = [AROUND, AT]
    head = rebase.revision(*changes)
    asked = f"toy@{head}" if kind == "revision" else rebase.release("1.3.0", *changes)
    pin = name or "current"
    given = ("--accept", "--accept-drift", "min", *(("--as", name) if name else ()))
    code, out, text = rebase.run("rebase", asked, *given)
    assert code == 0, text
    assert out["pin"] == {"files": [f"{pin}.toml", f"{pin}.lock"], "name": pin}
    assert {n: d for n, d in rebase.pins.items() if name is None or n.startswith("current")} != before or name
    assert name is None or {n: d for n, d in rebase.pins.items() if n.startswith("current")} == before
    new = load_pin(rebase.toy.root, pin)
    artefact = new.targets["toy"]
    assert (new.description, artefact.package, artefact.prefix) == (old.description, "toy", "TOY")
    assert new.date > old.date
    found = (artefact.version, artefact.commit, artefact.sdist)
    assert found == (("1.2.0", head, None) if kind == "revision" else ("1.3.0", None, "toy-1.3.0.tar.gz"))
    checkout = ("--checkout", f"toy={rebase.checkout}") if kind == "revision" else ()
    root = ("--root", str(rebase.toy.root))
    assert main(["apply", *root, *checkout, "--pin", pin, "--frozen"]) == 0
    assert main(["pins", *root, *checkout, "--lock", pin, "--dry-run"]) in (0, 2)
    tree = rebase.checkout if kind == "revision" else rebase.toy.build / pin / "toy"
    assert "value = min(value, LIMIT)" in (tree / "toy/core.py").read_text()


def test_a_pin_that_was_rebased_is_clean_on_its_own_release(rebase: Rebase) -> None:
    asked = rebase.release("1.3.0", AROUND, AT)
    assert rebase.statuses(asked) == (4, ["drift", "clean"])
    assert rebase.statuses(asked, "--accept-drift", "min", "--accept") == (0, ["drift", "clean"])
    assert rebase.statuses(asked) == (0, ["clean", "clean"])


def test_a_new_pin_keeps_the_locks_of_other_targets(rebase: Rebase) -> None:
    digest = make_sdist(cache_folder() / "twin-2.0.tar.gz", {"twin/__init__.py": ""}, "twin-2.0")
    write_files(rebase.toy.root, {"patches/twin/series": ""})
    with (rebase.toy.root / "patches/pins/current.toml").open("a") as pin:
        pin.write(f'[targets.twin]\npackage = "twin"\nprefix = "TWIN"\nversion = "2.0"\nsdist = "twin-2.0.tar.gz"\n'
                  f'sha256 = "{digest}"\n')  # fmt: skip
    assert main(["pins", "--root", str(rebase.toy.root), "--lock", "current"]) == 0
    old = load_lock(rebase.toy.root, "current")
    for asked in (f"toy@{rebase.revision(AROUND)}", rebase.release("1.3.0", AROUND)):
        name = f"next{len(rebase.pins)}"
        assert rebase.run("rebase", asked, "--accept", "--as", name)[0] == 0
        new = load_lock(rebase.toy.root, name)
        assert set(new) == {"toy", "twin"}
        assert new["twin"] == old["twin"]
        assert new["toy"] != old["toy"]
        assert set(load_pin(rebase.toy.root, name).targets) == {"toy", "twin"}


def elsewhere(rebase: Rebase, monkeypatch: pytest.MonkeyPatch) -> str:
    """The checkout is not at the commit that is to be pinned."""
    wanted = rebase.revision(AROUND)
    rebase.revision()
    return f"toy@{wanted}"


def unverified(rebase: Rebase, monkeypatch: pytest.MonkeyPatch) -> str:
    """The whole tree does not pass, which touched files alone do not show."""
    (rebase.toy.root / "overlay" / "toy" / "other.py").write_text("X = 1\n")
    replaced = [{"src": "other.py", "dest": "other.py", "mode": "replace"}]
    rebase.toy.add_patch("replaces", overlay=replaced)
    user = {**PACKAGE, "toy/user.py": "from toy.other import RESULT\n"}
    make_sdist(cache_folder() / "toy-1.3.0.tar.gz", user, "toy-1.3.0")
    return "toy==1.3.0"


def stopped(rebase: Rebase, monkeypatch: pytest.MonkeyPatch) -> str:
    """Ctrl-C while the lock is made."""

    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(verify, "check_plan", stop)
    return rebase.release("1.3.0")


def found_late(rebase: Rebase, monkeypatch: pytest.MonkeyPatch) -> str:
    """Locking ends with a finding, not with an error."""
    monkeypatch.setattr(pinning, "lock_pin", lambda session: (3, {}))
    return rebase.release("1.3.0")


@pytest.mark.parametrize("fails", [elsewhere, unverified, stopped, found_late])
@pytest.mark.parametrize("name", [None, "next"])
def test_both_files_go_back_when_locking_fails(
    rebase: Rebase, monkeypatch: pytest.MonkeyPatch, name: str | None,
    fails: Callable[[Rebase, pytest.MonkeyPatch], str],
) -> None:  # fmt: skip
    before = rebase.pins
    asked = fails(rebase, monkeypatch)
    given = ("rebase", asked, "--accept", "--accept-drift", "min", *(("--as", name) if name else ()))
    if fails is unverified:
        given = (*given, "--accept-drift", "replaces")
    if fails is stopped:
        with pytest.raises(KeyboardInterrupt):
            rebase.run(*given)
    else:
        code, _, _ = rebase.run(*given)
        assert code not in (0, 1)
    assert rebase.pins == before


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
    errors = [line for line in text.splitlines() if line.startswith("error:")]
    assert (code, len(errors)) == (2, 1), text
    assert says in errors[0]
    assert "; wanted" in errors[0]
    assert out["exit_code"] == 2
    assert rebase.everything() == before


def test_a_commit_needs_its_checkout(rebase: Rebase, capsys: Shown) -> None:
    for command in (("rebase",), ("check", "--against")):
        assert main([command[0], "--root", str(rebase.toy.root), *command[1:], "toy@main"]) == 2
        assert "wanted --checkout toy=DIR" in capsys.readouterr().err


def test_check_of_several_gives_the_worst_of_their_codes(rebase: Rebase, tmp_path: Path) -> None:
    drift, conflict = rebase.revision(AT), rebase.revision(AWAY)
    asked = [rebase.release("1.2.0"), rebase.release("1.3.0", AROUND), f"toy@{drift}", f"toy@{conflict}"]
    for number, wanted in enumerate((0, 0, 4, 3), 1):
        before = rebase.everything()
        code, out, text = rebase.run("check", "--against", *asked[:number], "--report", str(tmp_path / "report.md"))
        assert code == wanted
        assert [r["asked"] for r in out["releases"]] == asked[:number]
        assert rebase.everything() == before
    assert [r["exit_code"] for r in out["releases"]] == [0, 0, 4, 3]
    assert [r["edits"]["moved"] for r in out["releases"]] == [0, 1, 0, 0]
    assert f"toy=={'1.3.0'}\tcurrent\t1\t1\t0\t0\t0\t0, 0\t" in text
    report = (tmp_path / "report.md").read_text()
    assert [line for line in report.splitlines() if line.startswith("# ")] == [
        "# toy: the series on toy 1.2.0", "# toy: the series on toy 1.3.0",
        f"# toy: the series on toy 1.2.0 at {drift[:12]}", f"# toy: the series on toy 1.2.0 at {conflict[:12]}",
    ]  # fmt: skip
    assert "look at core.py Pool.sum (the rule has one match there)" in report


def test_a_pin_is_read_back_as_it_was_written() -> None:
    artefact = TargetPin(version="1", package="toy", prefix="TOY", sdist="a.tar.gz", sha256="0" * 64, note='a "b" \\ c')
    pin = Pin(name="x", description='tab\t"quoted" \\ and\nnext ümlaut', date="2026-01-02T03:04:05Z",
              targets={"toy": artefact})  # fmt: skip
    data = tomllib.loads(encode_pin(pin).decode())
    assert (data["description"], data["targets"]["toy"]["note"]) == (pin.description, artefact.note)
