# SPDX-License-Identifier: Apache-2.0
"""The launchers of the two-level fold, for a state that looks them up by key once its session is frozen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .fold_sizes import SLICE_TOKENS
from .paged import _PAGED_INDEX_TILE_BLOCK_K, _PAGED_INDEX_TILE_BLOCK_Q
from .paged_regions import PACKED
from .tiled_topk import run_row_topk, run_tiled_topk


def most_splits(supertile_tokens: int, tokens: int) -> int:
    """The most slices of one supertile in calls over up to ``tokens`` tokens of context."""
    return -(-min(supertile_tokens, tokens) // SLICE_TOKENS)


def gather_fold_launchers(layout: Any, binding: Any, values: Mapping[str, Any], gathered: dict[object, object]) -> None:
    """Resolve every launcher that a fold of this plan can ask for into ``gathered``, by its key.

    Called while a plan is compiled, with tensors without storage: one launch of the first level for each number of
    slices that a supertile can have, and the last pass with the scores that the plan puts out, or without.

    Args:
        layout: of the plan; nothing is done where its calls cannot fold.
        values: the operands as declared.
    """
    memory = layout.layout.memory
    if memory is None or not memory.folds or not memory.fold_bytes or binding.output_physical_slots:
        return
    caps, scratch = layout.inner.caps, binding.scratch
    rows, topk, device = int(binding.cache_seqlens_int32.shape[0]), int(caps.topk), scratch.device
    block_k = int(scratch.prefill_block_k) if binding.route == PACKED else _PAGED_INDEX_TILE_BLOCK_K
    supertile = int(layout.layout.supertile_tokens)
    for splits in range(1, most_splits(supertile, int(caps.max_page_table_width) * int(caps.page_size)) + 1):
        run_tiled_topk(
            tile_logits=scratch.get_indexer_contiguous_tile_logits(),
            k_start=None,
            lengths=binding.cache_seqlens_int32,
            topk=topk,
            block_q=_PAGED_INDEX_TILE_BLOCK_Q,
            block_k=block_k,
            output_values=torch.empty((rows * splits, topk), dtype=torch.float32, device=device),
            output_indices=torch.empty((rows * splits, topk), dtype=torch.int32, device=device),
            num_k_tiles=supertile // block_k,
            input_index_offset=0,
            input_extent=SLICE_TOKENS,
            output_index_offset=0,
            zero_row_start=True,
            is_first=True,
            extent_splits=splits,
            output_row_stride=splits,
            launcher_sink=gathered,
        )
    candidates = torch.empty((rows, 2 * topk), dtype=torch.float32, device=device)
    # Of one launch, where a call is several.
    indices, scores = values["output_indices"][:rows], values["output_scores"]
    scores = None if scores is None else scores[:rows]
    run_row_topk(
        row_logits=candidates,
        lengths=binding.cache_seqlens_int32,
        topk=topk,
        output_values=indices.view(torch.float32) if scores is None else scores,
        output_indices=indices,
        output_gather_table=candidates.view(torch.int32),
        write_values=scores is not None,
        launcher_sink=gathered,
    )
