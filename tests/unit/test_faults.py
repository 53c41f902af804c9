"""A command that dies at any of its writes leaves a target that the next command brings to before or after."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import py_compile
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from neaptide import disk
from toy import OTHER_EDIT, PACKAGE, SCALE_EDIT, VERSION, ToyRepository, commit_all, git, make_checkout, write_files

KILLED = 77
OVERLAY = [{"src": "extra/deep.py", "dest": "extra/deep.py", "mode": "new"}]
ONE = ("--patch", "first")
# Options of the apply that the target starts from (None: pristine), and the command that is killed.
SCENARIOS: dict[str, tuple[tuple[str, ...] | None, tuple[str, ...]]] = {
    "apply": (None, ("apply",)),
    "revert": ((), ("revert",)),
    "grow": (ONE, ("apply",)),
    "shrink": ((), ("apply", *ONE)),
}
Snapshot = dict[str, object]


def make_site(site: Path) -> None:
    """An installed distribution with bytecode, as pip leaves it."""
    info = f"toy-{VERSION}.dist-info"
    write_files(site, {n: c for n, c in PACKAGE.items() if n.startswith("toy/")})
    write_files(site, {f"{info}/METADATA": f"Metadata-Version: 2.1\nName: toy\nVersion: {VERSION}\n"})
    for source in sorted(site.glob("toy/*.py")):
        os.utime(source, (1_700_000_000, 1_700_000_000))
        py_compile.compile(str(source), doraise=True)
    rows = []
    for file in sorted(f for f in site.rglob("*") if f.is_file()):
        data = file.read_bytes()
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        name = file.relative_to(site).as_posix()
        rows.append(f"{name},," if name.endswith(".pyc") else f"{name},sha256={digest},{len(data)}")
    (site / info / "RECORD").write_text("\n".join([*rows, f"{info}/RECORD,,"]) + "\n")


@dataclass
class Target:
    """A kind of place: how commands name it, and what it looks like. ``top`` is the folder that is copied."""

    toy: ToyRepository
    kind: str
    top: Path

    @property
    def work_tree(self) -> Path:
        return self.top / "current" / "toy" if self.kind == "tree" else self.top

    def run(self, *command: str) -> int:
        if self.kind == "tree":
            return self.toy.run(*command, "--build", str(self.top))
        if self.kind == "checkout":
            return self.toy.run(*command, "--checkout", f"toy={self.top}")
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(self.top))
            return self.toy.run(*command, "--installed")

    def copied(self, top: Path) -> Target:
        shutil.rmtree(top, ignore_errors=True)
        shutil.copytree(self.top, top, symlinks=True)
        return Target(self.toy, self.kind, top)

    def snapshot(self, *, times: bool = False) -> Snapshot:
        """Every file with its bytes and mode, every folder; for git also HEAD, index and status."""
        out: Snapshot = {}
        for path in sorted(self.work_tree.rglob("*")):
            name = path.relative_to(self.work_tree).as_posix()
            if name.split("/")[0] == ".git":
                continue
            status = path.stat()
            out[name] = (status.st_mode, path.read_bytes() if path.is_file() else None)
            if times and path.suffix in (".py", ".pyc"):
                out[f"time of {name}"] = status.st_mtime_ns
        if self.kind != "installed":
            out["git"] = git(self.work_tree, "status", "--porcelain=v2", "--branch")
        return out

    def leftovers(self) -> list[str]:
        """Files of neaptide's that should not outlive a command."""
        if self.kind == "installed":
            return [str(p) for p in self.top.rglob("*") if "neaptide-tmp" in p.name or p.name == "staged"]
        folder = self.work_tree / ".git"
        out = [str(p) for p in (folder / "neaptide").iterdir() if p.name != "neaptide.lock.json"]
        out += [str(p) for p in folder.rglob("*.lock") if p.name != "neaptide.lock.json"]
        if self.kind == "tree":
            around = self.work_tree.parent
            out += [str(p) for p in around.iterdir() if p.name not in ("toy", "neaptide.lock.json")]
            whole = json.loads((around / "neaptide.lock.json").read_text())["targets"]["toy"]
            if whole != json.loads((folder / "neaptide" / "neaptide.lock.json").read_text()):
                out.append("build's record differs from the tree's")
        return out


