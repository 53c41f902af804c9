# SPDX-License-Identifier: Apache-2.0
"""Prefill of the sparse indexer at constant bytes: which rows a launch scores, and how wide it allocates.

A caching allocator serves a request from a free block only if the block is large enough, so launches that
grow with the context leave a segment of each size behind (vllm-project/vllm#55569). Here every launch
asks for at most one canonical size and a full chunk for exactly that size; the kernel computes the same scores,
only the row stride of what it writes them to is wider, and the result is narrowed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.sparse_indexer_launch import (
    configured_launch,
    covered_policy,
    keep_blocks_cached,
)
from vllm.model_executor.layers.sparse_indexer_layout import logits_layout
from vllm.model_executor.layers.sparse_indexer_logits import PrefillLaunch, local_columns
from vllm.neaptide_switches import CONSTANT_BYTES
from vllm.platforms import current_platform
from vllm.utils.deep_gemm import mqa_logits_use_mx_scales

logger = init_logger(__name__)


def builder_launch(builder: Any) -> PrefillLaunch | None:
    """The launch size of an indexer metadata builder; None where upstream's plan is kept.

    Called once, at the end of the builder's construction. A builder with a plan of its own (CPU, ROCm, the
    sparse logits of DeepSeek V4.1), a platform whose kernels allocate inside the op, and prefill with decode
    context parallelism are not covered; the log says so once.

    Raises:
        ValueError: a budget that is too small or not positive.
    """
    if _keeps_upstreams_plan(builder):
        logger.warning_once(
            "Sparse indexer prefill logits are allocated as upstream does: %s is not covered by constant bytes.",
            type(builder).__name__,
        )
        return None
    layout = logits_layout(sm100=mqa_logits_use_mx_scales(), fp32_copy=True)
    return configured_launch(builder, layout)


def _keeps_upstreams_plan(builder: Any) -> bool:
    from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerMetadataBuilder as Base

    own = ("_split_indexer_prefill_chunks", "_prefill_split_seq_lens")
    return (
        any(getattr(type(builder), name) is not getattr(Base, name) for name in own)
        or not current_platform.is_cuda()
        or (builder.use_pcp and builder.dcp_world_size > 1)
    )


def chunk_columns(columns: int, world_size: int, interleave: int) -> int:
    """Columns that the logits of a chunk need: what a decode-context-parallel rank holds at most, alike on all of them.

    All ``columns``, as upstream, under another policy than ``constant_bytes``.
    """
    return local_columns(columns, world_size, interleave) if covered_policy() == CONSTANT_BYTES else columns


def prefill_logits(
    score: Callable[..., torch.Tensor],
    upcast: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    inputs: tuple[Any, ...],
    max_seqlen_k: int,
    row_ends: torch.Tensor,
    launch: PrefillLaunch | None,
) -> torch.Tensor:
    """Logits of one prefill launch, allocated at the launch's size.

    Args:
        score: DeepGEMM's ``fp8_fp4_mqa_logits``, called with ``inputs`` and a width.
        upcast: makes the FP32 copy of BF16 logits; it keeps the row stride, so narrowing comes after it.
        inputs: ``((q, q_scale), (k, k_scale), weights, starts, ends)``; q of shape [rows, heads, head_dim].
        max_seqlen_k: most columns that a row needs.
        row_ends: columns of each row, int32 [rows].
        launch: None for upstream's size.

    Returns:
        FP32 [rows, max_seqlen_k], a view where the launch is wider.
    """
    width = max_seqlen_k
    if launch is not None:
        width = launch.width(inputs[0][0].shape[0], max_seqlen_k)
        keep_blocks_cached(launch, row_ends.device)
    logits = upcast(score(*inputs, width), row_ends)
    return logits if width == max_seqlen_k else logits[:, :max_seqlen_k]
