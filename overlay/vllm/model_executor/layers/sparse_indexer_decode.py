# SPDX-License-Identifier: Apache-2.0
"""Decode of the sparse indexer in row tiles, so that one tile's logits stay within the budget.

Upstream scores all rows of a step at the full context width before it ranks any. Each logit is computed by
one thread block from its own row and the row's pages, and ranking is by row, so rows can be scored and ranked tile
by tile: the same scores, in less memory. What is decided for the whole step upstream stays so: the top-k backend comes
from the row count of the step, and ranks exchange their candidates once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from vllm import envs
from vllm.model_executor.layers.sparse_indexer_layout import (
    LogitsLayout,
    logits_layout,
    round_up,
)
from vllm.model_executor.layers.sparse_indexer_logits import (
    budget_bytes,
    decode_logits_bytes,
    decode_tile_units,
)
from vllm.neaptide_switches import CONSTANT_BYTES
from vllm.platforms import current_platform
from vllm.utils.deep_gemm import get_paged_mqa_logits_metadata, mqa_logits_use_mx_scales
from vllm.utils.platform_utils import num_compute_units

# DeepGEMM reads the request indices of its varlen form in pairs: a tile begins at an even row.
VARLEN_STEP = 2
# Row counts up to which vLLM's persistent top-k takes another algorithm.
TOPK_ROW_TIERS = (4, 8, 32, 64)


@dataclass(frozen=True)
class Candidates:
    """Two-level selection: the blocks of keys that a row may choose from.

    Attributes:
        blocks: int32 [rows, blocks].
        write: whether this layer publishes them; others mask their scores to them.
    """

    blocks: torch.Tensor
    block_size: int
    write: bool


@dataclass(frozen=True)
class ContextParallel:
    """Decode context parallelism of a step: ``world_size`` 1 for none."""

    rank: int = 0
    world_size: int = 1
    interleave: int = 1


@dataclass(frozen=True)
class DecodeStep:
    """What one layer scores in a decode step.

    Attributes:
        q: [units, next_n, heads, head_dim], FP8 or packed FP4.
        q_scale: [units, next_n, heads] or None.
        weights: [units * next_n, heads].
        kv_cache: the paged index cache, [pages, page_size, 1, bytes].
        seq_lens: int32 [units, next_n] or [units, 1].
        block_table: int32 [units, pages].
        indices: int32 [units], the request of each row in the varlen form, else None.
        columns: width of the logits.
        max_seq_len: host bound on the columns that any row reads.
        fp32: whether BF16 logits are copied to FP32.
    """

    q: torch.Tensor
    q_scale: torch.Tensor | None
    weights: torch.Tensor
    kv_cache: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    indices: torch.Tensor | None
    columns: int
    max_seq_len: int
    fp32: bool

    @property
    def next_n(self) -> int:
        return self.q.shape[1]


def tiles(units: int, most: int, step: int, unit_rows: int) -> tuple[tuple[int, int], ...]:
    """Ranges of units, as equal as the step allows, each of at most ``most``.

    The last range begins earlier and repeats rows of the one before it where it would otherwise have so few
    rows that the persistent top-k took another algorithm than for all rows (if ``most`` allows); the scores and
    sets are the same.
    """
    if units <= most:
        return ((0, units),)
    size = round_up(-(-units // -(-units // most)), step)
    floor = max((tier + 1 for tier in TOPK_ROW_TIERS if tier < units * unit_rows), default=1)
    least = min(round_up(-(-floor // unit_rows), step), most)
    size = max(size, least)
    starts = list(range(0, units, size))
    if units - starts[-1] < least:
        starts[-1] = round_up(units - least, step)
    return tuple((start, min(start + size, units)) for start in starts)


@lru_cache(maxsize=1024)
def decode_tiles(
    policy: str, budget: int, units: int, next_n: int, columns: int, varlen: bool, layout: LogitsLayout
) -> tuple[tuple[int, int], ...]:
    """Tiles of a decode step under a policy; one for a policy without tiles.

    Raises:
        ValueError: a budget that one unit does not fit.
    """
    if policy != CONSTANT_BYTES or decode_logits_bytes(units * next_n, columns, layout) <= budget:
        return ((0, units),)
    step = VARLEN_STEP if varlen else 1
    return tiles(units, decode_tile_units(budget, next_n, step, columns, layout), step, next_n)


def step_tiles(q: torch.Tensor, columns: int, *, varlen: bool, fp32: bool) -> tuple[tuple[int, int], ...]:
    """Tiles of a step on this machine; one where the platform's kernels are not DeepGEMM's.

    Args:
        q: [units, next_n, heads, head_dim].
        columns: width of the logits.
        varlen, fp32: as in :class:`DecodeStep`.
    """
    units, next_n = q.shape[:2]
    policy = envs.VLLM_NEAPTIDE_INDEXER_LOGITS_POLICY
    if policy != CONSTANT_BYTES or not current_platform.is_cuda():
        return ((0, units),)
    return decode_tiles(
        policy,
        budget_bytes(envs.VLLM_SPARSE_INDEXER_MAX_LOGITS_MB),
        units,
        next_n,
        columns,
        varlen,
        logits_layout(sm100=mqa_logits_use_mx_scales(), fp32_copy=fp32),
    )


def rank_in_tiles(
    step: DecodeStep,
    ranges: Sequence[tuple[int, int]],
    topk: torch.Tensor,
    topk_tokens: int,
    topk_backend: str,
    parallel: ContextParallel,
    candidates: Candidates | None = None,
) -> None:
    """Score and rank a step tile by tile into ``topk``.

    Args:
        topk: int32 [units * next_n, topk_tokens], written: columns of each row, -1 behind the last; under
            decode context parallelism global token ids.
        topk_tokens: keys that a row keeps.
        topk_backend: as configured; resolved for the row count of the step.

    Collective under decode context parallelism: one all-gather for the step, as upstream.
    """
    from vllm.model_executor.layers import sparse_attn_indexer as op

    rows = step.q.shape[0] * step.next_n
    ranker = None
    packed = _candidate_buffer(topk) if parallel.world_size > 1 else None
    for start, stop in ranges:
        where = slice(start * step.next_n, stop * step.next_n)
        logits = _score(op, step, start, stop)
        if candidates is not None:
            _apply_candidates(op, logits, step, start, stop, candidates)
        if ranker is None:
            dispatcher = op.get_indexer_topk(topk_backend)
            ranker = op.get_indexer_topk(dispatcher.resolve_backend(logits, topk_tokens, rows))
        ranker(logits, step.seq_lens[start:stop], step.next_n, topk[where], topk_tokens, step.max_seq_len)
        if packed is not None:
            _pack(op, logits, topk[where], packed[where], parallel)
        # The next tile must not find this one's logits alive.
        del logits
    if packed is not None:
        _select(op, packed, topk, topk_tokens)


def _score(op: Any, step: DecodeStep, start: int, stop: int) -> torch.Tensor:
    """Logits of the units ``[start, stop)``, FP32 where the step asks for it.

    The schedule is the tile's own: a kernel of microseconds, recorded by a CUDA graph with the tile.
    """
    lens = step.seq_lens[start:stop]
    indices = None if step.indices is None else step.indices[start:stop]
    schedule = get_paged_mqa_logits_metadata(
        lens, step.kv_cache.shape[1], num_compute_units(lens.device.index), indices=indices
    )
    logits = op.fp8_fp4_paged_mqa_logits(
        (step.q[start:stop], None if step.q_scale is None else step.q_scale[start:stop]),
        step.kv_cache,
        step.weights[start * step.next_n : stop * step.next_n],
        lens,
        step.block_table[start:stop],
        schedule,
        max_model_len=step.columns,
        indices=indices,
    )
    return op.as_fp32_logits(logits, lens.reshape(-1)) if step.fp32 else logits


def _apply_candidates(
    op: Any, logits: torch.Tensor, step: DecodeStep, start: int, stop: int, candidates: Candidates
) -> None:
    """Publish a tile's candidate blocks, or mask its scores to the published ones."""
    ends = step.seq_lens[start:stop].reshape(-1)
    repeat = step.next_n if ends.numel() != logits.shape[0] else 1
    blocks = candidates.blocks[start * step.next_n : stop * step.next_n]
    if candidates.write:
        op._select_candidate_blocks(logits, None, ends, blocks.shape[1], candidates.block_size, blocks, repeat)
    else:
        op._apply_candidate_mask(logits, None, ends, blocks, candidates.block_size, repeat)


def _candidate_buffer(topk: torch.Tensor) -> torch.Tensor:
    """(score, global id) of every rank's own top-k: FP32 [rows, topk_tokens, 2]."""
    return torch.empty((*topk.shape, 2), dtype=torch.float32, device=topk.device)


def _pack(op: Any, logits: torch.Tensor, topk: torch.Tensor, packed: torch.Tensor, parallel: ContextParallel) -> None:
    from vllm.model_executor.kernels.attention.dsa import dcp_indexer_cutedsl as kernels

    op._assert_cutedsl_dcp_merge_supported(logits, topk, topk.shape[1])
    kernels.pack_dcp_topk_candidates_cutedsl(
        logits, topk, packed, parallel.rank, parallel.world_size, parallel.interleave, None
    )


def _select(op: Any, packed: torch.Tensor, topk: torch.Tensor, topk_tokens: int) -> None:
    """The global top-k of all ranks' candidates: one all-gather."""
    from vllm.model_executor.kernels.attention.dsa import dcp_indexer_cutedsl as kernels

    gathered = op.get_dcp_group().all_gather(packed, dim=1)
    kernels.stable_topk_from_gathered_candidates_cutedsl(gathered, topk_tokens, out=topk)