def killed_at(
    stop: int | str, run: Callable[[], int], at: Callable[[str], None] = lambda point: None
) -> tuple[int, str]:
    """Exit code of ``run`` in a child that dies at a checkpoint (by number, or the first of a name), and its name."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(1, 2)
            points: list[str] = []

            def checkpoint(point: str) -> None:
                points.append(point)
                if stop in (len(points), point):
                    at(point)
                    os.write(writer, point.encode())
                    os._exit(KILLED)

            disk.checkpoint = checkpoint
            code = run()
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        point = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), point


def kills(start: Target, command: tuple[str, ...], scratch: Path) -> Iterator[tuple[int, str, Target]]:
    """For every checkpoint of the command: its number and name, and the target as the kill left it."""
    for n in range(1, 400):
        target = start.copied(scratch / "killed")
        code, point = killed_at(n, lambda target=target: target.run(*command))  # type: ignore[misc]
        if code != KILLED:
            assert code == 0
            return
        yield n, point, target
    pytest.fail("the command does not end")


def stops(
    start: Target, command: tuple[str, ...], scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[int, str, Target]]:
    """Like ``kills``, from one run that copies the target at every checkpoint."""
    shutil.rmtree(scratch, ignore_errors=True)
    out: list[tuple[int, str, Target]] = []

    def checkpoint(point: str) -> None:
        copy = scratch / str(len(out))
        shutil.copytree(start.top, copy, symlinks=True)
        out.append((len(out), point, Target(start.toy, start.kind, copy)))

    with monkeypatch.context() as patch:
        patch.setattr(disk, "checkpoint", checkpoint)
        assert start.run(*command) == 0
    return out


@pytest.fixture
def repository(toy: ToyRepository) -> ToyRepository:
    toy.add_overlay("extra/deep.py", "VALUE = 1\n")
    toy.add_patch("first", SCALE_EDIT)
    toy.add_patch("second", OTHER_EDIT, overlay=OVERLAY)
    toy.lock()
    return toy


@pytest.fixture(params=["checkout", "installed"])
def target(request: pytest.FixtureRequest, repository: ToyRepository, tmp_path: Path) -> Target:
    return make_target(request.param, repository, tmp_path / "start")


def make_target(kind: str, repository: ToyRepository, top: Path) -> Target:
    if kind == "tree":
        shutil.copytree(repository.build, top)
    elif kind == "checkout":
        make_checkout(top)
        shutil.rmtree(top / ".git" / "hooks")  # samples, which only make copies slower
    else:
        make_site(top)
    return Target(repository, kind, top)


def prepared(target: Target, scenario: str, scratch: Path) -> tuple[Target, tuple[str, ...], tuple[str, ...]]:
    """The start of a scenario, the command to kill, and the apply that may follow."""
    begin, command = SCENARIOS[scenario]
    start = target.copied(scratch / "begin")
    if begin is not None:
        assert start.run("apply", *begin) == 0
    return start, command, command if command[0] == "apply" else ("apply",)


def state_of(target: Target, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    capsys.readouterr()
    code = target.run("status", "--json")
    return code, json.loads(capsys.readouterr().out)["targets"]["toy"]["state"]


def wrong_after(place: Target, command: tuple[str, ...], wanted: Snapshot, *, times: bool = False) -> str:
    """What is wrong once ``command`` has run, or nothing."""
    code = place.run(*command)
    found = place.snapshot(times=times)
    wrong = sorted(k for k in {*found, *wanted} if found.get(k) != wanted.get(k))
    left = place.leftovers()
    return f"then {command[0]}: exit {code}, differs in {wrong}, left {left}" if code or wrong or left else ""


@pytest.mark.parametrize(
    ("kind", "scenario"),
    [("tree", "apply"), ("tree", "revert"), ("checkout", "apply"), ("checkout", "revert"), ("checkout", "shrink")]
    + [("installed", scenario) for scenario in SCENARIOS],
)
def test_every_kill_is_seen_and_recovered(
    repository: ToyRepository,
    kind: str,
    scenario: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = make_target(kind, repository, tmp_path / "start")
    if kind == "tree":
        assert target.run("revert") == 0  # the pin's own record is there from the start
    times = kind == "installed" and scenario in ("apply", "revert")
    pristine = target.snapshot(times=times)
    start, command, again = prepared(target, scenario, tmp_path)
    before = start.snapshot()
    done = start.copied(tmp_path / "done")
    assert done.run(*command) == 0
    after = done.snapshot()
    applied_place = start.copied(tmp_path / "applied")
    assert applied_place.run(*again) == 0
    applied = applied_place.snapshot()
    problems = []
    for n, point, killed in kills(start, command, tmp_path):
        code, state = state_of(killed, capsys)
        if (state == "interrupted") != (code == 5):
            problems.append(f"{n} {point}: status is {state} with exit code {code}")
        if state != "interrupted" and killed.snapshot() not in (before, after):
            problems.append(f"{n} {point}: status says {state} of a target that is neither before nor after")
        if kind == "tree" and state == "interrupted":
            continue  # the same code as a checkout's
        place = killed.copied(tmp_path / "follow")
        found = wrong_after(place, again, applied), wrong_after(killed, ("revert",), pristine, times=times)
        problems += [f"{n} {point}, {what}" for what in found if what]
    assert n > 10
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("scenario", ["apply", "revert"])
def test_an_edit_after_the_kill_is_refused_by_name(
    target: Target,
    scenario: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    start, command, again = prepared(target, scenario, tmp_path)
    problems, seen = [], 0
    for n, point, place in stops(start, command, tmp_path / "stops", monkeypatch)[::2]:
        if state_of(place, capsys)[1] != "interrupted":
            continue
        seen += 1
        name = ("core.py", "other.py", "extra/deep.py")[seen % 3]
        file = place.work_tree / "toy" / name
        write_files(file.parent, {file.name: "MINE = 1\n"})
        code = place.run(*(again if seen % 2 else ("revert",)))
        error = capsys.readouterr().err
        kept = file.is_file() and file.read_text() == "MINE = 1\n"
        if not kept or code != 2 or name not in error:
            problems.append(f"{n} {point}: exit {code}, {name} {'kept' if kept else 'overwritten'}")
    assert seen
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("scenario", ["apply", "shrink", "revert"])
def test_a_kill_of_the_recovery_is_recovered(
    target: Target, scenario: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pristine = target.snapshot()
    start, command, again = prepared(target, scenario, tmp_path)
    problems = []
    step = 7 if target.kind == "checkout" else 9
    for n, point, killed in stops(start, command, tmp_path / "outer", monkeypatch)[1::step]:
        for m, inner, place in stops(killed, again, tmp_path / "inner", monkeypatch)[1::3]:
            what = wrong_after(place, ("revert",), pristine)
            problems += [f"{n} {point}, {m} {inner}, {what}"] if what else []
    assert not problems, "\n".join(problems)


@pytest.fixture
def checkout(repository: ToyRepository, tmp_path: Path) -> Target:
    return Target(repository, "checkout", make_checkout(tmp_path / "checkout"))


@pytest.mark.parametrize("follow", ["apply", "revert"])
@pytest.mark.parametrize(
    ("point", "lock"), [("index", "index.lock"), ("ref", "HEAD.lock"), ("ref", "refs/heads/main.lock")]
)
def test_a_stale_git_lock_is_cleared(checkout: Target, point: str, lock: str, follow: str) -> None:
    file = checkout.top / ".git" / lock
    base = git(checkout.top, "rev-parse", "HEAD")
    assert killed_at(point, lambda: checkout.run("apply"), lambda _: file.touch()) == (KILLED, point)
    assert checkout.run("status") == 5
    assert checkout.run(follow) == 0
    assert not checkout.leftovers()
    assert git(checkout.top, "status", "--short") == ""
    assert (git(checkout.top, "rev-parse", "HEAD") == base) == (follow == "revert")


def test_a_stale_lock_of_the_scratch_index_is_cleared(checkout: Target) -> None:
    write_files(checkout.top / ".git" / "neaptide", {"scratch-index": "", "scratch-index.lock": ""})
    assert checkout.run("apply") == 0
    assert not checkout.leftovers()


def test_a_lock_that_git_holds_is_refused_before_anything_is_written(checkout: Target) -> None:
    before = checkout.snapshot()
    (checkout.top / ".git" / "index.lock").touch()
    assert checkout.run("apply") == 2
    assert checkout.run("status") == 0
    (checkout.top / ".git" / "index.lock").unlink()
    assert checkout.snapshot() == before


@pytest.mark.parametrize("follow", ["apply", "revert"])
def test_a_commit_made_after_the_kill_is_refused(checkout: Target, follow: str) -> None:
    assert killed_at("ref", lambda: checkout.run("apply"))[0] == KILLED
    commit_all(checkout.top, "mine, of a half-written tree")
    before = checkout.snapshot()
    assert checkout.run(follow) == 2
    assert checkout.snapshot() == before
