# SPDX-License-Identifier: Apache-2.0
"""Prefill of the sparse indexer at constant bytes where DeepGEMM's wrapper takes no width (before vLLM 0.33).

There a row of logits has a column for every key it is given, so the width is that of the key tensor. Keys lie in a
workspace that is longer than a launch needs: giving the kernel more of it widens the rows. A row is still scored
against its own keys alone, as it is when requests are packed, and what lies in the other columns is not read.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.sparse_indexer_launch import (
    configured_launch,
    covered_policy,
    keep_blocks_cached,
)
from vllm.model_executor.layers.sparse_indexer_layout import gathered_keys_layout
from vllm.model_executor.layers.sparse_indexer_logits import PrefillLaunch, reserved_logits_bytes
from vllm.platforms import current_platform

logger = init_logger(__name__)


def builder_launch(builder: Any) -> PrefillLaunch | None:
    """The launch size of an indexer metadata builder, once, at the end of its construction; None for upstream's.

    Raises:
        ValueError: a budget that is too small or not positive.
    """
    if not current_platform.is_cuda():
        logger.warning_once("Sparse indexer logits are allocated as upstream does: constant bytes needs CUDA.")
        return None
    return configured_launch(builder, gathered_keys_layout())


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
