# SPDX-License-Identifier: Apache-2.0
"""Tensors over the regions of the paged indexer's scratch."""

from __future__ import annotations

from typing import Any

import torch
from b12x._lib.scratch_layout import materialize_scratch_view

from .fold_sizes import Fold, FoldShape, fold_within
from .paged_regions import ABSENT


def region_view(storage: torch.Tensor, *, offset_bytes: int, **shape: Any) -> tuple[torch.Tensor | None, int]:
    """Upstream's view of a region; None where the plan has no bytes for it."""
    if offset_bytes == ABSENT:
        return None, ABSENT
    return materialize_scratch_view(storage, offset_bytes=offset_bytes, **shape)


def with_memory(scratch: Any, layout: Any) -> Any:
    """``scratch`` with the bytes that a fold may use."""
    memory = layout.memory
    if memory is not None:
        scratch.memory = memory
        scratch.fold_slab = scratch.shared_scratch.narrow(0, memory.fold_offset, memory.fold_bytes)
    return scratch


def held_fold(
    scratch: Any, *, q_rows: int, topk: int, page_size: int, page_table_width: int, supertile_pages: int,
    output_physical_slots: bool,
) -> Fold:  # fmt: skip
    """Whether a call folds: if the bytes that its plan reserved hold the candidates.

    Takes the place of upstream's decision. A scratch that was not made by our plan has reserved none.
    """
    memory = getattr(scratch, "memory", None)
    return fold_within(
        FoldShape(q_rows, topk, page_table_width, page_size, supertile_pages),
        0 if memory is None else memory.fold_limit,
        allowed=memory is not None and memory.folds,
        physical=output_physical_slots,
    )


def fold_buffers(
    scratch: Any, fold: Fold, *, rows: int, topk: int
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Values [rows * slices, topk] fp32, indices of that shape int32, and lengths [rows] int32, filled in.

    None without a fold.
    """
    if not fold.slices:
        return None, None, None
    count = rows * fold.total_slices
    slab, half = scratch.fold_slab, count * topk * 4
    values = slab.narrow(0, 0, half).view(torch.float32).view(count, topk)
    indices = slab.narrow(0, half, half).view(torch.int32).view(count, topk)
    lengths = slab.narrow(0, 2 * half, rows * 4).view(torch.int32)
    lengths.fill_(fold.total_slices * topk)
    return values, indices, lengths


def carry_rows(buffer: torch.Tensor, *, rows: int, topk: int) -> torch.Tensor:
    """The first bytes of a carry buffer as its two halves for a call, [2, rows, topk] and contiguous.

    Raises:
        ValueError: the plan has fewer rows.
    """
    count = 2 * rows * topk
    if buffer.numel() < count:
        raise ValueError(f"a carry of {buffer.numel():,} elements, wanted {count:,}; plan with max_q_rows of {rows:,}")
    return buffer.view(-1)[:count].view(2, rows, topk)


def output_buffers(
    scratch: Any, *, row_count: int, topk: int, out_indices: torch.Tensor | None, out_scores: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and indices of the scratch for outputs that the caller did not give, [rows, topk or more].

    Where the plan has none, the caller's indices stand in: for themselves, and for values that nobody writes
    or reads (a call without ``out_scores`` puts out indices only).

    Raises:
        ValueError: the caller gave no indices, and the plan counted on them.
    """
    memory = getattr(scratch, "memory", None)
    if memory is None or memory.offset_of("topk_indices") != ABSENT:
        return scratch.get_indexer_contiguous_topk_buffers(row_count=row_count)
    if out_indices is None:
        raise ValueError(
            "a paged top-k call without out_indices; its plan has no buffer for them. Pass out_indices, or plan with "
            "plan_indexer_paged_scratch and caller_outputs=False"
        )
    return out_indices.view(torch.float32), out_indices
