# SPDX-License-Identifier: Apache-2.0
"""The worker's side of graph memory: what a profile adds to the memory plan, and what the real captures took.

Two things are facts and are always charged: what stands beside the KV cache once throwaway graphs are gone
(builders, driver memory, modules), and the room that captures need for a while. The estimate of the graphs
themselves is charged unless ``VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0``, as upstream has it. With
``--kv-cache-memory-bytes`` nothing is profiled.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch
import vllm.envs as envs
from vllm.config import CUDAGraphMode, set_current_vllm_config
from vllm.distributed.capture_streams import capture_pass
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.worker.graph_memory import GraphProfile
from vllm.v1.worker.graph_meter import (
    AcceleratorMemory,
    CaptureMeter,
    kv_cache_stands,
    measuring,
)
from vllm.v1.worker.profile_warmup import warm_up_for_profile

if TYPE_CHECKING:
    from vllm.utils.mem_utils import MemoryProfilingResult
    from vllm.v1.worker.gpu_worker import Worker

logger = init_logger(__name__)

_MIB = 1 << 20


def measurable() -> bool:
    """Whether device memory can be read as this module reads it: on CUDA. Elsewhere the plan is upstream's."""
    return bool(current_platform.is_cuda()) and torch.accelerator.is_available()


def _captures_decoder(worker: Worker) -> bool:
    return worker.vllm_config.compilation_config.cudagraph_mode != CUDAGraphMode.NONE


def profile_graphs(worker: Worker, result: MemoryProfilingResult) -> int:
    """Run the runner's throwaway captures and charge what they show to ``result``.

    Every rank that profiles runs the same captures: which ones follows from the configuration. Encoder graphs alone
    may belong to the first pipeline stage only, and a warm-up contains collectives of all ranks: their estimate is
    upstream's, and :func:`profile_without_graphs` measures the rest.

    Returns:
        Bytes that the real capture will take, not in ``result``.
    """
    runner = worker.model_runner
    if not (measurable() and _captures_decoder(worker)):
        return runner.profile_cudagraph_memory()
    with measuring(_meter(worker)) as meter, capture_pass():
        runner.profile_cudagraph_memory()
    return _charged(worker, result, meter.profile())


def profile_without_graphs(worker: Worker, result: MemoryProfilingResult) -> None:
    """Measure builders and warm-up where no decoder graph is profiled, as in eager mode; else do nothing.

    The minimal KV cache is made and dropped once, as a profile with graphs does.
    ``VLLM_NEAPTIDE_PROFILE_WARMUP=0`` leaves it.
    """
    wanted = measurable() and envs.VLLM_NEAPTIDE_PROFILE_WARMUP and not worker.vllm_config.is_mm_encoder_only
    if _captures_decoder(worker) or not wanted:
        return
    with measuring(_meter(worker)) as meter:
        _with_minimal_kv_cache(worker)
    _charged(worker, result, meter.profile())


def capture_graphs(worker: Worker) -> int:
    """Run the real captures.

    Returns:
        Device bytes that they took, with the allocator's cache empty before and after; never negative.
    """
    runner = worker.model_runner
    if not measurable():
        return runner.capture_model()
    memory = AcceleratorMemory()
    before = memory.reading()
    with capture_pass():
        runner.capture_model()
    return max(0, before.free_bytes - memory.reading().free_bytes)


def log_graph_memory(worker: Worker, actual_bytes: int) -> None:
    """One line after the real captures: estimate against actual, and what else the profile charged."""
    line = comparison(worker, actual_bytes)
    if line is not None:
        logger.info(line)


def comparison(worker: Worker, actual_bytes: int) -> str | None:
    """The line of :func:`log_graph_memory`; None if nothing was profiled."""
    profile: GraphProfile | None = getattr(worker, "graph_profile", None)
    estimate = getattr(worker, "cudagraph_memory_estimate", 0)
    said = []
    if estimate > 0 or (profile is not None and actual_bytes > 0):
        difference = abs(actual_bytes - estimate)
        said.append(
            f"CUDA graph pool memory: {_mib(actual_bytes)} MiB (actual), {_mib(estimate)} MiB (estimated), "
            f"difference: {_mib(difference)} MiB ({100 * difference / max(actual_bytes, 1):.1f}%)."
        )
    if profile is not None:
        said.append(
            f"Charged beside the graphs: {_mib(profile.builder_bytes)} MiB of builder and runner buffers, "
            f"{_mib(profile.residue_bytes)} MiB that warm-up and throwaway captures left; captures needed "
            f"{_mib(profile.transient_bytes)} MiB for a while."
        )
    return " ".join(said) or None


def _meter(worker: Worker) -> CaptureMeter:
    wanted = envs.VLLM_NEAPTIDE_PROFILE_WARMUP
    return CaptureMeter(AcceleratorMemory(), partial(warm_up_for_profile, worker) if wanted else None)


def _charged(worker: Worker, result: MemoryProfilingResult, profile: GraphProfile) -> int:
    """Add the facts of a profile to upstream's result; the estimate of the graphs is upstream's to add."""
    result.total_consumed += profile.standing_bytes
    result.transient_peak_headroom = max(result.transient_peak_headroom, profile.transient_bytes)
    result.non_kv_cache_memory = result.total_consumed + result.transient_peak_headroom
    worker.graph_profile = profile
    return profile.graph_bytes


def _with_minimal_kv_cache(worker: Worker) -> None:
    """What upstream does around a throwaway capture, without the capture."""
    runner = worker.model_runner
    if worker.use_v2_model_runner:
        from vllm.v1.worker.gpu import cudagraph_utils

        make = partial(cudagraph_utils._init_minimal_kv_cache_for_profiling, runner)
        drop = partial(cudagraph_utils._teardown_profiling_state, runner)
        quiet = runner.eplb.suppress()
    else:
        make, drop = runner._init_minimal_kv_cache_for_profiling, runner._cleanup_profiling_kv_cache
        quiet = nullcontext()
    with quiet:
        with set_current_vllm_config(worker.vllm_config):
            make()
        try:
            kv_cache_stands(runner)
        finally:
            drop()


def _mib(amount_bytes: int) -> str:
    return f"{amount_bytes / _MIB:.1f}"
