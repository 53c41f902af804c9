"""Profiling captures on two GPUs: with vLLM's CustomAllreduce and a b12x pool, 50 of them leave nothing behind.

The trees come from three variables, each a folder with the package: NEAPTIDE_TEST_VLLM_PATCHED and
NEAPTIDE_TEST_B12X_PATCHED (what ``neaptide apply`` builds), and, to have upstream's growth beside it,
NEAPTIDE_TEST_VLLM_UPSTREAM. Each vLLM needs its compiled extensions. NEAPTIDE_TEST_RESULTS keeps the results.
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

CHILD = Path(__file__).with_name("capture_child")
VLLM = {"patched": "NEAPTIDE_TEST_VLLM_PATCHED", "upstream": "NEAPTIDE_TEST_VLLM_UPSTREAM"}
B12X = "NEAPTIDE_TEST_B12X_PATCHED"
RUN_SECONDS = 300
GRANULE_BYTES = 2 << 20
# One host without a name server; multicast would need a fabric manager.
ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
Found = list[dict[str, Any]]


def _missing(*variables: str) -> str:
    """Why this machine cannot run a variant; empty if it can."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed beside this Python"
    import torch

    if torch.cuda.device_count() < 2:
        return f"two CUDA devices are needed, and torch sees {torch.cuda.device_count()}"
    unset = [name for name in variables if not os.environ.get(name)]
    return f"{' and '.join(unset)} must name trees" if unset else ""


def _run(variant: str, folder: Path) -> Found:
    """What each rank found, by rank."""
    trees = [os.environ.get(name, "") for name in (VLLM[variant], B12X)]
    path = os.pathsep.join(part for part in (*trees, os.environ.get("PYTHONPATH", "")) if part)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = [folder / f"rank{rank}.json" for rank in range(2)]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(CHILD), str(rank), str(port), str(result), variant],
            env={**ENVIRONMENT, **os.environ, "PYTHONPATH": path}, stdout=log, stderr=log,
        )
        for rank, result in enumerate(results)
        for log in [open(folder / f"rank{rank}.log", "wb")]  # noqa: SIM115 - the child's own
    ]  # fmt: skip
    end = time.monotonic() + RUN_SECONDS
    try:
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < end:
            # A rank that failed leaves its peer waiting.
            if any(rank.poll() for rank in ranks):
                end = min(end, time.monotonic() + 10)
            time.sleep(0.1)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    logs = [(folder / f"rank{rank}.log").read_text(errors="replace")[-3000:] for rank in range(2)]
    assert all(result.exists() for result in results), logs
    found = [json.loads(result.read_text()) for result in results]
    keep = os.environ.get("NEAPTIDE_TEST_RESULTS")
    if keep:
        (Path(keep) / f"disposable-captures-{variant}.json").write_text(json.dumps(found, indent=1) + "\n")
    assert [rank["error"] for rank in found] == ["", ""], logs
    return found


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Found:
    why = _missing(VLLM["patched"], B12X)
    if why:
        pytest.skip(why)
    return _run("patched", tmp_path_factory.mktemp("patched"))


@pytest.mark.gpu
def test_free_memory_is_as_after_the_first_profile(patched: Found) -> None:
    for rank in patched:
        free = rank["free_bytes"]
        assert len(free) == rank["profiles"] == 50
        assert max(abs(free[0] - later) for later in free[1:]) <= GRANULE_BYTES


@pytest.mark.gpu
def test_the_channel_of_a_profile_is_gone_after_it(patched: Found) -> None:
    for rank in patched:
        before = rank["channels_before"]
        assert rank["channels_inside"] == [before + 1] * rank["profiles"]
        assert rank["channels_after"] == before == 1


@pytest.mark.gpu
def test_a_real_capture_afterwards_is_right(patched: Found) -> None:
    for rank in patched:
        assert rank["pending_inputs"] == 0
        assert rank["replays"] == 40
        assert rank["wrong_sums"] == 0


@pytest.mark.gpu
def test_as_published_the_sums_are_right_too(tmp_path: Path) -> None:
    """What the profiles leave there is in the results, and nothing is asserted about it."""
    why = _missing(VLLM["upstream"], B12X)
    if why:
        pytest.skip(why)
    assert [rank["wrong_sums"] for rank in _run("upstream", tmp_path)] == [0, 0]
