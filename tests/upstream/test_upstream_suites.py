"""Upstream's own tests give the same outcomes on the pristine and on the patched tree.

A list of tests that differs, or an outcome that differs, is a failure unless the patch that
causes it declares the test in ``expected_test_changes``; a declared change that does not happen is one too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Collection
from pathlib import Path
from xml.etree import ElementTree

import pytest
from neaptide.cli import main
from real import ROOT, Trees, patches_of, run_python

# Files of tests/, with the tests that pass on the pristine tree on a CPU.
VLLM = {
    "v1/attention/test_indexer_tp_row_shard.py": 12,
    "v1/attention/test_indexer_dcp_localize.py": 88,
    "v1/attention/test_indexer_native_next_n.py": 9,
    "v1/attention/test_glm5next_indexer_block_sizes.py": 3,
    "v1/attention/test_sparse_mla_kv_cache_layout.py": 18,
    "v1/worker/test_workspace.py": 11,
    "v1/worker/test_gpu_worker.py": 17,
    "v1/worker/test_gpu_model_runner_v2.py": 20,
    "v1/worker/test_gpu_model_runner_v2_cudagraph_profiling.py": 15,
    "v1/worker/test_gpu_model_runner_v2_eplb.py": 5,
    "v1/worker/test_gpu_target_dependent_ar_speculator.py": 29,
    "distributed/test_flashinfer_pcie_ipc_all_reduce.py": 8,
    "distributed/test_dcp_a2a.py": 14,
    "distributed/test_dcp_direct_a2a_lse_reduce.py": 18,
    "v1/attention/test_dcp_a2a_pack_mask.py": 1,
    "test_envs.py": 60,
    "config/test_config_utils.py": 28,
}
B12X = {
    "current": {"test_packaging.py": 1, "test_registry.py": 8},
    "r12": {"test_packaging.py": 3, "test_registry.py": 3},
}
SPARKINFER = {"comm/test_pcie.py": 6, "comm/test_pcie_oneshot.py": 32, "comm/test_pcie_dcp_a2a.py": 10}
SPARKINFER_COMMIT = "de04125508c75e748016493f851e6bd4513b515b"
# The commit of b12x 1.1.0.
B12X_GIT_COMMIT = "89f8b9b"
B12X_GIT = {
    "comm/test_pcie_oneshot.py": 64,
    "comm/test_pcie_dcp_a2a.py": 27,
    "comm/test_pcie_ipc_lifecycle.py": 25,
    "comm/test_pcie_preallocation_setup.py": 15,
    "comm/test_pcie_dma_mode.py": 47,
    "attention/test_paged_indexer_integration.py": 16,
    "attention/test_fused_indexer.py": 55,
    "attention/test_indexer_kernel_bindings.py": 7,
    "attention/test_nsa_indexer.py": 5,
    "attention/test_attention_nsa_indexer_reference.py": 5,
    "attention/test_attention_nsa_indexer_api.py": 7,
    "attention/test_attention_msa_indexer_api.py": 1,
    "attention/test_attention_msa_indexer_reference.py": 6,
}
Outcomes = dict[str, str]


def outcomes(tree: Path, files: list[str], report: Path) -> Outcomes:
    """Outcome of every test, by id; the exit code of pytest is left to the comparison."""
    paths = [str(tree / "tests" / f) for f in files]
    options = ["-q", "-p", "upstream_plugin", "-p", "no:cacheprovider", "--noconftest", f"--junitxml={report}"]
    done = run_python(["-m", "pytest", *options, f"--rootdir={tree}", *paths], tree, cwd=tree)
    assert report.is_file(), done.stdout + done.stderr
    found: Outcomes = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        kinds = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        found[f"{case.get('classname')}::{case.get('name')}"] = kinds[0] if kinds else "passed"
    return found


def passed_in(found: Outcomes, file: str) -> int:
    dotted = file.removesuffix(".py").replace("/", ".")
    inside = (f"{dotted}::", f"{dotted}.")
    return sum(outcome == "passed" and any(i in name for i in inside) for name, outcome in found.items())


def compare(pristine: Outcomes, patched: Outcomes, expected: set[str]) -> list[str]:
    """What differs undeclared, and what was declared and does not differ."""
    differing = {n for n in pristine.keys() | patched.keys() if pristine.get(n) != patched.get(n)}
    problems = [f"{n}: {pristine.get(n)} pristine, {patched.get(n)} patched" for n in sorted(differing - expected)]
    return problems + [f"{n}: declared as changed, and is not" for n in sorted(expected - differing)]


def check(pristine: Path, patched: Path, files: dict[str, int], expected: set[str], tmp_path: Path) -> None:
    before = outcomes(pristine, list(files), tmp_path / "pristine.xml")
    after = outcomes(patched, list(files), tmp_path / "patched.xml")
    short = {f: passed_in(before, f) for f, least in files.items() if passed_in(before, f) < least}
    assert not short, f"fewer tests pass on the pristine tree than known: {short}"
    assert compare(before, after, expected) == []


def declared(pin: str, target: str, files: Collection[str]) -> set[str]:
    """Declared changes in these files, of the patches that have something to do at the pin."""
    modules = {f"tests.{file.removesuffix('.py').replace('/', '.')}" for file in files}
    changes = [c.id for p in patches_of(pin) if p.target == target for c in p.header.expected_test_changes]
    return {change for change in changes if change.split("::")[0] in modules}


def test_vllm(trees: dict[str, Trees], tmp_path: Path) -> None:
    pin = trees["current"]
    check(pin.pristine / "vllm", pin.patched / "vllm", VLLM, declared("current", "vllm", VLLM), tmp_path)


@pytest.mark.parametrize("name", sorted(B12X))
def test_b12x(trees: dict[str, Trees], tmp_path: Path, name: str) -> None:
    pin = trees[name]
    check(pin.pristine / "b12x", pin.patched / "b12x", B12X[name], declared(name, "b12x", B12X[name]), tmp_path)


def clone_of_sparkinfer() -> str:
    given = os.environ.get("NEAPTIDE_SPARKINFER_CHECKOUT")
    if not given:
        pytest.skip("NEAPTIDE_SPARKINFER_CHECKOUT names no clone of sparkinfer (not on PyPI)")
    return given


def test_sparkinfer_checkout(tmp_path: Path) -> None:
    """Runs where a clone of sparkinfer is named; its commit is not on PyPI."""
    given = clone_of_sparkinfer()
    for name in ("pristine", "patched"):
        subprocess.run(["git", "clone", "-q", given, tmp_path / name], check=True)
        subprocess.run(["git", "checkout", "-q", SPARKINFER_COMMIT], cwd=tmp_path / name, check=True)
    assert main(["apply", "--root", str(ROOT), "--checkout", f"b12x={tmp_path / 'patched'}"]) == 0
    expected = declared("sparkinfer-de04", "b12x", SPARKINFER)
    check(tmp_path / "pristine", tmp_path / "patched", SPARKINFER, expected, tmp_path)


def test_b12x_by_the_repositorys_own_tests(trees: dict[str, Trees], tmp_path: Path) -> None:
    """The sdists ship no tests of these modules. Runs those of the commit of 1.1.0 where a clone is named."""
    given, pin = clone_of_sparkinfer(), trees["r12"]
    for name, tree in (("pristine", pin.pristine / "b12x"), ("patched", pin.patched / "b12x")):
        shutil.copytree(tree / "b12x", tmp_path / name / "b12x")
        archive = subprocess.run(
            ["git", "archive", B12X_GIT_COMMIT, "tests"], cwd=given, check=True, capture_output=True
        )
        subprocess.run(["tar", "x"], cwd=tmp_path / name, input=archive.stdout, check=True)
    check(tmp_path / "pristine", tmp_path / "patched", B12X_GIT, declared("r12", "b12x", B12X_GIT), tmp_path)


def test_the_comparison_finds_differences() -> None:
    before = {"a::x": "passed", "a::y": "passed", "a::z": "skipped"}
    after = {"a::x": "failure", "a::z": "skipped", "a::new": "passed"}
    assert len(compare(before, after, set())) == 3
    assert compare(before, after, {"a::x", "a::y", "a::new"}) == []
    assert compare(before, before, {"a::x"}) == ["a::x: declared as changed, and is not"]
