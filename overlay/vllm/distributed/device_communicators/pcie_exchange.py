# SPDX-License-Identifier: Apache-2.0
"""The exchanges of decode context parallelism in MLA over b12x's PCIe collectives: query heads, and outputs by LSE."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import ProcessGroup
from vllm.distributed.device_communicators.pcie_channels import EAGER, PooledChannel, packed

_GATHER = "DcpAllToAllPool.all_gather_heads"
_REDUCE = "DcpAllToAllPool.lse_reduce_scatter"
GATHERED = (torch.float16, torch.bfloat16, torch.float8_e4m3fn)
REDUCED = (torch.float16, torch.bfloat16)


class PcieExchange:
    """One channel for the layers of one shape, target and draft alike.

    Args:
        group: the ranks, a CPU group.
        rows: the most rows of a call; more are vLLM's own.
        heads: of all ranks.
        head_dim, query_head_dim: elements of an output and of a query.

    Attributes:
        calls: how many were served, a captured one once.

    Raises:
        RuntimeError: on every rank, if a rank cannot map its peers.
    """

    def __init__(
        self, group: ProcessGroup, device: torch.device, *, rows: int, heads: int, head_dim: int, query_head_dim: int
    ) -> None:
        from b12x.comm.pcie import DcpAllToAllPool

        self.rows, self.heads, self.head_dim, self.query_head_dim = rows, heads, head_dim, query_head_dim
        pool = DcpAllToAllPool.from_exchange_group(
            exchange_group=group, device=device, max_batch_size=rows, total_heads=heads, head_dim=head_dim,
            query_head_dim=query_head_dim,
        )  # fmt: skip
        self.world_size = torch.distributed.get_world_size(group)
        self.channel = PooledChannel(pool, group, device)
        self.calls = 0

    def join_captures(self) -> None:
        """Take part in every later capture."""
        self.channel.join_captures()

    def gathered(self, query: torch.Tensor) -> torch.Tensor | None:
        """All heads of a query [rows, heads / W, query_head_dim], in the order of ranks; None if it is vLLM's own."""
        shape = (self.heads // self.world_size, self.query_head_dim)
        if (
            query.ndim != 3 or not 0 < query.shape[0] <= self.rows or tuple(query.shape[1:]) != shape
            or query.dtype not in GATHERED or not query.is_contiguous()
        ):  # fmt: skip
            return None
        out = query.new_empty((query.shape[0], self.heads, self.query_head_dim))
        return self._called("all_gather_heads", _GATHER, {"local_input": packed(query), "out": out}, query.dtype)

    def reduced(self, output: torch.Tensor, lse: torch.Tensor, *, natural: bool) -> torch.Tensor | None:
        """This rank's heads of the outputs [rows, heads, head_dim] of all ranks, weighted by their LSE [rows, heads].

        None if it is vLLM's own. A row that no rank has a finite LSE for is zero.
        """
        if (
            output.ndim != 3 or not 0 < output.shape[0] <= self.rows or output.dtype not in REDUCED
            or tuple(output.shape[1:]) != (self.heads, self.head_dim) or lse.dtype != torch.float32
            or lse.shape != output.shape[:2]
        ):  # fmt: skip
            return None
        out = output.new_empty((output.shape[0], self.heads // self.world_size, self.head_dim))
        # Of a backend with padded heads it is a part of a wider tensor.
        call = {
            "partial_output": packed(output),
            "partial_lse": packed(lse),
            "out": out,
            "is_lse_base_on_e": natural,
        }
        return self._called("lse_reduce_scatter", _REDUCE, call, (output.dtype, natural))

    def _called(self, method: str, surface: str, call: dict[str, Any], kind: object) -> torch.Tensor | None:
        plan = self.channel.plan_of(surface, kind, call) if self.channel.here() else None
        if plan is None:
            return None
        self.calls += 1
        made: torch.Tensor = getattr(self.channel.pool, method)(**call, plan=plan, channel_id=EAGER)
        return made

    def held_bytes(self) -> int:
        """What this rank's device holds for it, by the functions that the allocations are sized with."""
        from b12x.comm.pcie.slab_sizes import owned_a2a_bytes

        return int(owned_a2a_bytes(self.channel.channel))


def combine_over(
    exchange: PcieExchange | None, otherwise: Callable[..., torch.Tensor], *, natural: bool, mask: Callable[..., None]
) -> Callable[..., torch.Tensor]:
    """vLLM's combine of a layer: over PCIe what it takes, ``otherwise`` for the rest.

    Args:
        mask: upstream's, which sets the LSE of empty shards to minus infinity.
    """
    if exchange is None:
        return otherwise

    def combine(
        partial_output: torch.Tensor, partial_lse: torch.Tensor, *, seq_lens: torch.Tensor | None = None,
        query_start_loc: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        if 0 < partial_output.shape[0] <= exchange.rows:
            mask(partial_lse, seq_lens, query_start_loc)
            reduced = exchange.reduced(partial_output, partial_lse, natural=natural)
            if reduced is not None:
                return reduced
        return otherwise(partial_output, partial_lse, seq_lens=seq_lens, query_start_loc=query_start_loc)

    return combine


def gather_over(
    exchange: PcieExchange | None, otherwise: Callable[[torch.Tensor], torch.Tensor], padded_heads: int | None,
    reserve: Callable[[torch.Tensor, int], torch.Tensor],
) -> Callable[[torch.Tensor], torch.Tensor]:  # fmt: skip
    """vLLM's gather of query heads: over PCIe what it takes, ``otherwise`` for the rest.

    Args:
        padded_heads: heads whose storage the backend wants behind a gathered query; None for no more than it has.
        reserve: upstream's, which gives a query that storage.
    """
    if exchange is None:
        return otherwise

    def gather(query: torch.Tensor) -> torch.Tensor:
        gathered = exchange.gathered(query)
        if gathered is None:
            return otherwise(query)
        return gathered if padded_heads is None else reserve(gathered, padded_heads)

    return gather
