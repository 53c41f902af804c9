# SPDX-License-Identifier: Apache-2.0
"""Split accumulators of FlashAttention 3 under sparse MLA: how many splits, and what they take.

FLASH_ATTN_MLA_SPARSE calls FA3 with one sequence a row. For up to 992 sequences FA3 allocates accumulators for the
split count that one long sequence alone would want, [splits, heads, rows, v] FP32 and [splits, heads, rows] for the
LSE, on every row: 28 x 912 rows x 64 heads x 512 x 4 = 3,347,054,592 B, as measured. What a row then runs with is
chosen on the device from the work of the whole batch; the allocated count is only its upper bound
(vllm-project/flash-attention, ``hopper/heuristics.h`` and ``flash_prepare_scheduler.cu``):
ceil(blocks of the row / ceil(1.1 x all blocks / SMs)).

A bound at or above every row's own count changes no bit: the kernel runs the same splits, and the same combine if
the count stays in its class (up to 32, 64 or 128). Below it, the row's sums are taken in another order.
:func:`own_splits` is the most that a row can come to if every row of the batch has a key. Rows without keys (padding of
a captured graph) are no work there, so a graph that is replayed far from full could be bounded; unless a budget is set,
calls in a capture are therefore left as they are. Rows are not tiled instead: that changes a launch's work, and the
counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

FP32_BYTES = 4
# Above it FA3 does not split sequences of varying length (PREPARE_VARLEN_MAX_BATCHES_1CTA).
MOST_SPLIT_ROWS = 992
MOST_SPLITS = 128
LEAST_SPLIT_BLOCKS = 5


@dataclass(frozen=True)
class SplitCase:
    """What decides the splits of one call.

    Attributes:
        heads: query heads of one row; they share one KV head.
        width: columns of the output, ``kv_lora_rank``.
        keys: most keys of a row, the width of the top-k indices.
        multiprocessors: of the device.
    """

    heads: int
    width: int
    keys: int
    multiprocessors: int

    @property
    def tile(self) -> tuple[int, int]:
        """Query rows and keys of a tile at head size 64 (``tile_size_fwd_sm90``)."""
        return (64, 64) if self.width > 256 else (128, 96)

    @property
    def row_blocks(self) -> int:
        """Tiles of query heads of one row."""
        return -(-self.heads // self.tile[0])

    @property
    def key_blocks(self) -> int:
        """Tiles of keys of the longest row."""
        return -(-self.keys // self.tile[1])

    def bytes_of(self, rows: int, splits: int) -> int:
        """Bytes of the accumulators of output and LSE; none for one split."""
        return 0 if splits <= 1 else splits * rows * self.heads * (self.width + 1) * FP32_BYTES


@cache
def upstream_splits(case: SplitCase, rows: int) -> int:
    """The count that FA3 allocates for when it is given none (``get_num_splits``).

    The smallest with at least 85 % of the best occupancy of one sequence, and 1 where one sequence fills the device or
    has few keys, or where there are too many rows.
    """
    alone, most = case.row_blocks, min(MOST_SPLITS, case.multiprocessors, case.key_blocks)
    if rows > MOST_SPLIT_ROWS or case.key_blocks < LEAST_SPLIT_BLOCKS or alone >= 0.8 * case.multiprocessors:
        return 1
    waves = [alone * count / case.multiprocessors for count in range(1, most + 1)]
    occupancy = [wave / math.ceil(wave) for wave in waves]
    return next(i for i, part in enumerate(occupancy, 1) if part >= 0.85 * max(occupancy))


def least_of_combine(splits: int) -> int:
    """The least count that is combined by the same kernel as ``splits`` are."""
    return next(least for least in (65, 33, 1) if splits >= least)


@cache
def own_splits(case: SplitCase, rows: int) -> int:
    """The most splits that the device chooses for a row when every other row has one key at least.

    Or a few more, where upstream's combine needs them.
    """
    blocks = case.row_blocks * (rows - 1 + case.key_blocks)
    # A little less than FA3's 10 % margin, for what its single precision may round down.
    per_processor = math.ceil(blocks * 1.1 * (1 - 1e-6) / case.multiprocessors)
    wanted = upstream_splits(case, rows)
    return min(wanted, max(-(-case.key_blocks // per_processor), least_of_combine(wanted)))


def splits_within(case: SplitCase, rows: int, budget: int) -> int:
    """Splits of a call over ``rows`` rows: upstream's if they fit ``budget`` bytes or it is 0, else as many as do."""
    wanted = upstream_splits(case, rows)
    if not budget or not rows or case.bytes_of(rows, wanted) <= budget:
        return wanted
    return max(1, budget // (case.bytes_of(rows, 2) // 2))


def most_bytes(case: SplitCase, rows: int, budget: int) -> int:
    """The most that a call of up to ``rows`` rows allocates under ``budget`` bytes (0: no bound)."""
    counts = range(1, min(rows, MOST_SPLIT_ROWS) + 1)
    return max((case.bytes_of(n, splits_within(case, n, budget)) for n in counts), default=0)


@cache
def exact_budget(case: SplitCase, rows: int) -> int:
    """The least budget, in bytes, under which no call of up to ``rows`` rows is split otherwise than upstream's,
    given a key in every row."""
    counts = range(1, min(rows, MOST_SPLIT_ROWS) + 1)
    return max((case.bytes_of(n, own_splits(case, n)) for n in counts), default=0)


def split_case(impl: Any) -> SplitCase:
    """The case of a ``FlashAttnMLASparseImpl``."""
    from vllm.utils.platform_utils import num_compute_units

    buffer = impl.topk_indices_buffer
    return SplitCase(impl.num_heads, impl.kv_lora_rank, buffer.shape[-1], num_compute_units(buffer.device.index or 0))


def set_budget() -> int | None:
    """The budget that was set, in bytes (0: no bound); None for the default."""
    from vllm import envs

    mebibytes: int | None = envs.VLLM_NEAPTIDE_MLA_SPLITS_MB
    return None if mebibytes is None else mebibytes << 20


def call_budget(case: SplitCase, budget: int | None, *, capturing: bool) -> int:
    """Budget of one call in bytes, 0 for none: what was set, else the least that changes no bit of an eager call."""
    if budget is not None:
        return budget
    return 0 if capturing else exact_budget(case, MOST_SPLIT_ROWS)


def bounded_splits(impl: Any, rows: int) -> int:
    """``num_splits`` for FA3: 0 (it chooses) where the accumulators of its own choice fit the budget, and off CUDA."""
    if not impl.topk_indices_buffer.is_cuda:
        return 0
    import torch

    case = split_case(impl)
    capturing = torch.cuda.is_current_stream_capturing()
    splits = splits_within(case, rows, call_budget(case, set_budget(), capturing=capturing))
    return 0 if splits == upstream_splits(case, rows) else splits


def split_scratch(impl: Any, rows: int) -> tuple[int, int]:
    """Bytes to profile for calls of up to ``rows`` rows, and the most rows of a call that is split.

    Warns once if the budget may reorder sums.
    """
    from vllm.logger import init_logger

    if not impl.topk_indices_buffer.is_cuda:
        return 0, 0
    case = split_case(impl)
    exact = exact_budget(case, MOST_SPLIT_ROWS)
    budget = call_budget(case, set_budget(), capturing=False)
    if 0 < budget < exact:
        init_logger(__name__).warning_once(
            "VLLM_NEAPTIDE_MLA_SPLITS_MB is %d; sparse MLA attention takes fewer splits than FlashAttention would in "
            "some batches, and sums in another order. From %d on it never does.",
            budget >> 20,
            -(-exact >> 20),
        )
    return most_bytes(case, rows, budget), MOST_SPLIT_ROWS
