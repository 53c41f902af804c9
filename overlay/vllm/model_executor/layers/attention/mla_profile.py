# SPDX-License-Identifier: Apache-2.0
"""Makes the profile run allocate what sparse MLA allocates when a whole batch takes the MQA path.

Called where a layer without attention metadata returns early. It allocates all that the fullest moment of the real path
has alive, and frees it: the profiled peak includes it, and nothing stays. Nothing is computed or sent.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.mla_kernel_memory import (
    Backend,
    kernel_memory,
)
from vllm.model_executor.layers.attention.mla_transients import (
    A2A,
    AG_RS,
    DIRECT,
    NCCL,
    NO_GATHER,
    Moment,
    MqaCall,
    Route,
    largest,
)
from vllm.v1.attention.ops.cp_common import DirectCPWorkspace
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

logger = init_logger(__name__)


def reserve_mqa_transients(layer: Any, q: torch.Tensor, absorbed: bool = False, replicated: bool = False) -> None:
    """Allocate and free the transients of one sparse MLA layer for a batch of ``q.shape[0]`` rows.

    Args:
        layer: an ``MLAAttention``.
        q: the layer's query or absorbed query [rows, heads, width], on the device that is profiled.
        absorbed: the caller holds the absorbed and packed queries itself.
        replicated: the batch's queries of all DCP ranks are already there.

    Does nothing for dense MLA (its MQA rows are decode rows only), for a batch that a graph capture may have, and
    under prefill with decode context parallelism, whose prefill rows take another path.
    """
    rows = q.shape[0]
    if layer.impl.is_sparse is not True or not _profiles(layer._vllm_config, rows):
        return
    world = layer.impl.dcp_world_size
    if layer.use_pcp and world > 1:
        logger.warning_once("Sparse MLA transients under prefill and decode context parallelism are not profiled.")
        return
    moment = mqa_moment(layer, rows, q.element_size(), absorbed=absorbed, replicated=replicated)
    held = [torch.empty(size, dtype=torch.uint8, device=q.device) for size in moment.tensors.values() if size]
    logger.debug_once(
        "Sparse MLA transients of %d rows: %d bytes in %s (%s).",
        rows,
        moment.total,
        moment.name,
        ", ".join(f"{name} {size}" for name, size in moment.tensors.items()),
    )
    del held


def _profiles(vllm_config: Any, rows: int) -> bool:
    """Whether only the profile run has so many rows without metadata: a throwaway capture must not be charged."""
    captured = vllm_config.compilation_config.max_cudagraph_capture_size or 0
    return rows > captured or rows >= vllm_config.scheduler_config.max_num_batched_tokens


def mqa_moment(layer: Any, rows: int, element_bytes: int, *, absorbed: bool, replicated: bool) -> Moment:
    """The fullest moment of the layer's MQA path over up to ``rows`` rows.

    An implementation with scratch beyond the backend's known allocations says so by ``mqa_scratch(rows)``: the bytes,
    and the most rows of a call that has any. The whole batch, without it, may still be the fuller.
    """
    call = MqaCall(
        rows=rows,
        heads=layer.num_heads,
        latent=layer.kv_lora_rank,
        rope=layer.qk_rope_head_dim,
        element_bytes=element_bytes,
        query_bytes=1 if _quantises_query(layer) else element_bytes,
        world=layer.impl.dcp_world_size,
        replicated=replicated,
        absorbed=absorbed,
    )
    route, backend = dcp_route(layer, rows, replicated), _backend(layer)
    whole = largest(call, route, kernel_memory(call, backend))
    ask = getattr(layer.impl, "mqa_scratch", None)
    scratch, most_rows = (0, 0) if ask is None else ask(rows)
    if not scratch:
        return whole
    part = replace(call, rows=min(rows, most_rows))
    split = largest(part, route, kernel_memory(part, replace(backend, scratch=scratch)))
    return max(whole, split, key=lambda moment: moment.total)


def _quantises_query(layer: Any) -> bool:
    """The condition of ``MLAAttention.forward_impl``."""
    return is_quantized_kv_cache(layer.kv_cache_dtype) and layer.impl.supports_quant_query_input is True


def _backend(layer: Any) -> Backend:
    impl = layer.impl
    buffer = getattr(impl, "topk_indices_buffer", None)
    name = layer.attn_backend.get_name()
    return Backend(
        name=name,
        topk=0 if buffer is None else buffer.shape[-1],
        cache_dtype=layer.kv_cache_dtype,
        mixed=name == "FLASHMLA_SPARSE" and _one_fp8_batch(layer),
        decode_heads=getattr(impl, "fp8_decode_padded_heads", 0),
    )


def _one_fp8_batch(layer: Any) -> bool:
    """Whether FLASHMLA_SPARSE runs prefill and decode as one FP8 batch: the choice of its metadata builder."""
    from vllm.v1.attention.backends.mla.flashmla_sparse import MIN_HEADS_FOR_BF16_PREFILL

    return layer.num_heads < MIN_HEADS_FOR_BF16_PREFILL and layer.hisparse_cache is None


def dcp_route(layer: Any, rows: int, replicated: bool) -> Route:
    """The route that ``MLADCPManager`` takes for ``rows`` rows: direct up to the workspace's rows, NCCL above."""
    manager = layer.dcp_manager
    if manager is None:
        return Route()
    gather = NO_GATHER if replicated else DIRECT if rows <= direct_rows(manager.query_gather) else NCCL
    combine = A2A if manager.use_a2a else AG_RS
    return Route(gather, DIRECT if rows <= direct_rows(manager.combine) else combine)


def direct_rows(collective: Any) -> int:
    """Rows that a collective of the manager takes through symmetric memory; 0 if it has none."""
    workspaces = [bound for bound in getattr(collective, "args", ()) if isinstance(bound, DirectCPWorkspace)]
    return workspaces[0].max_num_tokens if workspaces else 0
