# SPDX-License-Identifier: Apache-2.0
"""Bytes of the sparse indexer's logits: what a launch allocates, and what profiling must reserve.

Pure functions of integers, without torch. The planner of the prefill chunks, the ops that score, the
profiling run and the ledger all call them, so that a size is decided in one place. A *column* is a key a
row may be scored against: a token, or a pool of tokens where the index cache is compressed. Layouts follow
DeepGEMM's ``csrc/apis/attention.hpp``: the allocation of a launch is rows times row stride.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.model_executor.layers.sparse_indexer_layout import (
    FP32_BYTES,
    LogitsLayout,
    logits_layout,
    round_down,
    round_up,
)
from vllm.neaptide_switches import CONSTANT_BYTES, FIXED_WIDTH, UPSTREAM

# Prefill rows are scored in blocks of 128 (row, head) pairs.
PREFILL_BLOCK_QH = 128
MIB = 1 << 20


def reads_fp32_logits(topk_backend: str, dcp_world_size: int) -> bool:
    """Whether the decode top-k of the shared indexer needs FP32 logits.

    ``deep_select`` reads BF16; every other backend, and the merge across decode-context-parallel
    ranks, reads FP32.
    """
    return topk_backend != "deep_select" or dcp_world_size != 1


def budget_bytes(budget_mb: int) -> int:
    """``VLLM_SPARSE_INDEXER_MAX_LOGITS_MB`` in bytes.

    Raises:
        ValueError: not positive.
    """
    if budget_mb <= 0:
        raise ValueError(
            f"VLLM_SPARSE_INDEXER_MAX_LOGITS_MB is {budget_mb}, wanted a positive number of MiB; unset it for 512."
        )
    return budget_mb * MIB


def local_columns(columns: int, world_size: int, interleave: int) -> int:
    """Most of ``columns`` that any one decode-context-parallel rank holds.

    Tokens go to the ranks in turns of ``interleave``; rank 0 has the most. ``columns`` itself for one rank.
    """
    turns, rest = divmod(columns, interleave * world_size)
    return turns * interleave + min(rest, interleave)


def prefill_row_step(heads: int) -> int:
    """Rows that a prefill launch is rounded up to: whole blocks of 128 (row, head) pairs.

    ``heads`` of 0, for unknown, gives a multiple of every step.
    """
    return max(1, PREFILL_BLOCK_QH // heads) if heads > 0 else PREFILL_BLOCK_QH


@dataclass(frozen=True)
class PrefillLaunch:
    """What every prefill launch of an indexer may allocate.

    Attributes:
        layout: the architecture's.
        row_step: see :func:`prefill_row_step`.
        elements: most logits of one launch, rounding included; the canonical size.
        fixed_columns: the width of every launch; 0 for the widest that stays within ``elements``.
    """

    layout: LogitsLayout
    row_step: int
    elements: int
    fixed_columns: int = 0

    @property
    def allocations(self) -> tuple[int, ...]:
        """Bytes of each block that a launch of the canonical size holds: the logits, and their FP32 copy."""
        sizes = (self.elements * self.layout.element_bytes, self.elements * self.layout.copy_bytes)
        return tuple(size for size in sizes if size)

    @property
    def live_bytes(self) -> int:
        return sum(self.allocations)

    def stride(self, columns: int) -> int:
        """Columns that each row of a launch takes at least."""
        return self.layout.prefill_stride(max(columns, self.fixed_columns))

    def packed_columns(self, columns: int, more: int) -> int:
        """Width of a launch of ``columns`` that takes in a request of ``more``.

        The wider of them where a row starts at its own first key, else the sum: a column for every gathered key.
        """
        return columns + more if self.layout.prefill_more else max(columns, more)

    def fits(self, rows: int, columns: int) -> bool:
        return round_up(rows, self.row_step) * self.stride(columns) <= self.elements

    def max_rows(self, columns: int) -> int:
        """Most rows of one launch of ``columns``: whole row steps, at least one of them."""
        return max(self.row_step, round_down(self.elements // self.stride(columns), self.row_step))

    def width(self, rows: int, columns: int) -> int:
        """Columns to ask DeepGEMM for, so that the launch allocates as near to ``elements`` as it can.

        At least ``columns``, which a launch that :meth:`fits` never needs more than the size allows.
        """
        if self.fixed_columns:
            return max(columns, self.fixed_columns)
        step = max(self.layout.column_step, self.layout.prefill_block)
        stride = round_down(self.elements // round_up(rows, self.row_step), step)
        return max(columns, stride - self.layout.prefill_more)


def prefill_launch(
    policy: str, budget: int, rows: int, columns: int, heads: int, layout: LogitsLayout
) -> PrefillLaunch | None:
    """The launch size of an indexer under a policy; None where upstream's sizes are kept.

    ``constant_bytes`` keeps what is alive of a launch within the budget: 4 bytes a logit on SM90 and SM120, and 6
    on SM100, where upstream counts 4. ``fixed_width`` counts 4 everywhere, as vllm-project/vllm#58068 does.

    Args:
        policy: of :data:`vllm.neaptide_switches.INDEXER_LOGITS_POLICIES`.
        budget: bytes.
        rows: of a full chunk (``max_num_batched_tokens``).
        columns: most that a row may have.
        heads: index heads; 0 if unknown.
        layout: with the FP32 copy, which prefill always makes of BF16 logits.

    Returns:
        For ``constant_bytes`` the largest multiple of (``rows`` rounded up) x (one step of the row stride)
        within the budget, or what a full chunk at full width takes, if that is less. Where a budget is so small
        that such a multiple would not hold one step of rows at full width, whole steps of rows count instead.

    Raises:
        ValueError: a budget that one step of rows at full width does not fit; the message names the smallest
            that works.
    """
    if policy not in (CONSTANT_BYTES, FIXED_WIDTH) or columns <= 0:
        return None
    row_step, full = prefill_row_step(heads), layout.prefill_stride(columns)
    if policy == FIXED_WIDTH:
        return PrefillLaunch(layout, row_step, budget // FP32_BYTES, fixed_columns=columns)
    _refuse_small_budget(budget, row_step * full * layout.live_bytes, f"{row_step} prefill rows of {columns} columns")
    allowed = budget // layout.live_bytes
    column_step = max(layout.column_step, layout.prefill_block)
    whole_chunks = round_down(allowed, round_up(rows, row_step) * column_step)
    # One step of rows at full width must fit what is left; it is a multiple of the finer granule.
    elements = whole_chunks if whole_chunks >= row_step * full else round_down(allowed, row_step * column_step)
    return PrefillLaunch(layout, row_step, min(elements, round_up(rows, row_step) * full))


def _refuse_small_budget(budget: int, needed: int, what: str) -> None:
    if budget < needed:
        raise ValueError(
            f"VLLM_SPARSE_INDEXER_MAX_LOGITS_MB allows {budget} bytes, but {what} take {needed}; the smallest value "
            f"that works is {-(-needed // MIB)}. Raise it, or choose VLLM_NEAPTIDE_INDEXER_LOGITS_POLICY=upstream."
        )


def upstream_prefill_elements(budget: int, rows: int, columns: int, heads: int, layout: LogitsLayout) -> int:
    """Bound on the logits of one launch of upstream's own plan, which does not count what DeepGEMM rounds up.

    ``rows * columns`` stays within the budget's FP32 elements; rounding adds less than one step of columns to
    each of at most ``rows`` rows, and less than one step of rows at full width. One row is always scored.
    """
    row_step = prefill_row_step(heads)
    column_step = max(layout.column_step, layout.prefill_block) + layout.prefill_more
    more = round_up(rows, row_step) * (column_step - 1) + (row_step - 1) * layout.prefill_stride(columns)
    return max(budget // FP32_BYTES + more, row_step * layout.prefill_stride(columns))


def decode_logits_bytes(rows: int, columns: int, layout: LogitsLayout) -> int:
    """Bytes alive for the logits of ``rows`` paged rows (the accounting of vllm-project/vllm#62860)."""
    return rows * layout.decode_stride(columns) * layout.live_bytes


def decode_tile_units(budget: int, unit_rows: int, step: int, columns: int, layout: LogitsLayout) -> int:
    """Most units of one decode tile whose logits, with their FP32 copy, fit the budget.

    Args:
        unit_rows: rows that stay together: ``next_n`` of a request, else 1.
        step: tiles begin at multiples of this many units (2 for DeepGEMM's varlen form).

    Raises:
        ValueError: not one step of units fits; the message names the smallest budget that works.
    """
    step_bytes = decode_logits_bytes(step * unit_rows, columns, layout)
    _refuse_small_budget(budget, step_bytes, f"{step * unit_rows} decode rows of {columns} columns")
    return budget // step_bytes * step


def max_decode_rows(max_num_seqs: int, max_num_batched_tokens: int, num_speculative_tokens: int) -> int:
    """Most rows of a decode step: every sequence padded to its verification length."""
    return min(max_num_seqs, max_num_batched_tokens) * (1 + num_speculative_tokens)


def reserved_logits_bytes(
    policy: str, upstream: int, budget: int, columns: int, heads: int, config: Any, *, sm100: bool,
    decode_fp32: bool = True, local: tuple[int, int] = (1, 1), planned: bool = True, tiled: bool = True,
    layout: LogitsLayout | None = None,
) -> int:  # fmt: skip
    """Bytes that the profiling run reserves: the most that is alive at once, in prefill or in decode.

    Args:
        policy, budget, heads: as for :func:`prefill_launch`.
        upstream: bytes that upstream reserves here. Any policy but ``constant_bytes`` keeps them.
        columns: keys a row may have: ``max_model_len``, or its number of pools.
        config: the current ``VllmConfig``. None outside of profiling: a dummy step of a running engine takes nothing.
            One without a scheduler leaves ``upstream``.
        sm100: whether DeepGEMM's SM100 kernels run. They write BF16, and decode in the varlen form.
        decode_fp32: whether decode copies BF16 logits to FP32.
        local: world size and interleave over which prefill's columns are sharded.
        planned: whether prefill is planned by launch size at all; upstream's plan otherwise.
        tiled: whether decode is tiled.
        layout: of prefill; by default the architecture's.

    Raises:
        ValueError: as :func:`prefill_launch` and :func:`decode_tile_units`.
    """
    if config is None:
        return 0
    scheduler = getattr(config, "scheduler_config", None)
    if scheduler is None or policy != CONSTANT_BYTES:
        return upstream
    batched, next_n = scheduler.max_num_batched_tokens, 1
    if getattr(config, "speculative_config", None) is not None:
        next_n += config.speculative_config.num_speculative_tokens
    widest, plan = local_columns(columns, *local), policy if planned else UPSTREAM
    prefill_layout = layout or logits_layout(sm100=sm100, fp32_copy=True)
    prefill = _prefill_bytes(plan, budget, batched, widest, heads, prefill_layout)
    decode_layout = logits_layout(sm100=sm100, fp32_copy=decode_fp32)
    rows = max_decode_rows(scheduler.max_num_seqs, batched, next_n - 1)
    if tiled:
        # The form with the largest unit must fit; the one with the smallest has the largest tiles.
        decode_tile_units(budget, *((1, 2) if sm100 else (next_n, 1)), columns, decode_layout)
        rows = min(rows, decode_tile_units(budget, 1, 1, columns, decode_layout))
    return max(prefill, decode_logits_bytes(rows, columns, decode_layout))


def _prefill_bytes(policy: str, budget: int, rows: int, columns: int, heads: int, layout: LogitsLayout) -> int:
    """Bytes alive in the largest prefill launch under a policy."""
    launch = prefill_launch(policy, budget, rows, columns, heads, layout)
    if launch is not None:
        return launch.live_bytes
    return upstream_prefill_elements(budget, rows, columns, heads, layout) * layout.live_bytes
