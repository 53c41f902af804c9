"""Ranks that disagree about the ring get an error each, before anything is allocated, and may try again.

Two processes of a gloo group build the ring of the b12x on the path. Only what needs a CUDA device is replaced, so
the collective checks are upstream's own.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dma_machine import Machine, module
from dma_records import DEVICE

MIB = 1 << 20
DEADLINE_S = 90
# What each rank is given (fp8, max_bytes, B12X_PCIE_DMA_FP8), and what both errors must name.
CASES: dict[str, tuple[list[tuple[Any, Any, str]], list[str]]] = {
    "mode": ([("ag", MIB, ""), ("ring", MIB, "")], ["mode='ag'", "mode='ring'"]),
    "mode from the environment": ([(None, MIB, "mx"), (None, MIB, "")], ["mode='mx'", "mode=''"]),
    "capacity": ([("", MIB, ""), ("", 2 * MIB, "")], ["max_bytes=1048576", "max_bytes=2097152"]),
    "invalid mode": ([("zip", MIB, ""), ("ag", MIB, "")], ["group rank 0", "'zip'"]),
    "invalid mode in the environment": ([(None, MIB, "ag"), (None, MIB, "zip")], ["group rank 1", "'zip'"]),
    "no capacity": ([("ag", MIB, ""), ("ag", 0, "")], ["group rank 1", "max_bytes=0"]),
    "capacity that is no number": ([("ag", "much", ""), ("ag", MIB, "")], ["group rank 0", "'much'"]),
    "none": ([("mx_ring", MIB, ""), (None, str(MIB), "mxfp8-ring")], []),
}


class Rank(Machine):
    """One rank in a real group: its collectives are real, its device is not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from torch import distributed

        oneshot, dma = module("pcie_oneshot"), module("pcie_dma")
        gather = oneshot._broadcast_gather_object
        self.prepare(monkeypatch, distributed.get_world_size())
        monkeypatch.setattr(dma, "dist", distributed)
        monkeypatch.setattr(oneshot, "_broadcast_gather_object", gather)
        # 1.1.0 exchanges objects over NCCL only.
        monkeypatch.setattr(oneshot, "_object_broadcast_device", lambda group: "cpu")
        self.rank = distributed.get_rank()


def child(rank: int, folder: Path) -> None:
    """Build the ring of every case in turn, and write down what came of it."""
    from torch import distributed

    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    patch = pytest.MonkeyPatch()
    machine, outcomes = Rank(patch), {}
    for name, (ranks, _) in CASES.items():
        fp8, max_bytes, os.environ["B12X_PCIE_DMA_FP8"] = ranks[rank]
        machine.slab_bytes.clear()
        machine.allocated, error = 0, ""
        try:
            module("pcie_dma").PCIeDmaAllReduce(
                exchange_group=distributed.group.WORLD, device=DEVICE, max_bytes=max_bytes, fp8=fp8,
                ext_module=machine.kernels[rank],
            )  # fmt: skip
        except Exception as found:
            error = f"{type(found).__name__}: {found}"
        outcomes[name] = {"error": error, "slabs": list(machine.slab_bytes), "other_bytes": machine.allocated}
    (folder / f"{rank}.json").write_text(json.dumps(outcomes))
    distributed.barrier()
    # Gloo's threads do not always survive a peer that has gone.
    os._exit(0)


@functools.cache
def run(folder: Path) -> list[dict[str, Any]] | str:
    """What came of the cases on each rank, or how the processes failed."""
    path = os.pathsep.join([str(Path(module("pcie_dma").__file__).parents[3]), *sys.path])
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), folder], env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=DEADLINE_S)[0] for process in ranks]
    except subprocess.TimeoutExpired as expired:
        return f"a rank hangs: {expired}"
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    if any(process.returncode for process in ranks):
        return "\n".join(said)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Called by a test, so that a failure is that test's."""
    folder = tmp_path_factory.mktemp("ranks")

    def of_both() -> list[dict[str, Any]]:
        found = run(folder)
        assert isinstance(found, list), found
        return found

    return of_both


@pytest.mark.parametrize("case", [name for name, (_, names) in CASES.items() if names])
def test_a_disagreement_is_every_ranks_error(outcomes: Any, case: str) -> None:
    for rank in outcomes():
        found = rank[case]
        assert found["error"].startswith("RuntimeError: PCIe DMA ring layout")
        for name in CASES[case][1]:
            assert name in found["error"]
        assert (found["slabs"], found["other_bytes"]) == ([], 0), "nothing was allocated"


def test_the_same_ranks_may_then_agree(outcomes: Any) -> None:
    for rank in outcomes():
        assert rank["none"]["error"] == ""
        assert len(rank["none"]["slabs"]) == 1
    assert outcomes()[0]["none"]["slabs"] == outcomes()[1]["none"]["slabs"]


if __name__ == "__main__":
    child(int(sys.argv[1]), Path(sys.argv[2]))
