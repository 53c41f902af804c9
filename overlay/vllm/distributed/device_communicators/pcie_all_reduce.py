# SPDX-License-Identifier: Apache-2.0
"""The all-reduce of a tensor-parallel group over b12x's PCIe collectives, where they take the payload."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ProcessGroup
from vllm.distributed.device_communicators.pcie_channels import EAGER, PooledChannel, packed, prepared_plan
from vllm.distributed.device_communicators.pcie_limits import FUSED, ONESHOT, RING, UPSTREAM, Limits

_ONESHOT = "OneshotAllReducePool.all_reduce"
_FUSED = "OneshotAllReducePool.all_reduce_fused_add_rms_norm"
_RING = "DmaAllReduce.all_reduce"
PACK_BYTES = 16
# Of a fused call: b12x has a block or more for each row, and so many blocks.
FUSED_ROWS = 36


class PcieAllReduce:
    """Oneshot for small payloads, a DMA ring for large ones.

    Everything that it holds is made here, with the communicator and before the memory profile: like NCCL's buffers it
    is in what the profile starts from, and not in what it leaves for the KV cache.

    Args:
        group: the ranks, a CPU group: what they exchange is handles and contracts.
        limits: alike on all ranks.

    Attributes:
        calls: how many went where, a captured one once.

    Raises:
        RuntimeError: on every rank, if a rank cannot map its peers.
    """

    def __init__(self, group: ProcessGroup, device: torch.device, limits: Limits) -> None:
        from b12x.comm.pcie import DmaAllReduce, OneshotAllReducePool

        self.limits = limits
        self.calls = {ONESHOT: 0, FUSED: 0, RING: 0, UPSTREAM: 0}
        pool = OneshotAllReducePool.from_exchange_group(
            exchange_group=group, device=device, eager_buffer_bytes=limits.oneshot_bytes, max_size=limits.oneshot_bytes
        )
        self.oneshot = PooledChannel(pool, group, device)
        self.ring: Any = None
        if limits.ring_from_bytes:
            self.ring = DmaAllReduce(exchange_group=group, device=device, max_bytes=limits.ring_bytes, fp8="")
            self._ring_plan = prepared_plan(self.ring, _RING, {})
            self._ring_ran = False

    def join_captures(self) -> None:
        """Take part in every later capture."""
        self.oneshot.join_captures()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The sum over the group, of the same shape and dtype; None if it is vLLM's own, alike on all ranks."""
        route = self.limits.route(tensor.numel() * tensor.element_size())
        by = {ONESHOT: self._by_oneshot, RING: self._by_ring}.get(route)
        summed = None if by is None else by(tensor)
        self.calls[UPSTREAM if summed is None else route] += 1
        return summed

    def all_reduce_add_rms_norm(
        self, tensor: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The sum over the group plus ``residual``, normalised and as it is; None if the steps are vLLM's own.

        Whether it is None is alike on all ranks. The sum is not rounded before ``residual`` is added.

        Args:
            tensor, residual: [rows, width], not written to.
            weight: [width] of the RMSNorm, of their dtype. Neither it nor ``epsilon`` is part of a plan.

        Returns:
            Two new tensors [rows, width]: the RMSNorm, and what it is of.
        """
        if not (self._fusible(tensor, residual, weight) and self.oneshot.here()):
            return None
        tensor, residual, weight = packed(tensor), packed(residual), packed(weight)
        plan = self._oneshot_plan(tensor, _FUSED)
        if plan is None:
            return None
        self.calls[FUSED] += 1
        normed, total = self.oneshot.pool.all_reduce_fused_add_rms_norm(
            tensor, residual, weight, epsilon, plan=plan, out=torch.empty_like(tensor),
            residual_out=torch.empty_like(residual), channel_id=EAGER,
        )  # fmt: skip
        return normed, total

    def _fusible(self, tensor: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> bool:
        if tensor.ndim != 2 or len(tensor) > FUSED_ROWS:
            return False
        row_bytes = tensor.shape[1] * tensor.element_size()
        return (
            self.limits.route(len(tensor) * row_bytes) == ONESHOT
            and row_bytes % PACK_BYTES == 0
            and residual.shape == tensor.shape
            and weight.shape == tensor.shape[1:]
            and tensor.dtype == residual.dtype == weight.dtype
            and all(_in_packs(operand) for operand in (tensor, residual, weight))
            and self.oneshot.channel.should_allreduce(tensor)
        )

    def _by_ring(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if not (_in_packs(tensor) and self.ring.should_allreduce(tensor) and self.oneshot.here()):
            return None
        if not self._ring_ran and torch.cuda.is_current_stream_capturing():
            return None  # its kernels are loaded by an eager call
        self._ring_ran = True
        summed: torch.Tensor = self.ring.all_reduce(tensor, plan=self._ring_plan, out=torch.empty_like(tensor))
        return summed

    def _by_oneshot(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if not (_in_packs(tensor) and self.oneshot.channel.should_allreduce(tensor) and self.oneshot.here()):
            return None
        tensor = packed(tensor)
        plan = self._oneshot_plan(tensor, _ONESHOT)
        if plan is None:
            return None
        out = torch.empty_like(tensor)
        summed: torch.Tensor = self.oneshot.pool.all_reduce(tensor, plan=plan, out=out, channel_id=EAGER)
        return summed

    def _oneshot_plan(self, tensor: torch.Tensor, surface: str) -> Any | None:
        return self.oneshot.plan_of(
            surface,
            (tuple(tensor.shape), tensor.stride(), tensor.dtype),
            {"inp": tensor},
            lambda state: state.bind_input(tensor),
        )

    def prepare_rows(self, width: int, dtype: torch.dtype, *, fused: bool = False) -> None:
        """Plans for all numbers of rows of a model's hidden size that the oneshot takes.

        So that none is compiled while requests wait, or fails there on one rank alone.

        Args:
            fused: those of :meth:`all_reduce_add_rms_norm`, too.
        """
        weight = torch.empty(width, dtype=dtype, device=self.oneshot.device)
        row_bytes = width * dtype.itemsize
        for rows in range(1, self.limits.oneshot_bytes // row_bytes + 1):
            tensor = torch.empty((rows, width), dtype=dtype, device=self.oneshot.device)
            if self.oneshot.channel.should_allreduce(tensor):
                self._oneshot_plan(tensor, _ONESHOT)
            if fused and self._fusible(tensor, tensor, weight):
                self._oneshot_plan(tensor, _FUSED)

    def held_bytes(self) -> int:
        """What this rank's device holds for it, by the functions that the allocations are sized with."""
        from b12x.comm.pcie.slab_sizes import owned_oneshot_bytes

        held = owned_oneshot_bytes(self.oneshot.channel)
        if self.ring is not None:
            held += self.ring._layout.slab_bytes + self.ring._layout.stage_bytes
        return int(held)


def _in_packs(tensor: torch.Tensor) -> bool:
    """Whether packs of 16 bytes can be read from its first byte on; alike on all ranks, as its offset is."""
    return tensor.is_contiguous() and tensor.storage_offset() * tensor.element_size() % PACK_BYTES == 0
