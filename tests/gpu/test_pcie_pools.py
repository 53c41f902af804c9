"""The PCIe pools and the DMA ring of b12x on two GPUs, pristine and patched; and on a CPU, the program that tries them.

The trees come from two variables, each a folder with the package ``b12x`` (what ``neaptide apply`` builds, and the
same pin unpacked): NEAPTIDE_TEST_B12X_PATCHED and NEAPTIDE_TEST_B12X_UPSTREAM. NEAPTIDE_TEST_RESULTS keeps the results.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CHILD = Path(__file__).with_name("pcie_child")
TREES = {"upstream": "NEAPTIDE_TEST_B12X_UPSTREAM", "patched": "NEAPTIDE_TEST_B12X_PATCHED"}
SLACK_BYTES = 4 << 20  # two granules of the driver
RUN_SECONDS = 400
Rows = list[dict[str, Any]]


def _missing() -> str:
    """Why this machine cannot run these tests; empty if it can."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed beside this Python"
    import torch

    if torch.cuda.device_count() < 2:
        return f"two CUDA devices are needed, and torch sees {torch.cuda.device_count()}"
    unset = [name for name in TREES.values() if not os.environ.get(name)]
    return f"{' and '.join(unset)} must name trees of b12x" if unset else ""


two_gpus = pytest.mark.skipif(bool(_missing()), reason=_missing() or "runs")


def _run(tmp: Path, spec: dict[str, Any], *options: str, tree: str = "") -> Rows:
    (tmp / "spec.json").write_text(json.dumps(spec))
    result = tmp / "result.json"
    path = os.pathsep.join(part for part in (tree, os.environ.get("PYTHONPATH", "")) if part)
    command = [sys.executable, str(CHILD), str(tmp / "spec.json"), str(result), *options]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=RUN_SECONDS + 60
    )
    assert result.exists(), done.stderr[-3000:]
    keep = os.environ.get("NEAPTIDE_TEST_RESULTS")
    if keep and tree:
        (Path(keep) / f"pcie-{spec['variant']}.json").write_bytes(result.read_bytes())
    found: Rows = json.loads(result.read_text())["rows"]
    return found


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Rows]:
    """Rows of all cases by variant, from one run each."""
    found = {}
    for variant, name in TREES.items():
        spec = {"variant": variant, "timeout_s": RUN_SECONDS}
        found[variant] = _run(tmp_path_factory.mktemp(variant), spec, tree=os.environ[name])
    return found


def _only(rows: Rows, case: str, name: str, **more: object) -> list[dict[str, Any]]:
    """The rows of this name, one a rank."""
    wanted = {"case": case, "name": name, **more}
    found = [row for row in rows if wanted.items() <= row.items()]
    assert len(found) == 2, (wanted, found)
    return sorted(found, key=lambda row: int(row["rank"]))


@pytest.mark.gpu
@two_gpus
@pytest.mark.parametrize("variant", TREES)
def test_every_result_is_within_its_bound(variant: str, rows: dict[str, Rows]) -> None:
    assert [row for row in rows[variant] if row["outcome"] == "failed"] == []


@pytest.mark.gpu
@two_gpus
@pytest.mark.parametrize("case", ["exchange-bytes", "oneshot-bytes"])
def test_a_replay_group_takes_one_channel(case: str, rows: dict[str, Rows]) -> None:
    upstream, grouped = _only(rows["upstream"], case, "isolated"), _only(rows["patched"], case, "grouped")
    for before, after in zip(upstream, grouped, strict=True):
        assert after["slab_bytes"] <= before["slab_bytes"]
        assert after["free_drop_bytes"] <= before["free_drop_bytes"] / before["ids"] + SLACK_BYTES
        assert after["free_drop_bytes"] < before["free_drop_bytes"]


@pytest.mark.gpu
@two_gpus
@pytest.mark.parametrize("case", ["exchange-groups", "oneshot-groups"])
def test_sharing_a_channel_costs_no_time_and_every_replay_was_made(case: str, rows: dict[str, Rows]) -> None:
    for row in _only(rows["patched"], case, "replay-time"):
        assert row["replay_time_ratio"] <= 1.03
    for row in _only(rows["patched"], case, "interleaved", policy="grouped"):
        assert row["replays"] >= 100_000
        assert row["checked_replays"] > row["replays"] / 3


@pytest.mark.gpu
@two_gpus
@pytest.mark.parametrize("mode", ["bf16", "ag", "i8", "mx", "ring", "i8_ring", "mx_ring", "a2a", "i8_a2a", "mx_a2a"])
def test_a_ring_takes_what_its_wire_mode_needs(mode: str, rows: dict[str, Rows]) -> None:
    upstream, patched = (_only(rows[variant], "ring-numerics", "bytes", mode=mode) for variant in TREES)
    for before, after in zip(upstream, patched, strict=True):
        saved = before["slab_bytes"] - after["slab_bytes"] + before["stage_bytes"] - after["stage_bytes"]
        assert (saved > 0) == (mode != "bf16")
        assert after["free_drop_bytes"] <= before["free_drop_bytes"] - saved + SLACK_BYTES


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed beside this Python")
def test_a_rank_that_fails_dies_or_hangs_costs_its_case_only(tmp_path: Path) -> None:
    cases = ["self-raises", "self-dies", "self-hangs", "self-well"]
    rows = _run(tmp_path, {"cases": cases, "timeout_s": 200, "case_timeout_s": 20}, "--dry")
    failed = {
        case: {row["rank"] for row in rows if row["case"] == case and row["outcome"] == "failed"} for case in cases
    }
    assert failed == {"self-raises": {0, 1}, "self-dies": {0, 1}, "self-hangs": {0, 1}, "self-well": set()}
    assert [row["ranks"] for row in rows if row["name"] == "well"] == [[0, 1], [0, 1]]
    assert [row["case"] for row in rows if row["name"] == "before"] == ["self-hangs"] * 2
    assert any("as asked" in row.get("message", "") for row in rows)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed beside this Python")
def test_the_cases_run_on_standins(tmp_path: Path) -> None:
    cases = ["exchange-bytes", "exchange-numerics", "oneshot-bytes", "oneshot-numerics", "disagree"]
    rows = _run(tmp_path, {"cases": cases, "sizes": "reduced", "timeout_s": 200}, "--dry")
    assert [row for row in rows if row["outcome"] == "failed"] == []
    assert {row["case"] for row in rows} == set(cases)
