# SPDX-License-Identifier: Apache-2.0
"""Bytes of the sparse indexer's logits, as DeepGEMM lays them out.

One source for the profiling run, which reserves them, and for the run-time path, which decides
whether an FP32 copy is made. Sizes are pure functions of their arguments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LogitsLayout:
    """How DeepGEMM stores paged MQA logits on one architecture.

    Attributes:
        column_step: columns per row are rounded up to a multiple of this.
        element_bytes: bytes of one logit as the kernel writes it.
    """

    column_step: int
    element_bytes: int


# SM100 writes BF16, in whole KV splits of 384 columns at row strides of 1024 bytes (512 columns).
SM100_LAYOUT = LogitsLayout(column_step=math.lcm(384, 512), element_bytes=2)
# SM90 and SM120 write FP32 in whole KV splits of 256 columns, which are 1024 bytes.
FP32_LAYOUT = LogitsLayout(column_step=256, element_bytes=4)
FP32_BYTES = 4


def reads_fp32_logits(topk_backend: str, dcp_world_size: int) -> bool:
    """Whether the decode top-k of the shared indexer needs FP32 logits.

    ``deep_select`` reads BF16; every other backend, and the merge across decode-context-parallel
    ranks, reads FP32.
    """
    return topk_backend != "deep_select" or dcp_world_size != 1


def decode_logits_bytes(rows: int, columns: int, *, sm100: bool, fp32_copy: bool) -> int:
    """Bytes live at once for the logits of one decode step.

    Args:
        rows: query rows, one for each token that is scored.
        columns: keys a row may have: ``max_model_len``, or its number of pools.
        sm100: whether DeepGEMM's SM100 kernels run (BF16 logits).
        fp32_copy: whether an FP32 copy of BF16 logits is made; no effect off SM100.

    Returns:
        ``rows * round_up(columns, step) * bytes``, with 6 bytes an element for BF16 and its
        copy, 2 for BF16 alone, 4 for FP32 (the accounting of vllm-project/vllm#62860).
    """
    layout = SM100_LAYOUT if sm100 else FP32_LAYOUT
    width = -(-columns // layout.column_step) * layout.column_step
    copied = FP32_BYTES if sm100 and fp32_copy else 0
    return rows * width * (layout.element_bytes + copied)


def max_decode_rows(max_num_seqs: int, max_num_batched_tokens: int, num_speculative_tokens: int) -> int:
    """Most rows of a decode step: every sequence padded to its verification length."""
    return min(max_num_seqs, max_num_batched_tokens) * (1 + num_speculative_tokens)


def profile_logits_bytes(prefill_budget_bytes: int, columns: int, config: Any, *, sm100: bool, fp32_copy: bool) -> int:
    """Bytes that the profiling run reserves for logits: prefill's budget or decode's worst case.

    Args:
        prefill_budget_bytes: what the prefill planner lets one launch allocate.
        columns, sm100, fp32_copy: as for :func:`decode_logits_bytes`.
        config: the current ``VllmConfig``. None, or one without a scheduler (dummy runs outside
            of profiling have no need of the worst case), leaves the prefill budget.
    """
    scheduler = getattr(config, "scheduler_config", None)
    if scheduler is None:
        return prefill_budget_bytes
    speculative = getattr(config, "speculative_config", None)
    rows = max_decode_rows(
        scheduler.max_num_seqs,
        scheduler.max_num_batched_tokens,
        speculative.num_speculative_tokens if speculative is not None else 0,
    )
    decode = decode_logits_bytes(rows, columns, sm100=sm100, fp32_copy=fp32_copy)
    return max(prefill_budget_bytes, decode)
