"""Ranks that disagree about what decides a slab's size get an error each, before anything is allocated.

Two processes of a gloo group make channels of the b12x on the path. Only what needs a CUDA device is replaced. The
checks are upstream's; what is tested is that the sizes of this patch follow from what they compare.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

DEADLINE_S = 90
A2A = {"max_batch_size": 64, "total_heads": 48, "head_dim": 512, "query_head_dim": 576}
ONESHOT = {"eager_buffer_bytes": 86_016, "max_size": 86_016}
# For each case: the kind, what rank 1 has otherwise, and its environment.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "rows": ("a2a", {"max_batch_size": 32}, {}),
    "heads": ("a2a", {"total_heads": 96}, {}),
    "head size": ("a2a", {"head_dim": 256}, {}),
    "query head size that leaves the slab alone": ("a2a", {"query_head_dim": 512}, {}),
    "payload": ("oneshot", {"eager_buffer_bytes": 172_032}, {}),
    "transports": ("oneshot", {}, {"B12X_PCIE_ONESHOT_PUSH": "1"}),
    "nothing, exchange": ("a2a", {}, {}),
    "nothing, oneshot": ("oneshot", {}, {}),
}


def module(name: str) -> Any:
    return importlib.import_module(f"b12x.comm.pcie.{name}")


class Allocated(Exception):
    """The checks let it through; carries the size."""


def prepare(patch: pytest.MonkeyPatch) -> None:
    def allocate(group: Any, size: int, **rest: Any) -> None:
        raise Allocated(size)

    oneshot, a2a = module("pcie_oneshot"), module("pcie_dcp_a2a")
    extension = MagicMock(meta_size=lambda: 150_528)
    for source in (oneshot, a2a):
        patch.setattr(source, "_require_full_grid_residency", lambda **given: None)
        patch.setattr(source, "CudaRTLibrary", MagicMock)
        patch.setattr(source, "_load_extension", lambda: extension, raising=False)
    # 1.1.0 exchanges objects over NCCL only.
    patch.setattr(oneshot, "_object_broadcast_device", lambda group: "cpu")
    patch.setattr(oneshot.PCIeOneshotAllReduce, "_allocate_shared_buffer", staticmethod(allocate))


def make(kind: str, given: dict[str, Any], group: Any) -> None:
    if kind == "a2a":
        module("pcie_dcp_a2a").PCIeDCPA2A.from_exchange_group(
            exchange_group=group, device="cuda:0", ext_module=MagicMock(meta_size=lambda: 266_240), **{**A2A, **given}
        )
    else:
        module("pcie_oneshot").PCIeOneshotAllReducePool.from_exchange_group(
            exchange_group=group, device="cuda:0", single_channel=True, **{**ONESHOT, **given}
        )


def child(rank: int, folder: Path) -> None:
    from torch import distributed

    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    patch, outcomes = pytest.MonkeyPatch(), {}
    prepare(patch)
    for name, (kind, other, environment) in CASES.items():
        os.environ.update(environment if rank else {})
        try:
            make(kind, other if rank else {}, distributed.group.WORLD)
        except Allocated as found:
            outcomes[name] = f"allocates {found}"
        except Exception as found:
            outcomes[name] = f"{type(found).__name__}: {found}"
        for key in environment:
            os.environ.pop(key, None)
    (folder / f"{rank}.json").write_text(json.dumps(outcomes))
    distributed.barrier()
    # Gloo's threads do not always survive a peer that has gone.
    os._exit(0)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("ranks")
    path = os.pathsep.join([str(Path(module("pcie_oneshot").__file__).parents[3]), *sys.path])
    ranks = [
        subprocess.Popen([sys.executable, __file__, str(rank), folder], env={**os.environ, "PYTHONPATH": path})
        for rank in range(2)
    ]
    try:
        assert [process.wait(timeout=DEADLINE_S) for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("case", [name for name, (_, other, environment) in CASES.items() if other or environment])
def test_a_disagreement_is_every_ranks_error(outcomes: list[dict[str, str]], case: str) -> None:
    for rank in outcomes:
        assert "contract differs across ranks" in rank[case]


def test_ranks_that_agree_ask_for_the_patched_sizes(outcomes: list[dict[str, str]]) -> None:
    sizes, oneshot = module("slab_sizes"), module("pcie_oneshot")
    slab = sizes.a2a_slab_bytes(266_240, sizes.a2a_staged_bytes(2, 64, 48, 512, 576), 64, 48)
    slot = 86_016
    if hasattr(oneshot, "_transport_policy_contract"):
        slot = sizes.eager_slot_bytes(2, oneshot._transport_policy_contract(), 86_016)
    for rank in outcomes:
        assert rank["nothing, exchange"] == f"allocates {slab}"
        assert rank["nothing, oneshot"] == f"allocates {sizes.eager_slab_bytes(150_528, slot)}"


if __name__ == "__main__":
    child(int(sys.argv[1]), Path(sys.argv[2]))
