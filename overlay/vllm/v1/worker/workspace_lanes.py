# SPDX-License-Identifier: Apache-2.0
"""How many lanes the workspace has and what each of them holds: one decision, for the worker and the model runner."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.worker.workspace_context import reserve_for_graphs, use_workspace_lane

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig, VllmConfig

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
            DSpark, whose whole lane upstream already keeps apart.
        builders_reserve: what the draft's metadata builders reserve is lane 1's own. A profiling capture shows what
            the draft's graphs take; this is for a given KV-cache size, where nothing is profiled.
    """

    draft_lane: int
    eager_in_lane_0: bool
    builders_reserve: bool


def has_draft_model(speculative_config: SpeculativeConfig | None) -> bool:
    """Whether speculation runs a model of its own; a method that is not known here is taken for one that does."""
    if speculative_config is None:
        return False
    return getattr(speculative_config, "method", None) not in WITHOUT_DRAFT_MODEL


def lane_count(speculative_config: SpeculativeConfig | None, use_v2_model_runner: bool) -> int:
    """Lanes of one ubatch: one for the target, one for a draft model of the V2 runner."""
    return 2 if use_v2_model_runner and has_draft_model(speculative_config) else 1


def lane_plan(vllm_config: VllmConfig, use_v2_model_runner: bool = True) -> LanePlan:
    """The lanes of a configuration; derived from it alone, so equal on all ranks."""
    speculative = vllm_config.speculative_config
    if lane_count(speculative, use_v2_model_runner) == 1:
        return LanePlan(TARGET_LANE, eager_in_lane_0=False, builders_reserve=False)
    assert speculative is not None
    cache_config = getattr(vllm_config, "cache_config", None)
    return LanePlan(
        DRAFT_LANE,
        eager_in_lane_0=not speculative.use_dspark(),
        builders_reserve=bool(getattr(cache_config, "kv_cache_memory_bytes", None)),
    )


@contextmanager
def draft_initialisation(vllm_config: VllmConfig) -> Iterator[None]:
    """The draft's attention is initialised in its lane: metadata builders, and what they reserve."""
    plan = lane_plan(vllm_config)
    with use_workspace_lane(plan.draft_lane), reserve_for_graphs(plan.builders_reserve):
        yield
