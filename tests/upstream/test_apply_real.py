"""The series on the real upstreams: ids, reversibility, export, and an installed distribution."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from neaptide import verify
from neaptide.cli import main
from neaptide.pins import load_lock, load_pin
from real import PINS, ROOT, Trees
from toy import commit_all, git


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


# Drift on real sources: a checkout made of the sdist's files, with upstream's next change on top

KPOOL = "models/glm5next/nvidia/sparse_indexer.py"
DRIFTS = {
    "anchored statement": ("select_k,\n                dcp_rank,", "select_k,\n                dcp_rank + 0,"),
    "condition around it": ("    if has_prefill:\n", "    if has_prefill and num_tokens:\n"),
}
MOVES = {
    "another statement of the loop": ("num_rows = q_slice.shape[0]", "num_rows = int(q_slice.shape[0])"),
    "another statement of the function": ("fp8_dtype = current", "quantised = fp8_dtype = current"),
}
CLEAN = {
    "a comment": ("    if has_prefill:\n", "    # a new remark\n    if has_prefill:\n"),
    "formatting": ("select_k,\n                dcp_rank,", "select_k, dcp_rank,"),
    "another function": ("def _kpool_compress_insert(", "def added() -> None: ...\n\n\ndef _kpool_compress_insert("),
}


@pytest.fixture
def no_smoke(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout of the touched files alone cannot be imported."""
    monkeypatch.setattr(verify, "import_smoke", lambda *args: verify.Smoke("skipped", "not a whole tree"))


def changed_checkout(trees: dict[str, Trees], folder: Path, old: str, new: str) -> Path:
    """Only the touched files: the checks that need a whole tree run elsewhere."""
    pristine, lock = trees["current"].pristine / "vllm", load_lock(ROOT, "current")["vllm"]
    for path in [p for p, sha in lock.before.items() if sha is not None]:
        (folder / "vllm" / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(pristine / "vllm" / path, folder / "vllm" / path)
    git(folder, "init", "-q", "-b", "main")
    commit_all(folder, "pristine")
    file = folder / "vllm" / KPOOL
    text = file.read_text()
    assert text.count(old) >= 1
    at = text.index(old, text.index("def sparse_attn_indexer_kpool") if "def " not in old else 0)
    file.write_text(text[:at] + new + text[at + len(old) :])
    commit_all(folder, "upstream moves on")
    return folder


@pytest.mark.usefixtures("no_smoke")
@pytest.mark.parametrize("name", DRIFTS)
def test_drift_is_named_shown_and_remembered(
    trees: dict[str, Trees], tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout = changed_checkout(trees, tmp_path, *DRIFTS[name])
    given = ("apply", "--checkout", f"vllm={checkout}")
    head = git(checkout, "rev-parse", "HEAD")
    assert run(*given) == 4
    shown = capsys.readouterr().err
    assert f"drift: vllm/indexer-drop-previous-logits: {KPOOL} sparse_attn_indexer_kpool" in shown
    assert f"+{DRIFTS[name][1].splitlines()[-1]}" in shown
    assert git(checkout, "rev-parse", "HEAD") == head
    assert run(*given, "--accept-drift", "vllm/indexer-drop-previous-logits") == 0
    assert run("revert", "--checkout", f"vllm={checkout}") == 0
    assert run(*given) == 0, "the accepted drift is remembered"


@pytest.mark.usefixtures("no_smoke")
@pytest.mark.parametrize("name", [*MOVES, *CLEAN])
def test_changes_beside_the_anchor_go_on(
    trees: dict[str, Trees], tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout = changed_checkout(trees, tmp_path, *{**MOVES, **CLEAN}[name])
    assert run("apply", "--checkout", f"vllm={checkout}") == 0
    shown = capsys.readouterr().err
    assert ("moved: vllm/indexer-drop-previous-logits" in shown) == (name in MOVES)


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
