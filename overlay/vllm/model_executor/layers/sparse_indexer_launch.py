# SPDX-License-Identifier: Apache-2.0
"""The launch size of an indexer's prefill: from the configuration, for the plan, and in the allocator's cache.

What the releases of vLLM share; ``sparse_indexer_prefill`` and ``sparse_indexer_prefill_keys`` hold what differs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm import envs
from vllm.model_executor.layers.sparse_indexer_layout import LogitsLayout
from vllm.model_executor.layers.sparse_indexer_logits import (
    PrefillLaunch,
    budget_bytes,
    local_columns,
    prefill_launch,
)
from vllm.model_executor.layers.sparse_indexer_plan import Chunk, plan_chunks
from vllm.neaptide_switches import FIXED_WIDTH, UPSTREAM
from vllm.platforms import current_platform


def covered_policy() -> str:
    """The policy that holds on this platform: upstream's where its kernels are not DeepGEMM's."""
    return envs.VLLM_NEAPTIDE_INDEXER_LOGITS_POLICY if current_platform.is_cuda() else UPSTREAM


def configured_launch(builder: Any, layout: LogitsLayout) -> PrefillLaunch | None:
    """The launch size that an indexer metadata builder's configuration gives; None for upstream's.

    Args:
        layout: of prefill.

    Raises:
        ValueError: a budget that is too small or not positive.
    """
    policy = covered_policy()
    # vllm-project/vllm#58068 leaves decode context parallelism at upstream's sizes.
    if policy == UPSTREAM or (policy == FIXED_WIDTH and builder.dcp_world_size > 1):
        return None
    config = builder.vllm_config
    columns = config.model_config.max_model_len // builder.compress_ratio
    return prefill_launch(
        policy,
        budget_bytes(envs.VLLM_SPARSE_INDEXER_MAX_LOGITS_MB),
        config.scheduler_config.max_num_batched_tokens,
        local_columns(columns, builder.dcp_world_size, _interleave(builder)),
        int(getattr(getattr(config.model_config, "hf_text_config", None), "index_n_heads", 0) or 0),
        layout,
    )


def _interleave(builder: Any) -> int:
    """Columns that go to a decode-context-parallel rank in turn; before vLLM 0.33 columns are tokens."""
    compressed = getattr(builder, "compressed_cp_interleave_size", None)
    return builder.cp_kv_cache_interleave_size if compressed is None else compressed


def plan_builder_chunks(
    builder: Any,
    upstream: Callable[..., list[Chunk]],
    seq_lens: torch.Tensor,
    query_lens: torch.Tensor,
    workspace_rows: int,
    max_logits_bytes: int,
    request_offset: int,
) -> list[Chunk]:
    """A builder's chunks: planned by what is allocated, or by ``upstream`` where no launch size is set.

    Args:
        upstream: upstream's own plan.
        seq_lens, query_lens: keys and query rows of each prefill request, int32 on the CPU.
        max_logits_bytes: upstream's budget, for its plan.
        request_offset: number of the first of these requests in the batch.
    """
    launch = getattr(builder, "prefill_launch", None)
    if launch is None:
        return upstream(seq_lens, query_lens, workspace_rows, max_logits_bytes, request_offset=request_offset)
    keys = seq_lens.tolist()
    columns = [local_columns(n, builder.dcp_world_size, _interleave(builder)) for n in keys]
    planned = plan_chunks(query_lens.tolist(), keys, columns, workspace_rows, launch)
    return [(slice(r.start + request_offset, r.stop + request_offset), rows) for r, rows in planned]


def keep_blocks_cached(launch: PrefillLaunch, device: torch.device) -> None:
    """Have free blocks of the canonical size in the allocator's cache.

    A launch of fewer rows is a few column steps smaller. Were it the first, a block of its size would be
    cached, too small for the next full chunk. Where the blocks are cached already this takes and returns them.
    """
    if launch.fixed_columns or device.type != "cuda":
        return
    blocks = [torch.empty(size, dtype=torch.uint8, device=device) for size in launch.allocations]
    del blocks
