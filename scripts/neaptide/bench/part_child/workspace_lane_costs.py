"""What a second lane costs for a draft with a sparse indexer: all of its scratch, or what its graphs hold."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from workspace_managers import commit, held_bytes, new_manager

HEAD_DIM = 128
RADIX_BYTES = 1 << 20


def prefill_specs(max_model_len: int, factor: int) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    """What the profiling run of the shared indexer op asks for, by vLLM's own functions: keys, scales, top-k scratch.

    ``factor`` is vLLM's ``sparse_mla_prefill_workspace_factor``.
    """
    from vllm.model_executor.layers import sparse_attn_indexer as op
    from vllm.v1.attention.backends.mla.indexer import get_max_prefill_buffer_size

    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=max_model_len),
        attention_config=SimpleNamespace(sparse_mla_prefill_workspace_factor=factor),
    )
    rows = get_max_prefill_buffer_size(config)
    values, scales = op._gather_workspace_shapes(rows, HEAD_DIM, torch.float8_e4m3fn, False)
    return values, scales, ((RADIX_BYTES,), torch.uint8)


def run_lanes(case: dict[str, Any], spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Bytes of both lanes after profiling passes of target and draft and the capture of the draft's decode graph."""
    from vllm.v1.worker import workspace

    prefill = prefill_specs(case["max_model_len"], case["factor"])
    decode = (((RADIX_BYTES,), torch.uint8),)
    lanes = {"num_lanes": 2} | ({"eager_in_lane_0": True} if case["graphs_only"] else {})
    manager = new_manager(**lanes)
    start = held_bytes()
    manager.get_simultaneous(*prefill)
    with workspace.use_workspace_lane(1):
        manager.get_simultaneous(*prefill)
        commit(manager)
        with _warm_up_of_a_capture(case["graphs_only"]):
            manager.get_simultaneous(*decode)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            manager.get_simultaneous(*decode)[0].zero_()
        manager.get_simultaneous(*prefill)
    sizes = [0 if storage is None else storage.numel() for storage in manager._current_workspaces]
    return [{"lane_0_bytes": sizes[0], "lane_1_bytes": sizes[1], "reserved_end_bytes": held_bytes() - start}]


def _warm_up_of_a_capture(graphs_only: bool) -> Any:
    """What ``graph_capture`` of a patched vLLM enters beside upstream's groups, of which there are none here."""
    if not graphs_only:
        return nullcontext()
    from vllm.distributed.capture_scopes import captured_by_others

    return captured_by_others(SimpleNamespace(stream=torch.cuda.current_stream()))
