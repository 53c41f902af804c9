"""``scripts/image/apply-export``: an exported series on a clone of upstream."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from programs import IMAGE, Done, run
from toy import OTHER_EDIT, SCALE_EDIT, ToyRepository, git, make_checkout, write_files


@dataclass(frozen=True)
class Export:
    """An exported series of the toy, and a clone of upstream at its base."""

    folder: Path
    clone: Path
    tree: str

    def apply(self, *options: str) -> Done:
        return run(IMAGE / "apply-export", *options, self.folder, self.clone)

    def state(self) -> tuple[str, str]:
        return git(self.clone, "status", "--porcelain"), git(self.clone, "rev-parse", "HEAD")


@pytest.fixture
def export(toy: ToyRepository, tmp_path: Path) -> Export:
    toy.add_overlay("deep.py", "VALUE = 'ü'\n")
    toy.add_patch("first", SCALE_EDIT)
    toy.add_patch("second", OTHER_EDIT, overlay=[{"src": "deep.py", "dest": "deep.py", "mode": "new"}])
    toy.lock()
    checkout = make_checkout(tmp_path / "checkout")
    git(checkout, "remote", "add", "origin", "https://example.org/toy.git")
    clone = tmp_path / "clone"
    shutil.copytree(checkout, clone)
    given = ("--checkout", f"toy={checkout}")
    assert toy.run("apply", *given) == 0
    assert toy.run("export", *given, "--output", str(tmp_path / "export")) == 0
    return Export(tmp_path / "export/toy", clone, git(checkout, "rev-parse", "HEAD^{tree}"))


def test_an_export_gives_the_tree_that_it_promises(export: Export) -> None:
    lock = json.loads((export.folder / "integration.lock.json").read_text())["result"]
    done = export.apply("--patch-sha256", lock["patch_sha256"], "--tree", lock["tree"])
    assert done.returncode == 0, done.stderr
    assert git(export.clone, "write-tree") == export.tree
    assert (export.clone / "toy/deep.py").read_text() == "VALUE = 'ü'\n"
    again = export.apply()
    assert again.returncode == 2
    assert "wanted a clean checkout" in again.stderr


def reworded(export: Export) -> str:
    path = export.folder / "integration.patch"
    path.write_text(path.read_text().replace("'ü'", "'u'"))
    return "integration.patch has sha256"


def reworded_and_listed(export: Export) -> str:
    """A patch and a manifest that agree with each other, and with no lock: the tree tells."""
    reworded(export)
    (export.folder / "integration.lock.json").unlink()
    manifest = json.loads((export.folder / "manifest.json").read_text())
    data = (export.folder / "integration.patch").read_bytes()
    manifest["files"]["integration.patch"] = hashlib.sha256(data).hexdigest()
    (export.folder / "manifest.json").write_text(json.dumps(manifest))
    return f"wanted {export.tree}. The checkout was put back."


def manifest_altered(export: Export) -> str:
    path = export.folder / "manifest.json"
    path.write_text(path.read_text().replace("current", "other"))
    return "manifest.json has sha256"


def single_patch_altered(export: Export) -> str:
    path = next(export.folder.glob("0001-*.patch"))
    path.write_text(path.read_text() + "\n")
    return f"{path.name} has sha256"


def patch_missing(export: Export) -> str:
    (export.folder / "integration.patch").unlink()
    return "integration.patch is listed and not in"


def not_an_export(export: Export) -> str:
    (export.folder / "manifest.json").write_text('{"files": {"../x": "1"}}')
    return "is not what neaptide export writes"


@pytest.mark.parametrize(
    "alter",
    [reworded, reworded_and_listed, manifest_altered, single_patch_altered, patch_missing, not_an_export],
)
def test_an_altered_export_is_refused_and_the_checkout_left(export: Export, alter: Callable[[Export], str]) -> None:
    before = export.state()
    said = alter(export)
    done = export.apply()
    assert done.returncode == 5
    assert said in done.stderr
    assert export.state() == before == ("", before[1])


@pytest.mark.parametrize("option", ["--patch-sha256", "--tree"])
def test_what_the_build_arguments_say_counts(export: Export, option: str) -> None:
    done = export.apply(option, "0" * 40)
    assert done.returncode == 5
    assert option in done.stderr
    assert export.state()[0] == ""


def test_another_base_is_refused(export: Export) -> None:
    write_files(export.clone, {"toy/new.py": ""})
    git(export.clone, "add", "-A")
    git(export.clone, "commit", "-q", "-m", "upstream moves on")
    done = export.apply()
    assert done.returncode == 2
    assert "which the export was made on" in done.stderr
