"""Wrong calls and wrong targets: the documented exit code, one clear error line, and nothing changed."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from toy import PACKAGE, SCALE_EDIT, TOTAL_EDIT, ToyRepository, commit_all, git, make_checkout, write_files

OVERLAY = [{"src": "extra/deep.py", "dest": "extra/deep.py", "mode": "new"}]
Shown = pytest.CaptureFixture[str]


@pytest.fixture
def repository(toy: ToyRepository) -> ToyRepository:
    toy.add_overlay("extra/deep.py", "VALUE = 1\n")
    toy.add_patch("first", SCALE_EDIT)
    toy.add_patch("second", TOTAL_EDIT, overlay=OVERLAY)
    toy.lock()
    shutil.rmtree(toy.build)
    return toy


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return make_checkout(tmp_path / "checkout")


def contents(folder: Path) -> dict[str, bytes | str | None]:
    """Every file under ``folder``; of git repositories HEAD, its log, neaptide's record, and what git says."""
    out: dict[str, bytes | str | None] = {}
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder).parts
        if ".git" in inside and inside[-1] not in ("HEAD", "neaptide.lock.json", "journal.json"):
            continue
        out["/".join(inside)] = path.read_bytes() if path.is_file() else None
        if inside[-1] == ".git":
            out[f"git of {path.parent}"] = git(path.parent, "status", "--short") + git(path.parent, "ls-files", "-s")
    return out


def refuses(toy: ToyRepository, shown: Shown, *command: str, code: int = 2, says: str = "") -> None:
    """The command ends with ``code`` and one error line that ``says`` something, and changes nothing."""
    before = contents(toy.root.parent)
    shown.readouterr()
    assert toy.run(*command) == code
    lines = shown.readouterr().err.splitlines()
    assert sum(line.startswith("error:") for line in lines) == 1, lines
    assert lines[-1].startswith("error:"), lines
    assert "; wanted" in lines[-1], lines
    assert says in lines[-1], lines
    assert contents(toy.root.parent) == before


