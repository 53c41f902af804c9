# SPDX-License-Identifier: Apache-2.0
"""The caching allocator's blocks for the sparse indexer's prefill logits."""

from __future__ import annotations

import torch
from vllm.model_executor.layers.sparse_indexer_logits import PrefillLaunch


def keep_blocks_cached(launch: PrefillLaunch, device: torch.device) -> None:
    """Have free blocks of the canonical size in the allocator's cache.

    A launch of fewer rows is a few column steps smaller. Were it the first, a block of its size would be
    cached, too small for the next full chunk. Where the blocks are cached already this takes and returns them.
    """
    if launch.fixed_columns or device.type != "cuda":
        return
    blocks = [torch.empty(size, dtype=torch.uint8, device=device) for size in launch.allocations]
    del blocks
