"""What ``--dry`` imports for b12x: the pools' and the ring's interface on a CPU, over gloo. No memory, no streams.

It follows the documented interface only as far as this program's cases go, to try them without a GPU.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from operations import EPSILON, merged

STREAM = 0
SLAB_BYTES = 8 << 20
_LIVE = {"slabs": 0}
BF16 = torch.bfloat16


def allocated_bytes() -> int:
    return SLAB_BYTES * _LIVE["slabs"]


def _everyones(mine: object) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def _parts(mine: torch.Tensor) -> list[torch.Tensor]:
    flat = mine.contiguous().view(torch.uint8)
    found = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(found, flat)
    return [part.view(mine.dtype) for part in found]


def _agree(what: object) -> None:
    everyones = _everyones(what)
    if any(other != what for other in everyones):
        raise RuntimeError(f"ranks differ: {everyones}")


class Pool:
    def __init__(self, *, device: torch.device, **_: object) -> None:
        self.device = device
        self._all_channels: list[Any] = []
        self._named: dict[str, Any] = {}
        self._groups: dict[str, Any] = {}

    @classmethod
    def from_exchange_group(cls, **arguments: Any) -> Pool:
        return cls(**arguments)

    def prepare_channels(self, ids: Sequence[str], *, replay_group: str | None = None) -> None:
        _agree(("prepare", tuple(ids), replay_group))
        for name in ids:
            if name in self._named:
                continue
            channel = self._groups.get(replay_group) if replay_group else None
            if channel is None:
                channel = SimpleNamespace(signal_ptrs=(0, 0), _eager_ptrs=((256, 256), (1024, 1024)))
                self._all_channels.append(channel)
                _LIVE["slabs"] += 1
            self._named[name] = channel
            if replay_group:
                self._groups[replay_group] = channel

    def for_stream(self, stream: object = None, *, channel_id: str) -> Any:
        return self._named[channel_id]

    @contextmanager
    def capture(self, stream: Any, *, channel_id: str, replay_group: str | None = None) -> Iterator[Any]:
        if stream.cuda_stream != STREAM:
            raise RuntimeError("captured on a stream that is not the current one")
        self.prepare_channels((channel_id,), replay_group=replay_group)
        yield self._named[channel_id]

    def _keep(self, named: dict[str, Any]) -> None:
        kept = [channel for channel in self._all_channels if any(channel is other for other in named.values())]
        _LIVE["slabs"] -= len(self._all_channels) - len(kept)
        self._all_channels, self._named = kept, named
        self._groups = {g: c for g, c in self._groups.items() if any(c is other for other in kept)}

    def release(self, ids: Sequence[str]) -> None:
        _agree(("release", tuple(ids)))
        self._keep({name: channel for name, channel in self._named.items() if name not in ids})

    def checkpoint_channels(self) -> Any:
        return dict(self._named)

    def rollback_channels(self, checkpoint: Any) -> None:
        self._keep(checkpoint)

    @contextmanager
    def transient_captures(self) -> Iterator[None]:
        before = self.checkpoint_channels()
        try:
            yield
        except Exception:
            while any(other != "leaving" for other in _everyones("leaving")):
                pass
            raise
        else:
            _agree("left")
        finally:
            self._keep(before)

    def close(self) -> None:
        self._keep({})

    def all_gather_heads(self, local_input: Any, out: Any, *, channel_id: str | None = None) -> None:
        flat = [part.view(torch.uint8) for part in _parts(local_input)]
        out.view(torch.uint8).copy_(torch.cat(flat, dim=1))

    def lse_reduce_scatter(
        self, partial_output: Any, partial_lse: Any, out: Any, *, is_lse_base_on_e: bool, channel_id: str | None = None
    ) -> None:
        whole = merged(torch.stack(_parts(partial_output)), torch.stack(_parts(partial_lse)), is_lse_base_on_e)
        out.copy_(whole.chunk(dist.get_world_size(), dim=1)[dist.get_rank()])

    def all_reduce(self, inp: Any, *, out: Any, channel_id: str | None = None) -> None:
        out.copy_(torch.stack(_parts(inp)).float().sum(dim=0))

    def all_reduce_fused_add_rms_norm(
        self, inp: Any, residual: Any, weight: Any, epsilon: float, *, out: Any, residual_out: Any,
        channel_id: str | None = None,
    ) -> None:  # fmt: skip
        assert epsilon == EPSILON
        residual_out.copy_(torch.stack(_parts(inp)).float().sum(dim=0) + residual.float())
        out.copy_(torch.nn.functional.rms_norm(residual_out.float(), weight.shape, weight.float(), epsilon))


class Ring:
    def __init__(self, *, exchange_group: object, device: torch.device, max_bytes: int, fp8: str) -> None:
        import ring

        _agree((fp8, max_bytes))
        self.max_bytes, self._mode = max_bytes, fp8
        slab, stage = ring.arithmetic(fp8, max_bytes, dist.get_world_size(), True)
        self._memory = torch.zeros(slab, dtype=torch.uint8)
        self._slab = SimpleNamespace(local_ptr=self._memory.data_ptr())
        self._fp8_stage = torch.zeros(stage, dtype=torch.uint8) if stage else None
        self._ipc = SimpleNamespace(
            cudaMemcpyAsync=lambda target, source, size, stream: ctypes.memmove(target, source, size)
        )

    def should_allreduce(self, inp: torch.Tensor) -> bool:
        import ring

        return ring.carried(self._mode, self.max_bytes, dist.get_world_size(), inp.numel(), inp.dtype)[1]

    def all_reduce(self, inp: torch.Tensor, *, out: torch.Tensor) -> None:
        if not self.should_allreduce(inp):
            raise ValueError("does not fit")
        out.copy_(torch.stack(_parts(inp)).float().sum(dim=0))

    def close(self) -> None:
        self._memory = torch.empty(0)


def install() -> None:
    """Put the stand-ins where b12x would be."""
    layout = SimpleNamespace(slab_bytes=SLAB_BYTES)
    common: dict[str, Any] = {"_staging_layout": lambda **_: layout, "_SIGNAL_BYTES": 1, "fits": None}
    common["SUPPORTED_GATHER_DTYPES"] = (BF16, torch.float8_e4m3fn)
    classes: dict[str, dict[str, Any]] = {
        "pcie_dcp_a2a": {"PCIeDCPA2APool": Pool},
        "pcie_oneshot": {"PCIeOneshotAllReducePool": Pool},
        "pcie_dma": {"PCIeDmaAllReduce": Ring},
    }
    for name in ("b12x", "b12x.comm", "b12x.comm.pcie"):
        sys.modules[name] = ModuleType(name)
    for name, found in classes.items():
        made = ModuleType(f"b12x.comm.pcie.{name}")
        vars(made).update({**common, **found})
        sys.modules[made.__name__] = made
