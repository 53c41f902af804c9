"""b12x's PCIe collectives through vLLM's own groups and captures, on two GPUs of any kind or four of Blackwell.

The trees come from NEAPTIDE_TEST_VLLM_PATCHED and NEAPTIDE_TEST_B12X_PATCHED, each a folder with the package that
``neaptide apply`` builds; the vLLM needs its compiled extensions. NEAPTIDE_TEST_RESULTS keeps the results. Times are
printed and never asserted; on NVLink they say nothing of PCIe.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

CHILD = Path(__file__).with_name("vllm_pcie_child")
TREES = ("NEAPTIDE_TEST_VLLM_PATCHED", "NEAPTIDE_TEST_B12X_PATCHED")
RUN_SECONDS = 400
# One host without a name server; multicast would need a fabric manager.
ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_NEAPTIDE_PCIE_COLLECTIVES": "1", "VLLM_NEAPTIDE_PCIE_RING_KB": "1024", "VLLM_NEAPTIDE_PCIE_RING_MB": "64",
}  # fmt: skip
Found = list[dict[str, Any]]


def _missing(world: int) -> str:
    """Why this machine cannot run ``world`` ranks; empty if it can."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed beside this Python"
    import torch

    if torch.cuda.device_count() < world:
        return f"{world} CUDA devices are needed, and torch sees {torch.cuda.device_count()}"
    unset = [name for name in TREES if not os.environ.get(name)]
    return f"{' and '.join(unset)} must name trees" if unset else ""


def _run(world: int, folder: Path, **environment: str) -> Found:
    """What each rank found, by rank."""
    path = os.pathsep.join(part for part in (*(os.environ[n] for n in TREES), os.environ.get("PYTHONPATH", "")) if part)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = [folder / f"rank{rank}.json" for rank in range(world)]
    logs = [(folder / f"rank{rank}.log").open("wb") for rank in range(world)]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(CHILD), str(rank), str(world), str(port), str(results[rank])],
            env={**ENVIRONMENT, **os.environ, **environment, "PYTHONPATH": path}, stdout=logs[rank], stderr=logs[rank],
        )
        for rank in range(world)
    ]  # fmt: skip
    end = time.monotonic() + RUN_SECONDS
    try:
        for rank in ranks:
            rank.wait(max(1.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass
    finally:
        for rank in ranks:
            rank.kill()
        for log in logs:
            log.close()
    said = [(folder / f"rank{rank}.log").read_text(errors="replace")[-1500:] for rank in range(world)]
    assert all(result.is_file() for result in results), f"a rank wrote nothing: {said}"
    assert [rank.returncode for rank in ranks] == [0] * world, f"a rank failed, hung or died: {said}"
    found = [json.loads(result.read_text()) for result in results]
    kept = os.environ.get("NEAPTIDE_TEST_RESULTS")
    if kept:
        for rank, result in enumerate(found):
            (Path(kept) / f"vllm-pcie-{world}-rank{rank}.json").write_text(json.dumps(result, indent=1, sort_keys=True))
    return found


def _check(found: Found) -> None:
    assert [rank["error"] for rank in found] == [""] * len(found)
    assert [set(rank["cases"]) - {row["case"] for row in rank["rows"]} for rank in found] == [set()] * len(found)
    assert [row for rank in found for row in rank["rows"] if row.get("failed")] == []
    for row in found[0]["rows"]:
        if row["case"] == "times":
            ratio = row["time_ratio_to_nccl_nvlink_not_pcie"]
            print(f"{row['nbytes']:>10} B {row['route']:<8} {ratio:.2f} of NCCL's time ({found[0]['device']})")
    (made,) = (row for row in found[0]["rows"] if row["case"] == "made")
    print(f"held: {made['held_bytes']:,} B; making all groups took {made['groups_took_bytes']:,} B of the device")


def test_two_ranks(tmp_path: Path) -> None:
    """Sums, exchanges, captures that are rolled back, and graphs in any order."""
    if why := _missing(2):
        pytest.skip(why)
    _check(_run(2, tmp_path, VLLM_NEAPTIDE_PCIE_ARCHITECTURES="any"))


@pytest.mark.sm120
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_over_pcie(tmp_path: Path, world: int) -> None:
    """The same on the architecture that it is made for, its limit not lifted; the times are the crossover sweep."""
    if why := _missing(world):
        pytest.skip(why)
    _check(_run(world, tmp_path))
