# SPDX-License-Identifier: Apache-2.0
"""A startup plan applies on every rank or on none.

``VLLM_ENABLE_STARTUP_PLAN=1`` lets each rank decide by the file and the free memory that it finds. A rank that applies
its plan leaves the profile after one forward pass; one that does not goes on to collectives that nobody else enters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import vllm.envs as envs
from vllm.distributed import get_world_group
from vllm.logger import init_logger
from vllm.v1.worker.startup_plan import maybe_apply_startup_plan

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker

logger = init_logger(__name__)


def apply_startup_plan(worker: Worker) -> None:
    """Upstream's decision, taken back where another rank of the world decided otherwise.

    Collective over the world group, on the CPU, where plans are enabled (which ranks have compared). Workers that join
    a running engine decide alone, since the running ones do not take part.
    """
    config = worker.cache_config
    given = config.kv_cache_memory_bytes
    maybe_apply_startup_plan(worker)
    if not envs.VLLM_ENABLE_STARTUP_PLAN or envs.VLLM_ELASTIC_EP_SCALE_UP_LAUNCH:
        return
    world = get_world_group()
    profiles = [config.kv_cache_memory_bytes is None]
    if world.world_size > 1:
        everyone: list[bool] = [False] * world.world_size
        torch.distributed.all_gather_object(everyone, profiles[0], group=world.cpu_group)
        profiles = everyone
    if any(profiles) and not all(profiles):
        config.kv_cache_memory_bytes = given
        logger.info("Startup plan not applied: %d of %d ranks have none that fits.", sum(profiles), len(profiles))
