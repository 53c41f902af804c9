"""Targets that somebody else changed: each command names the files, and leaves everything as it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from neaptide.cli import main
from toy import SCALE_EDIT, TOTAL_EDIT, ToyRepository

Shown = pytest.CaptureFixture[str]


@pytest.fixture
def applied(toy: ToyRepository, capsys: Shown) -> ToyRepository:
    toy.add_patch("list", SCALE_EDIT)
    toy.add_patch("later", TOTAL_EDIT, applies=">=99")
    toy.lock()
    assert toy.run("apply") == 0
    capsys.readouterr()
    return toy


def everything(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file() and ".git" not in p.parts}


def alter(toy: ToyRepository) -> None:
    core = toy.tree / "toy/core.py"
    core.write_text(core.read_text() + "# altered\n")


@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        ("status", 1, "modified (toy/core.py)"),
        ("verify", 5, "the target is modified (toy/core.py), wanted applied"),
        ("apply", 2, "uncommitted changes in toy/core.py; wanted a clean checkout. Put them back there"),
        ("revert", 2, "uncommitted changes in toy/core.py"),
        ("export", 2, "the tree is modified (toy/core.py); wanted an applied series, as it was applied"),
        ("doctor", 5, "altered since it was applied: core.py; put the files back"),
    ],
)
def test_an_altered_file_is_named(
    applied: ToyRepository, capsys: Shown, tmp_path: Path, command: str, code: int, says: str
) -> None:
    alter(applied)
    before = everything(applied.root)
    options = {"export": ("--output", str(tmp_path / "out")), "doctor": ("--trees",)}.get(command, ())
    if command == "doctor":
        # It takes no sdist.
        assert main(["doctor", "--root", str(applied.root), *options]) == code
    else:
        assert applied.run(command, *options) == code
    assert says in capsys.readouterr().err
    assert everything(applied.root) == before
    assert not (tmp_path / "out").exists()


def test_a_file_that_was_put_into_a_tree_is_no_part_of_it(applied: ToyRepository, capsys: Shown) -> None:
    assert applied.run("verify") == 0
    (applied.tree / "toy/extra.py").write_text("X = 1\n")
    (applied.tree / "toy/__pycache__").mkdir(exist_ok=True)
    (applied.tree / "toy/__pycache__/core.cpython-1.pyc").write_text("x")
    assert applied.run("verify") == 5
    said = capsys.readouterr().err
    assert "toy/extra.py is not in the tree" in said
    assert "pyc" not in said


def test_status_names_the_patches_that_are_in_force(applied: ToyRepository, capsys: Shown) -> None:
    assert applied.run("status") == 0
    said = capsys.readouterr().err
    assert "toy/list" in said
    assert "toy/later" not in said


def test_a_dry_run_of_revert_says_what_it_would_do(applied: ToyRepository, capsys: Shown) -> None:
    before = everything(applied.root)
    assert applied.run("revert", "--dry-run") == 0
    assert "would be reverted (--dry-run)" in capsys.readouterr().err
    assert everything(applied.root) == before
    assert applied.run("revert") == 0
    assert applied.run("revert", "--dry-run") == 0
    assert "nothing to revert (--dry-run)" in capsys.readouterr().err


def test_a_given_sdist_is_checked_also_where_a_tree_is(applied: ToyRepository, capsys: Shown) -> None:
    applied.sdist.write_bytes(b"another")
    assert applied.run("apply") == 2
    assert "which the pin names for" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_named_as_it_was_given(applied: ToyRepository, capsys: Shown) -> None:
    (applied.root / "taken").write_text("")
    assert applied.run("export", "--output", str(applied.root / "taken" / "out")) == 2
    said = capsys.readouterr().err
    assert said.count("error:") == 1
    assert "neaptide-tmp" not in said
