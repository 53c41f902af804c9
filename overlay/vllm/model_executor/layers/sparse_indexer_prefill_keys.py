# SPDX-License-Identifier: Apache-2.0
"""Prefill of the sparse indexer at constant bytes where DeepGEMM's wrapper takes no width (before vLLM 0.33).

There a row of logits has a column for every key it is given, so the width is that of the key tensor. Keys lie in a
workspace that is longer than a launch needs: giving the kernel more of it widens the rows. A row is still scored
against its own keys alone, as it is when requests are packed, and what lies in the other columns is not read.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import add
from typing import Any

import torch
from vllm import envs
from vllm.logger import init_logger
from vllm.model_executor.layers.sparse_indexer_blocks import keep_blocks_cached
from vllm.model_executor.layers.sparse_indexer_logits import (
    PrefillLaunch,
    budget_bytes,
    gathered_keys_layout,
    local_columns,
    prefill_launch,
    reserved_logits_bytes,
)
from vllm.model_executor.layers.sparse_indexer_plan import Chunk, plan_chunks
from vllm.neaptide_switches import UPSTREAM
from vllm.platforms import current_platform

logger = init_logger(__name__)


def covered_policy() -> str:
    """The policy that holds on this platform: upstream's where its kernels are not DeepGEMM's."""
    return envs.VLLM_NEAPTIDE_INDEXER_LOGITS_POLICY if current_platform.is_cuda() else UPSTREAM


def builder_launch(builder: Any) -> PrefillLaunch | None:
    """The launch size of an indexer metadata builder, once, at the end of its construction; None for upstream's.

    Raises:
        ValueError: a budget that is too small or not positive.
    """
    if not current_platform.is_cuda():
        logger.warning_once("Sparse indexer logits are allocated as upstream does: constant bytes needs CUDA.")
        return None
    config = builder.vllm_config
    columns = config.model_config.max_model_len // getattr(builder, "compress_ratio", 1)
    return prefill_launch(
        covered_policy(),
        budget_bytes(envs.VLLM_SPARSE_INDEXER_MAX_LOGITS_MB),
        config.scheduler_config.max_num_batched_tokens,
        local_columns(columns, builder.dcp_world_size, builder.cp_kv_cache_interleave_size),
        int(getattr(getattr(config.model_config, "hf_text_config", None), "index_n_heads", 0) or 0),
        gathered_keys_layout(),
    )


def plan_builder_chunks(
    builder: Any,
    upstream: Callable[..., list[Chunk]],
    seq_lens: torch.Tensor,
    query_lens: torch.Tensor,
    workspace_rows: int,
    max_logits_bytes: int,
    request_offset: int,
) -> list[Chunk]:
    """The builder's chunks: planned by what is allocated, or by ``upstream`` where no launch size is set.

    Args:
        seq_lens, query_lens: keys and query rows of each prefill request, int32 on the CPU.
        max_logits_bytes: upstream's budget, for its own plan.
        request_offset: number of the first of these requests in the batch.
    """
    launch = getattr(builder, "prefill_launch", None)
    if launch is None:
        return upstream(seq_lens, query_lens, workspace_rows, max_logits_bytes, request_offset=request_offset)
    keys = seq_lens.tolist()
    columns = [local_columns(n, builder.dcp_world_size, builder.cp_kv_cache_interleave_size) for n in keys]
    planned = plan_chunks(query_lens.tolist(), keys, columns, workspace_rows, launch, combine=add)
    return [(slice(r.start + request_offset, r.stop + request_offset), rows) for r, rows in planned]


def widened_keys(
    keys: tuple[torch.Tensor, torch.Tensor], rows: int, columns: int, launch: PrefillLaunch | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As many keys of the workspace as make a launch of ``rows`` allocate the canonical size.

    Args:
        keys: the whole workspace: values [capacity, bytes] and scales [capacity, bytes].
        columns: keys that the launch needs.
        launch: None for just those.

    Returns:
        Leading rows of both, at least ``columns``.
    """
    width = columns
    if launch is not None:
        width = min(launch.width(rows, columns), keys[0].shape[0])
        keep_blocks_cached(launch, keys[0].device)
    return keys[0][:width], keys[1][:width]


def reserved_bytes(budget: int, columns: int, heads: int, config: Any, dcp_world_size: int, interleave: int) -> int:
    """Bytes that the profiling run reserves: a prefill launch, or a decode step, which is not tiled here.

    Args and errors as for :func:`reserved_logits_bytes`.
    """
    return reserved_logits_bytes(
        covered_policy(), budget, budget, columns, heads, config, sm100=False, local=(dcp_world_size, interleave),
        layout=gathered_keys_layout(), tiled=False,
    )  # fmt: skip
