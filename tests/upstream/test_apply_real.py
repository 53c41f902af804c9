"""The series on the real upstreams: ids, reversibility, export, and an installed distribution."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from neaptide.cli import main
from neaptide.pins import load_lock, load_pin
from real import PINS, ROOT, Trees
from toy import git


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_file() and ".git" not in p.relative_to(folder).parts
    }


def run(*arguments: str) -> int:
    command, *rest = arguments
    return main([command, "--root", str(ROOT), *rest])


@pytest.mark.parametrize("pin", PINS)
def test_one_commit_a_patch_with_the_ids_of_the_lock(trees: dict[str, Trees], pin: str) -> None:
    for target, lock in load_lock(ROOT, pin).items():
        tree = trees[pin].patched / target
        assert git(tree, "rev-list", "--count", "HEAD") == str(1 + len(lock.patches))
        assert git(tree, "rev-parse", "HEAD^{tree}") == lock.tree_after
        base = git(tree, "rev-list", "--max-parents=0", "HEAD")
        assert git(tree, "rev-parse", f"{base}^{{tree}}") == lock.tree_before


@pytest.mark.parametrize("pin", PINS)
def test_verify_and_frozen_second_apply(trees: dict[str, Trees], pin: str, capsys: pytest.CaptureFixture[str]) -> None:
    build = ("--build", str(trees[pin].patched.parent), "--pin", pin)
    assert run("verify", *build) == 0
    capsys.readouterr()
    assert run("apply", *build, "--frozen", "--json") == 0
    assert json.loads(capsys.readouterr().out)["written"] == []


def test_revert_gives_the_pristine_bytes(trees: dict[str, Trees], tmp_path: Path) -> None:
    build = ("--build", str(tmp_path), "--pin", "r12", "--target", "b12x")
    assert run("apply", *build) == 0
    assert files_of(tmp_path / "r12/b12x") != files_of(trees["r12"].pristine / "b12x")
    assert run("revert", *build) == 0
    assert files_of(tmp_path / "r12/b12x") == files_of(trees["r12"].pristine / "b12x")


@pytest.mark.parametrize("target", ["b12x", "vllm"])
def test_export_is_stable_and_git_am_gives_the_same_tree(trees: dict[str, Trees], tmp_path: Path, target: str) -> None:
    build = ("--build", str(trees["current"].patched.parent), "--target", target)
    assert run("export", *build, "--output", str(tmp_path / "one")) == 0
    assert run("export", *build, "--output", str(tmp_path / "two")) == 0
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")
    source = trees["current"].patched / target
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", str(source), str(clone)], check=True)
    git(clone, "checkout", "-q", git(clone, "rev-list", "--max-parents=0", "HEAD"))
    series = sorted(str(p) for p in (tmp_path / "one" / target).glob("0*.patch"))
    git(clone, "am", "-q", *series)
    assert git(clone, "rev-parse", "HEAD^{tree}") == git(source, "rev-parse", "HEAD^{tree}")


# An installed distribution


def test_installed_b12x(tmp_path: Path) -> None:
    """apply, RECORD, uninstall and revert on b12x as pip installs it."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = str(tmp_path / "venv/bin/python")
    version = load_pin(ROOT, "current").targets["b12x"].version
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", f"b12x=={version}"], check=True)
    site = next((tmp_path / "venv/lib").glob("python*/site-packages"))
    before = files_of(site)
    given = ("--installed", "--python", python)
    assert run("apply", *given) == 0
    check_record(site, f"b12x-{version}.dist-info")
    assert run("apply", *given) == 0
    assert run("verify", *given) == 0
    assert run("revert", *given) == 0
    assert files_of(site) == before
    assert run("apply", *given) == 0
    subprocess.run([python, "-m", "compileall", "-q", site / "b12x/comm/pcie"], check=True)
    subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", "b12x"], check=True)
    assert [p for p in site.iterdir() if "b12x" in p.name] == []


def check_record(site: Path, info: str) -> None:
    """Every row names a file, and its hash and size are true; every file but RECORD has both."""
    rows = list(csv.reader((site / info / "RECORD").read_text().splitlines()))
    assert any(row[0] == "b12x/comm/pcie/rank_data.py" for row in rows)
    for name, digest, size in rows:
        data = (site / name).read_bytes()
        if digest:
            found = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            assert (digest, size) == (f"sha256={found}", str(len(data))), name
        else:
            assert name.endswith((".pyc", "RECORD")), name
    listed = {row[0] for row in rows}
    for file in [*(site / "b12x").rglob("*"), *(site / info).rglob("*")]:
        assert not file.is_file() or str(file.relative_to(site)) in listed, file
