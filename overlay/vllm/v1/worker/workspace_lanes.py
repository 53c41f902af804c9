# SPDX-License-Identifier: Apache-2.0
"""How many lanes the workspace has and what each of them holds: one decision, for the worker and the model runner."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import vllm.envs as envs
from vllm.config import CUDAGraphMode
from vllm.v1.worker.workspace_context import capturing_graphs, use_workspace_lane

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig, VllmConfig
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

TARGET_LANE = 0
DRAFT_LANE = 1
# Methods of speculation that run no model of their own.
WITHOUT_DRAFT_MODEL = frozenset({"ngram", "ngram_gpu", "suffix", "extract_hidden_states"})


@dataclass(frozen=True)
class LanePlan:
    """What the lanes of one ubatch hold.

    Attributes:
        draft_lane: the lane that the draft loads, initialises, captures and runs in.
        eager_in_lane_0: the draft's eager scratch comes from lane 0, and lane 1 holds what graphs retain. Not for
            DSpark, whose whole lane upstream already keeps apart, and not where the size of the KV cache is given or
            may come from a startup plan: then no throwaway capture shows what the draft's graphs take before the
            first of them holds the lane.
    """

    draft_lane: int
    eager_in_lane_0: bool


def has_draft_model(speculative_config: SpeculativeConfig | None) -> bool:
    """Whether speculation runs a model of its own; a method that is not known here is taken for one that does."""
    if speculative_config is None:
        return False
    return getattr(speculative_config, "method", None) not in WITHOUT_DRAFT_MODEL


def lane_count(speculative_config: SpeculativeConfig | None, use_v2_model_runner: bool) -> int:
    """Lanes of one ubatch: one for the target, one for a draft model of the V2 runner."""
    return 2 if use_v2_model_runner and has_draft_model(speculative_config) else 1


def lane_plan(vllm_config: VllmConfig, use_v2_model_runner: bool = True) -> LanePlan:
    """The lanes of a configuration; derived from it and a switch that ranks compare, so equal on all of them."""
    speculative = vllm_config.speculative_config
    if lane_count(speculative, use_v2_model_runner) == 1:
        return LanePlan(TARGET_LANE, eager_in_lane_0=False)
    assert speculative is not None
    profiled = not (vllm_config.cache_config.kv_cache_memory_bytes or envs.VLLM_ENABLE_STARTUP_PLAN)
    return LanePlan(DRAFT_LANE, eager_in_lane_0=profiled and not speculative.use_dspark())


def draft_initialisation(vllm_config: VllmConfig) -> AbstractContextManager[None]:
    """The draft's attention is initialised in its lane: metadata builders, and what they reserve."""
    return use_workspace_lane(lane_plan(vllm_config).draft_lane)


def captures_of(manager: CudaGraphManager, mode: CUDAGraphMode) -> AbstractContextManager[None]:
    """Around the captures of one mode: whether the graphs leave attention out, as breakable and split ones do."""
    breaks = mode == CUDAGraphMode.PIECEWISE and (
        manager.use_breakable_cg or manager.compilation_config.splitting_ops_contain_attention()
    )
    return capturing_graphs(piecewise=breaks)