CALLS: dict[str, tuple[tuple[str, ...], str]] = {
    "pin": (("apply", "--pin", "nope"), "'nope'"),
    "a pin outside": (("apply", "--pin", "../pins/current"), "'../pins/current'"),
    "pin to lock": (("pins", "--lock", "nope"), "'nope'"),
    "target": (("apply", "--target", "nope"), "'nope'"),
    "target of a checkout": (("apply", "--checkout", "nope=."), "'nope'"),
    "target of an sdist": (("apply", "--sdist", "nope=x"), "'nope'"),
    "sdist": (("apply", "--sdist", "toy=/nowhere/x.tar.gz"), "/nowhere/x.tar.gz"),
    "patch": (("apply", "--patch", "nope"), "'nope'"),
    "patch to leave out": (("apply", "--without", "nope"), "'nope'"),
    "accepted patch": (("apply", "--accept-drift", "nope"), "'nope'"),
    "checkout": (("apply", "--checkout", "toy=/nowhere"), "/nowhere"),
    "interpreter": (("apply", "--installed", "--python", "/nowhere/python"), "/nowhere/python"),
    "both kinds": (("apply", "--installed", "--checkout", "toy=."), "--checkout"),
    "root": (("apply", "--root", "/nowhere"), "/nowhere"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_name_is_refused(repository: ToyRepository, capsys: Shown, name: str) -> None:
    command, says = CALLS[name]
    refuses(repository, capsys, *command, says=says)


def dirty(folder: Path) -> str:
    write_files(folder, {"toy/other.py": "X = 1\n"})
    return "toy/other.py"


def staged(folder: Path) -> str:
    write_files(folder, {"toy/mine.py": "X = 1\n"})
    git(folder, "add", "toy/mine.py")
    return "toy/mine.py"


def deleted(folder: Path) -> str:
    (folder / "pyproject.toml").unlink()
    return "pyproject.toml"


def no_git(folder: Path) -> str:
    shutil.rmtree(folder / ".git")
    return "git"


def no_commit(folder: Path) -> str:
    no_git(folder)
    git(folder, "init", "-q")
    return "no commit"


def no_package(folder: Path) -> str:
    git(folder, "mv", "toy", "tot")
    commit_all(folder, "another package")
    return "toy/"


def in_the_way(folder: Path) -> str:
    write_files(folder, {"toy/extra/deep.py": "MINE = 1\n"})
    return "toy/extra/deep.py"


def ignored_in_the_way(folder: Path) -> str:
    write_files(folder, {".gitignore": "extra/\n"})
    commit_all(folder, "ignore")
    return in_the_way(folder)


def a_file_for_a_folder(folder: Path) -> str:
    write_files(folder, {"toy/extra": "MINE = 1\n"})
    return "toy/extra"


def a_folder_for_a_file(folder: Path) -> str:
    write_files(folder, {"toy/extra/deep.py/mine.py": "MINE = 1\n"})
    return "toy/extra/deep.py"


def a_link_for_a_folder(folder: Path) -> str:
    (folder.parent / "elsewhere").mkdir()
    (folder / "toy/extra").symlink_to(folder.parent / "elsewhere")
    return "toy/extra"


def line_endings(folder: Path) -> str:
    git(folder, "config", "core.autocrlf", "true")
    core = folder / "toy/core.py"
    core.unlink()
    git(folder, "checkout", "-q", "--", "toy/core.py")
    assert b"\r\n" in core.read_bytes()
    return "toy/core.py"


def git_at_work(folder: Path) -> str:
    (folder / ".git/index.lock").touch()
    return "index.lock"


SPOILS = [
    dirty, staged, deleted, no_git, no_commit, no_package, in_the_way, ignored_in_the_way, a_file_for_a_folder,
    a_folder_for_a_file, a_link_for_a_folder, line_endings, git_at_work,
]  # fmt: skip


@pytest.mark.parametrize("spoil", SPOILS)
def test_a_wrong_checkout_is_refused(
    repository: ToyRepository, checkout: Path, capsys: Shown, spoil: Callable[[Path], str]
) -> None:
    says = spoil(checkout)
    refuses(repository, capsys, "apply", "--checkout", f"toy={checkout}", says=says)


def test_a_checkout_inside_another_repository_is_refused(
    repository: ToyRepository, checkout: Path, capsys: Shown
) -> None:
    write_files(checkout / "vendor" / "toy", PACKAGE)
    commit_all(checkout, "vendored")
    refuses(repository, capsys, "apply", "--checkout", f"toy={checkout / 'vendor' / 'toy'}", says="git")


@pytest.mark.parametrize("command", ["apply", "revert"])
@pytest.mark.parametrize("where", ["above", "between"])
def test_other_commits_on_the_series_are_refused(
    repository: ToyRepository, checkout: Path, capsys: Shown, command: str, where: str
) -> None:
    given = ("--checkout", f"toy={checkout}")
    assert repository.run("apply", *given) == 0
    if where == "above":
        write_files(checkout, {"mine.txt": "mine\n"})
        commit_all(checkout, "mine")
    else:
        git(checkout, "reset", "-q", "--hard", "HEAD~1")
    assert repository.run("status", *given) == 1
    refuses(repository, capsys, command, *given, says="HEAD")


@pytest.mark.parametrize("kind", ["branch", "detached", "worktree", "packed refs"])
def test_any_head_works(repository: ToyRepository, checkout: Path, kind: str) -> None:
    folder = checkout
    base = git(checkout, "rev-parse", "HEAD")
    if kind == "detached":
        git(checkout, "checkout", "-q", "--detach")
    elif kind == "worktree":
        folder = checkout.parent / "worktree"
        git(checkout, "worktree", "add", "-q", "-b", "other", str(folder))
    elif kind == "packed refs":
        git(checkout, "pack-refs", "--all")
    given = ("--checkout", f"toy={folder}")
    assert repository.run("apply", *given) == 0
    assert git(folder, "rev-parse", "HEAD~2") == base
    assert git(folder, "status", "--short") == ""
    assert repository.run("verify", *given) == 0
    assert kind != "worktree" or git(checkout, "rev-parse", "HEAD") == base
    assert repository.run("revert", *given) == 0
    assert git(folder, "rev-parse", "HEAD") == base
    assert git(folder, "status", "--short") == ""


def test_a_series_that_changes_nothing_can_be_reverted(repository: ToyRepository, checkout: Path) -> None:
    for name in ("first", "second"):
        file = repository.root / "patches/toy" / name / "patch.yaml"
        file.write_text(file.read_text() + "applies: '>=99'\n")
    given = ("--checkout", f"toy={checkout}")
    assert repository.run("apply", *given) == 0
    assert repository.run("revert", *given) == 0
    assert not json.loads((checkout / ".git/neaptide/neaptide.lock.json").read_text())["patches"]


def test_without_git(repository: ToyRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Shown) -> None:
    site, info = tmp_path / "site", "toy-1.2.0.dist-info"
    write_files(site, {n: c for n, c in PACKAGE.items() if n.startswith("toy/")})
    write_files(site, {f"{info}/METADATA": "Name: toy\nVersion: 1.2.0\n", f"{info}/RECORD": f"{info}/RECORD,,\n"})
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PATH", "")
    capsys.readouterr()
    assert repository.run("apply") == 2
    assert "git is not installed" in capsys.readouterr().err
    assert not repository.build.exists()
    assert repository.run("apply", "--installed") == 0
    assert "list(sorted" in (site / "toy/core.py").read_text()
    assert repository.run("status", "--installed") == 0
    assert repository.run("revert", "--installed") == 0


@pytest.mark.parametrize("command", ["apply", "revert", "status"])
@pytest.mark.parametrize("options", [(), ("--pin", "nope"), ("--checkout", "nonsense"), ("--target",)], ids="/".join)
def test_json_is_one_object(repository: ToyRepository, capsys: Shown, command: str, options: tuple[str, ...]) -> None:
    capsys.readouterr()
    try:
        code = repository.run(command, "--json", *options)
    except SystemExit as end:
        code = int(end.code or 0)
    text = capsys.readouterr().out
    value = json.loads(text)
    assert code == (2 if options else 0) == value["exit_code"]
    assert value["schema_version"] == 1
    assert ("error" in value) == bool(options)
    assert text == json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


@pytest.mark.parametrize("state", ["absent", "pristine", "applied", "interrupted", "another artefact"])
@pytest.mark.parametrize(
    "command", [("apply",), ("apply", "--patch", "first"), ("revert",), ("pins", "--lock", "current")]
)
def test_a_dry_run_writes_nothing(repository: ToyRepository, state: str, command: tuple[str, ...]) -> None:
    if state != "absent":
        assert repository.run("apply") == 0
    if state in ("pristine", "interrupted"):
        assert repository.run("revert") == 0
    if state == "interrupted":
        record = json.loads((repository.tree / ".git/neaptide/neaptide.lock.json").read_text())
        head = git(repository.tree, "rev-parse", "HEAD")
        journal = {"from": head, "paths": ["toy/core.py"], "record_after": record, "record_before": record}
        (repository.tree / ".git/neaptide/journal.json").write_text(json.dumps({**journal, "ref": "HEAD", "to": head}))
    if state == "another artefact":
        file = repository.tree / ".git/neaptide/neaptide.lock.json"
        file.write_text(file.read_text().replace('"sha256": "', '"sha256": "0'))
    before = contents(repository.root)
    repository.run(*command, "--dry-run")
    assert contents(repository.root) == before


def test_frozen(repository: ToyRepository, capsys: Shown) -> None:
    assert repository.run("apply", "--frozen") == 0
    assert repository.run("revert") == 0
    header = repository.root / "patches/toy/second/patch.yaml"
    for change in (("min(value, LIMIT)", "min(value, 2 * LIMIT)"), ("a title", "another title")):
        kept = header.read_text()
        header.write_text(kept.replace(*change))
        refuses(repository, capsys, "apply", "--frozen", code=5, says="second")
        header.write_text(kept)
    refuses(repository, capsys, "apply", "--frozen", "--without", "second", code=5, says="second")
    (repository.root / "patches/pins/current.lock").unlink()
    assert repository.run("apply", "--frozen") in (2, 5)


BROKEN = ["", "{", "{}", "[]", "null", '{"pin": "current"}', "\xff"]


@pytest.mark.parametrize("text", BROKEN)
@pytest.mark.parametrize("file", [".git/neaptide/neaptide.lock.json", ".git/neaptide/journal.json"])
@pytest.mark.parametrize("command", ["apply", "revert"])
def test_a_broken_record_is_refused(
    repository: ToyRepository, checkout: Path, capsys: Shown, text: str, file: str, command: str
) -> None:
    given = ("--checkout", f"toy={checkout}")
    assert repository.run("apply", *given) == 0
    (checkout / file).write_bytes(text.encode("latin-1"))
    refuses(repository, capsys, command, *given, says=str(checkout / file))


@pytest.mark.parametrize("text", BROKEN[1:])
def test_a_broken_lock_is_refused(repository: ToyRepository, capsys: Shown, text: str) -> None:
    (repository.root / "patches/pins/current.lock").write_bytes(text.encode("latin-1"))
    refuses(repository, capsys, "apply", says="current.lock")


PIN_CHANGES = {
    "no TOML": ("[targets", "[[targets"),
    "no date": ("date =", "note ="),
    "an impossible date": ("2026-01-02T03:04:05Z", "yesterday"),
    "a short sha256": ("sha256 = ", 'sha256 = "00"\nold = '),
    "no sdist": ("sdist = ", "note = "),
    "sdist and commit": ("[targets.toy]", f'[targets.toy]\ncommit = "{"0" * 40}"'),
    "an unknown field": ("[targets.toy]", "[targets.toy]\nsurprise = 1"),
    "a number for a name": ('package = "toy"', "package = 1"),
    "no version": ('version = "1.2.0"', 'version = "one"'),
    "not UTF-8": ('"toy"', '"\udcff"'),
}


@pytest.mark.parametrize("name", PIN_CHANGES)
def test_a_malformed_pin_is_refused(repository: ToyRepository, capsys: Shown, name: str) -> None:
    pin = repository.root / "patches/pins/current.toml"
    text = pin.read_text().replace(*PIN_CHANGES[name], 1)
    pin.write_bytes(text.encode(errors="surrogateescape"))
    refuses(repository, capsys, "apply", says="current")


def test_somebody_elses_repository_in_the_build_folder_is_not_removed(repository: ToyRepository, capsys: Shown) -> None:
    make_checkout(repository.tree)
    write_files(repository.tree, {"notes.txt": "mine\n"})
    refuses(repository, capsys, "apply", says=str(repository.tree))


def test_own_commits_in_a_tree_are_not_removed_by_a_new_sdist(repository: ToyRepository) -> None:
    assert repository.run("apply") == 0
    assert repository.run("revert") == 0
    write_files(repository.tree, {"notes.txt": "mine\n"})
    head = commit_all(repository.tree, "mine")
    file = repository.tree / ".git/neaptide/neaptide.lock.json"
    file.write_text(file.read_text().replace('"sha256": "', '"sha256": "0'))
    repository.run("apply")
    assert git(repository.tree, "cat-file", "-t", head) == "commit"


def test_a_failing_import_puts_back_the_series_before(repository: ToyRepository, checkout: Path) -> None:
    given = ("--checkout", f"toy={checkout}")
    assert repository.run("apply", *given, "--patch", "first") == 0
    head = git(checkout, "rev-parse", "HEAD")
    repository.add_overlay("extra/bad.py", "raise RuntimeError('on import')\n")
    repository.add_patch("bad", overlay=[{"src": "extra/bad.py", "dest": "extra/bad.py", "mode": "new"}])
    assert repository.run("apply", *given) == 5
    assert git(checkout, "rev-parse", "HEAD") == head
    assert git(checkout, "status", "--short") == ""


def test_a_failing_import_leaves_a_true_record_of_the_trees(repository: ToyRepository) -> None:
    repository.add_overlay("extra/bad.py", "raise RuntimeError('on import')\n")
    repository.add_patch("bad", overlay=[{"src": "extra/bad.py", "dest": "extra/bad.py", "mode": "new"}])
    assert repository.run("apply") == 5
    own = json.loads((repository.tree / ".git/neaptide/neaptide.lock.json").read_text())
    assert json.loads((repository.tree.parent / "neaptide.lock.json").read_text())["targets"]["toy"] == own


def test_a_second_neaptide_on_the_same_target_is_refused(
    repository: ToyRepository, checkout: Path, capsys: Shown
) -> None:
    given = ("--checkout", f"toy={checkout}")
    assert repository.run("apply", *given) == 0
    handle = os.open(checkout / ".git/neaptide", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        refuses(repository, capsys, "revert", *given, says="another neaptide")
    finally:
        os.close(handle)
