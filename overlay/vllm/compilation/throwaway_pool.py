# SPDX-License-Identifier: Apache-2.0
"""A graph pool for a profiling capture, which no wrapper keeps afterwards.

Graphs that are captured into the pool of the serving graphs and then dropped leave that pool without a user; and a
wrapper that keeps the throwaway pool would later capture apart from the others, whose memory it could share.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.platforms import current_platform


@contextmanager
def throwaway_graph_pool() -> Iterator[None]:
    """A scope in which the platform's global graph pool is a new one, for graphs that are dropped inside."""
    platform = type(current_platform)
    real = platform._global_graph_pool
    platform._global_graph_pool = pool = current_platform.graph_pool_handle()
    try:
        yield
    finally:
        platform._global_graph_pool = real
        leave_throwaway_pool(pool, current_platform)


def leave_throwaway_pool(pool: Any, platform: Any) -> None:
    """Give every wrapper on ``pool`` the platform's global pool, which is made if there is none yet.

    Called once the global pool is the real one again; the wrappers' graphs are gone.
    """
    for wrapper in (*CUDAGraphWrapper._all_instances, *BreakableCUDAGraphWrapper._all_instances):
        if wrapper.graph_pool == pool:
            wrapper.graph_pool = platform.get_global_graph_pool()
