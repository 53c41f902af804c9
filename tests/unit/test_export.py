"""What is exported is the applied series, byte for byte, whatever the user's git is set to."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from toy import PACKAGE, SCALE_EDIT, TOTAL_EDIT, ToyRepository, commit_all, git, make_checkout, write_files

URL = "https://example.org/toy.git"
OVERLAY = [{"src": "extra/deep.py", "dest": "extra/deep.py", "mode": "new"}]


@pytest.fixture
def repository(toy: ToyRepository) -> ToyRepository:
    toy.add_overlay("extra/deep.py", "VALUE = 'ü'\n")
    toy.add_patch("first", SCALE_EDIT, title="a title with ümlauts", description="Of each „item“.\n\nAnd more.\n")
    toy.add_patch(
        "second", TOTAL_EDIT, overlay=OVERLAY, title=" ".join(["a title that is longer than most file names"] * 2)
    )
    toy.lock()
    return toy


@pytest.fixture
def checkout(repository: ToyRepository, tmp_path: Path) -> Path:
    folder = make_checkout(tmp_path / "checkout")
    git(folder, "remote", "add", "origin", URL)
    assert repository.run("apply", "--checkout", f"toy={folder}") == 0
    return folder


@pytest.fixture
def export(repository: ToyRepository, checkout: Path, tmp_path: Path) -> Callable[[str], dict[str, bytes]]:
    def run(name: str) -> dict[str, bytes]:
        out = tmp_path / name
        assert repository.run("export", "--checkout", f"toy={checkout}", "--output", str(out)) == 0
        return read_folder(out / "toy")

    return run


def read_folder(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def base_clone(checkout: Path, folder: Path) -> Path:
    """A clone at the base of the series."""
    subprocess.run(["git", "clone", "-q", str(checkout), str(folder)], check=True, capture_output=True)
    git(folder, "reset", "-q", "--hard", "HEAD~2")
    return folder


def test_exporting_again_gives_the_same_bytes(export: Callable[[str], dict[str, bytes]], tmp_path: Path) -> None:
    first = export("one")
    assert [n.split("-")[0] for n in first if n.endswith(".patch") and n != "integration.patch"] == ["0001", "0002"]
    times = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "one" / "toy").iterdir()}
    assert export("one") == first
    assert {p.name: p.stat().st_mtime_ns for p in (tmp_path / "one" / "toy").iterdir()} == times
    assert export("two") == first


HOSTILE = """
diff.noprefix=true diff.mnemonicPrefix=true diff.srcPrefix=x/ diff.dstPrefix=y/ diff.context=9 diff.interHunkContext=9
diff.algorithm=patience diff.renames=copies diff.external=/bin/false diff.orderFile=ORDER diff.indentHeuristic=false
diff.suppressBlankEmpty=true diff.colorMoved=zebra diff.wsErrorHighlight=all diff.relative=true diff.submodule=log
diff.ignoreSubmodules=all diff.wordRegex=. diff.statGraphWidth=3
color.ui=always color.diff=always core.autocrlf=true core.abbrev=4 core.quotePath=false core.pager=false
core.attributesFile=ATTRIBUTES core.bigFileThreshold=1 core.hooksPath=HOOKS core.whitespace=cr-at-eol
format.signOff=true format.attach=true format.thread=deep format.coverLetter=true format.numbered=true
format.signature=evil format.headers=X-Evil:1 format.to=evil@example.org format.cc=evil@example.org format.suffix=.txt
format.from=Evil<evil@example.org> format.outputDirectory=evil format.pretty=oneline format.notes=true
format.useAutoBase=true format.noprefix=true format.subjectPrefix=EVIL format.filenameMaxLength=20
format.encodeEmailHeaders=false format.forceInBodyFrom=true format.mboxrd=true
i18n.commitEncoding=ISO-8859-1 i18n.logOutputEncoding=ISO-8859-1 log.showSignature=true log.date=unix
user.name=evil user.email=evil@example.org commit.gpgSign=true gpg.program=/bin/false status.short=true
"""


@pytest.mark.parametrize("setting", HOSTILE.split())
def test_hostile_settings_change_nothing(
    repository: ToyRepository, export: Callable[[str], dict[str, bytes]], checkout: Path, tmp_path: Path, setting: str
) -> None:
    first = export("one")
    write_files(tmp_path, {"ORDER": "*deep*\n*core*\n", "ATTRIBUTES": "*.py diff=python -text\n"})
    write_files(tmp_path / "HOOKS", {"pre-commit": "#!/bin/sh\nexit 1\n", "post-index-change": "#!/bin/sh\nexit 1\n"})
    name, _, value = setting.partition("=")
    git(checkout, "notes", "add", "-m", "a note")
    place = str(tmp_path / value) if (tmp_path / value).exists() else value
    git(checkout, "config", name, place)
    assert export("two") == first
    head = git(checkout, "rev-parse", "HEAD")
    assert repository.run("revert", "--checkout", f"toy={checkout}") == 0
    assert repository.run("apply", "--checkout", f"toy={checkout}") == 0
    assert git(checkout, "rev-parse", "HEAD") == head
    assert export("three") == first


@pytest.mark.parametrize("where", ["home", "xdg", "checkout"])
@pytest.mark.parametrize("attributes", ["*.py diff=python\n", "*.py -diff\n", "*.py binary\n"])
def test_attributes_of_the_user_change_nothing(
    export: Callable[[str], dict[str, bytes]], checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    where: str, attributes: str,
) -> None:  # fmt: skip
    first = export("one")
    home = tmp_path / "home"
    if where == "checkout":
        write_files(checkout / ".git" / "info", {"attributes": attributes})
    else:
        write_files(home / (".config" if where == "home" else "xdg") / "git", {"attributes": attributes})
        monkeypatch.setenv("HOME", str(home))
        monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
        if where == "xdg":
            monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "xdg"))
    assert export("two") == first


@pytest.mark.parametrize(
    "name", ["GIT_DIFF_OPTS=-u9", "GIT_EXTERNAL_DIFF=/bin/false", "GIT_DIR=/nowhere", "TZ=Asia/Tokyo"]
)
def test_the_environment_changes_nothing(
    export: Callable[[str], dict[str, bytes]], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    first = export("one")
    monkeypatch.setenv(*name.split("="))  # type: ignore[arg-type]
    assert export("two") == first


def test_git_am_gives_the_same_tree(export: Callable[[str], dict[str, bytes]], checkout: Path, tmp_path: Path) -> None:
    files = export("out")
    clone = base_clone(checkout, tmp_path / "clone")
    patches = sorted(str(tmp_path / "out/toy" / n) for n in files if n.startswith("00"))
    git(clone, "am", *patches)
    assert git(clone, "rev-parse", "HEAD^{tree}") == git(checkout, "rev-parse", "HEAD^{tree}")
    subjects = ["log", "-2", "--format=%an %ae %ad%n%B"]
    assert git(clone, *subjects) == git(checkout, *subjects)


def test_the_integration_patch_gives_the_recorded_tree(
    export: Callable[[str], dict[str, bytes]], checkout: Path, tmp_path: Path
) -> None:
    lock = json.loads(export("out")["integration.lock.json"])
    clone = base_clone(checkout, tmp_path / "clone")
    git(clone, "apply", "--index", str(tmp_path / "out/toy/integration.patch"))
    assert git(clone, "write-tree") == lock["result"]["tree"] == git(checkout, "rev-parse", "HEAD^{tree}")


def test_the_lab_lock_is_what_the_lab_reads(export: Callable[[str], dict[str, bytes]], checkout: Path) -> None:
    files = export("out")
    lock = json.loads(files["integration.lock.json"])
    assert set(lock) == {"base", "manifest", "name", "pull_requests", "result", "schema_version"}
    assert lock["base"] == {"commit": git(checkout, "rev-parse", "HEAD~2"), "ref": "refs/heads/main", "repository": URL}
    assert lock["manifest"] == {"sha256": hashlib.sha256(files["manifest.json"]).hexdigest()}
    assert lock["pull_requests"] == []
    assert lock["schema_version"] == 1
    patch = files["integration.patch"]
    assert lock["result"] == {
        "patch": "integration.patch",
        "patch_sha256": hashlib.sha256(patch).hexdigest(),
        "tree": git(checkout, "rev-parse", "HEAD^{tree}"),
    }
    manifest = json.loads(files["manifest.json"])
    listed = {n for n in files if n.endswith(".patch")}
    assert {n: hashlib.sha256(files[n]).hexdigest() for n in listed} == manifest["files"]


def test_credentials_are_not_exported(export: Callable[[str], dict[str, bytes]], checkout: Path) -> None:
    git(checkout, "remote", "set-url", "origin", "https://user:secret@example.org/toy.git")
    files = export("out")
    assert json.loads(files["integration.lock.json"])["base"]["repository"] == URL
    assert not any(b"secret" in data for data in files.values())


def test_an_sdist_has_no_lab_lock_and_says_so(
    repository: ToyRepository, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert repository.run("apply") == 0
    capsys.readouterr()
    assert repository.run("export", "--json", "--output", str(tmp_path / "out")) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["targets"]["toy"]["lab_lock"].startswith("not written: an sdist")
    assert "not written: an sdist" in shown.err
    assert "integration.lock.json" not in read_folder(tmp_path / "out/toy")
    clone = make_checkout(tmp_path / "base")
    git(clone, "apply", "--index", str(tmp_path / "out/toy/integration.patch"))
    assert git(clone, "write-tree") == git(repository.tree, "rev-parse", "HEAD^{tree}")


@pytest.mark.parametrize("state", ["pristine", "dirty", "interrupted", "absent"])
def test_what_is_not_applied_is_a_clear_error(
    repository: ToyRepository, checkout: Path, tmp_path: Path, state: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--checkout", f"toy={checkout}")
    if state == "pristine":
        assert repository.run("revert", *given) == 0
    elif state == "dirty":
        write_files(checkout, {"toy/core.py": "X = 1\n"})
    elif state == "interrupted":
        write_files(checkout / ".git/neaptide", {"journal.json": "{}"})
    else:
        given = ()
        shutil.rmtree(repository.build)
    capsys.readouterr()
    assert repository.run("export", *given, "--output", str(tmp_path / "out")) in (2, 5)
    assert capsys.readouterr().err.count("error:") == 1
    assert not (tmp_path / "out").exists()


FOREIGN = {
    "a file": {"notes.txt": "mine\n"},
    "another manifest": {"manifest.json": '{"name": "my web app"}\n', "index.html": "mine\n"},
    "another manifest, not JSON": {"manifest.json": "mine\n", "src/main.js": "mine\n"},
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_folder_is_refused(repository: ToyRepository, checkout: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "out" / "toy"
    write_files(folder, FOREIGN[name])
    before = read_folder(folder)
    assert repository.run("export", "--checkout", f"toy={checkout}", "--output", str(tmp_path / "out")) == 2
    assert read_folder(folder) == before


def test_a_folder_inside_an_earlier_export_is_kept_or_refused_whole(
    export: Callable[[str], dict[str, bytes]], repository: ToyRepository, checkout: Path, tmp_path: Path
) -> None:
    first = export("out")
    write_files(tmp_path / "out/toy/mine", {"notes.txt": "mine\n"})
    (tmp_path / "out/toy/manifest.json").write_bytes(first["manifest.json"])
    repository.run("export", "--checkout", f"toy={checkout}", "--output", str(tmp_path / "out"))
    assert read_folder(tmp_path / "out/toy") == {**first, "mine/notes.txt": b"mine\n"}


def test_a_smaller_series_takes_the_old_files_away(
    export: Callable[[str], dict[str, bytes]], repository: ToyRepository, checkout: Path
) -> None:
    assert any(n.startswith("0002") for n in export("out"))
    assert repository.run("apply", "--checkout", f"toy={checkout}", "--patch", "first") == 0
    assert not any(n.startswith("0002") for n in export("out"))


def test_modes_and_crlf_survive(repository: ToyRepository, tmp_path: Path) -> None:
    files = {**PACKAGE, "toy/core.py": PACKAGE["toy/core.py"].replace("\n", "\r\n")}
    folder = make_checkout(tmp_path / "crlf", files)
    os.chmod(folder / "toy/core.py", 0o755)
    commit_all(folder, "executable")
    given = ("--checkout", f"toy={folder}")
    assert repository.run("apply", *given) == 0
    assert repository.run("export", *given, "--output", str(tmp_path / "out")) == 0
    clone = base_clone(folder, tmp_path / "clone")
    git(clone, "-c", "core.autocrlf=false", "apply", "--index", str(tmp_path / "out/toy/integration.patch"))
    assert git(clone, "write-tree") == git(folder, "rev-parse", "HEAD^{tree}")
    assert b"\r\n" in (folder / "toy/core.py").read_bytes()
