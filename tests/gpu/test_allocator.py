"""The allocator of this machine's torch, operation by operation, against the simulator.

Any CUDA device with 24 GiB free, and torch. A limit of 7 GiB that a workload sets and lifts stands for a full device.
``python3 tests/gpu/allocator_child DIR`` writes the recordings without pytest; ``tests/unit/simulate_data`` has
those of an H200 with torch 2.11.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).with_name("allocator_child")))

from neaptide.simulate.replay import first_difference, run_trace
from neaptide.simulate.traces import read_trace
from recorder import GIB
from workloads import NAMES, environment

CHILD = Path(__file__).with_name("allocator_child")
FREE_BYTES = 24 * GIB


def missing() -> str:
    """Why this machine cannot run these tests; empty if it can."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed beside this Python"
    import torch

    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    free_bytes = torch.cuda.mem_get_info()[0]
    if free_bytes < FREE_BYTES:
        return f"{free_bytes / GIB:.0f} GiB are free on the device, the workloads want {FREE_BYTES // GIB}"
    return ""


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(missing()), reason=missing() or "runs")]


@pytest.mark.parametrize("name", NAMES)
def test_the_simulator_is_this_torch_at_every_step(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(CHILD), str(tmp_path), name]
    done = subprocess.run(
        command, env=environment(name), capture_output=True, text=True, check=False, timeout=300
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    run = run_trace(read_trace(tmp_path / f"{name}.json.xz"))
    assert first_difference(run) is None
    assert run.undefined_from is None
    assert run.trace.recorded is not None
    assert len(run.trace.recorded.after) >= 5000
