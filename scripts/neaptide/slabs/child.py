"""``python child.py SPEC RESULT``: what the b12x on the path would allocate for each shape, without a device.

Its own code computes every size; the calls that need CUDA are replaced by recorders. Imports nothing of neaptide.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import torch

# sizeof(Signal) of the native backends, which only a compiled extension tells; the CuTe backends name theirs.
NATIVE_SIGNAL_BYTES = {"exchange": 266_368, "oneshot": 150_656}


class Asked(Exception):
    """An allocation was asked for."""


def module(name: str) -> Any:
    return importlib.import_module(f"b12x.comm.pcie.{name}")


def exchange(shape: dict[str, Any]) -> dict[str, int]:
    """A channel of the DCP exchange: its slab."""
    a2a = module("pcie_dcp_a2a")
    layout = a2a._staging_layout(
        signal_bytes=getattr(a2a, "_SIGNAL_BYTES", NATIVE_SIGNAL_BYTES["exchange"]), world_size=shape["world_size"],
        max_batch_size=shape["rows"], total_heads=shape["heads"], head_dim=shape["head_dim"],
        query_head_dim=shape["query_head_dim"],
    )  # fmt: skip
    return {"slab_bytes": layout.slab_bytes}


def oneshot(shape: dict[str, Any]) -> dict[str, int]:
    """A oneshot channel: its slab, and rank data at the pool's default."""
    source, asked = module("pcie_oneshot"), []

    def allocate(group: Any, size: int, **rest: Any) -> None:
        asked.append(size)
        raise Asked

    world, eager = shape["world_size"], shape["eager_bytes"]
    contract = getattr(source, "_transport_policy_contract", None)
    policy = None if contract is None else contract()
    shards = source._eager_storage_shards(world, policy) if policy else 1
    pool = object.__new__(source.PCIeOneshotAllReducePool)
    vars(pool).update(
        rank=0, world_size=world, device=torch.device("cpu"), exchange_group=object(), _channel_factory=None,
        _ipc=object(), _ext=object(), _signal_bytes=getattr(source, "_SIGNAL_BYTES", NATIVE_SIGNAL_BYTES["oneshot"]),
        _transport_policy=policy, _eager_storage_shards=shards, eager_buffer_bytes=eager, max_size=eager, _closed=True,
    )  # fmt: skip
    recorded = patch.object(source.PCIeOneshotAllReduce, "_allocate_shared_buffer", staticmethod(allocate))
    with recorded, suppress(Asked):
        pool._new_channel(None)
    default = (
        inspect.signature(source.PCIeOneshotAllReducePool.from_exchange_group).parameters["rank_data_bytes"].default
    )
    return {"slab_bytes": asked[0], "rank_data_bytes": int(default)}


class Deviceless:
    """torch without a device: what is made on it has a size only."""

    def _make(self, *shape: Any, dtype: torch.dtype, **rest: Any) -> Any:
        return torch.empty(*shape, dtype=dtype, device="meta")

    zeros = empty = _make

    def __getattr__(self, name: str) -> Any:
        return MagicMock() if name == "cuda" else getattr(torch, name)


def dma(shape: dict[str, Any]) -> dict[str, int]:
    """A DMA ring: its slab and its stage."""
    source, asked = module("pcie_dma"), []
    world = shape["world_size"]

    def allocate(group: Any, size: int, **rest: Any) -> Any:
        asked.append(size)
        return SimpleNamespace(peer_ptrs=tuple(1 << 40 for _ in range(world)), local_ptr=1 << 40)

    stand_ins: dict[str, Any] = {
        "torch": Deviceless(), "dist": SimpleNamespace(get_rank=lambda group: 0, get_world_size=lambda group: world),
        "_normalize_device": lambda device: SimpleNamespace(type="cuda", index=0), "CudaRTLibrary": MagicMock(),
        "_load_kernels": MagicMock(), "_load_extension": MagicMock(),
        "PCIeOneshotAllReduce": SimpleNamespace(_allocate_shared_buffer=allocate),
    }  # fmt: skip
    agreements: dict[str, Any] = {
        "_require_collective_contract": lambda **given: None,
        "_run_collective_preallocation_setup": lambda **given: given["setup"](),
    }
    # The agreements are asked for by the patched ring alone.
    with patch.multiple(source, create=True, **stand_ins), patch.multiple(module("pcie_oneshot"), **agreements):
        ring = source.PCIeDmaAllReduce(
            exchange_group=object(),
            device="cuda:0",
            max_bytes=shape["max_bytes"],
            fp8=shape["mode"],
            ext_module=MagicMock(),
        )
    stage = ring._fp8_stage
    return {"slab_bytes": asked[0], "stage_bytes": 0 if stage is None else stage.numel() * stage.element_size()}


def main(spec_path: str, result_path: str) -> int:
    with open(spec_path) as handle:
        spec = json.load(handle)
    kinds = {"exchange": exchange, "oneshot": oneshot, "dma": dma}
    found = [{"kind": kind, "shape": shape, **kinds[kind](shape)} for kind in kinds for shape in spec[kind]]
    with open(result_path, "w") as handle:
        json.dump(found, handle)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
