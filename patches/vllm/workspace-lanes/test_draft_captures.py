"""Captures of the draft: what of them lies in its lane, and in which lane its attention is made."""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from draft_lanes import Stop, configuration, context, shared_lanes
from workspace_device import MIB


@pytest.mark.parametrize("piecewise", [True, False])
def test_scratch_that_a_piecewise_graph_leaves_out_is_eager(monkeypatch: pytest.MonkeyPatch, piecewise: bool) -> None:
    """In warm-up and capture of the draft's graph; its other ops, and every op of a FULL graph, have lane 1."""
    rig = shared_lanes(monkeypatch)
    attention = context().eager_break(lambda: rig.get(8 * MIB, lane=1))
    with rig.graph_capture(), context().capturing_graphs(piecewise=piecewise):
        rig.get(MIB, lane=1)
        attention()
    own = MIB if piecewise else 8 * MIB
    assert (rig.slot(0).high_water_bytes, rig.slot(1).high_water_bytes) == (8 * MIB, own)
    assert not context().in_eager_break()


def test_a_break_that_is_captured_all_the_same_is_the_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """An op that turns out to be in the graph never gets an address of lane 0, whatever it was taken for."""
    rig = shared_lanes(monkeypatch)
    rig.get(8 * MIB)
    attention = context().eager_break(lambda: rig.get(4 * MIB, lane=1))
    with rig.graph_capture(), context().capturing_graphs(piecewise=True):
        attention()
        with rig.stream_capture(), pytest.raises(AssertionError, match="inside a capture"):
            attention()


def test_upstream_marks_the_ops_that_it_breaks_at() -> None:
    """Its decorator, on an op that raises, too; outside a capture of PIECEWISE graphs nothing is marked."""
    decorate = importlib.import_module("vllm.compilation.breakable_cudagraph").eager_break_during_capture
    seen: list[bool] = []

    def op(fails: bool) -> int:
        seen.append(context().in_eager_break())
        if fails:
            raise Stop
        return 7

    marked = decorate(op)
    assert marked(False) == 7
    with context().capturing_graphs(piecewise=True):
        assert marked(False) == 7
        with pytest.raises(Stop):
            marked(True)
        assert not context().in_eager_break()
        with context().capturing_graphs(piecewise=False):
            marked(False)
    assert seen == [False, True, True, False]
    assert marked.__name__ == "op"


def test_a_marked_op_can_be_traced() -> None:
    """Some models call such an op where they are compiled as one graph."""
    decorate = importlib.import_module("vllm.compilation.breakable_cudagraph").eager_break_during_capture
    marked = decorate(lambda tensor: tensor.add_(1))

    @torch.compile(fullgraph=True, backend="eager")
    def model(tensor: torch.Tensor) -> torch.Tensor:
        doubled = tensor * 2
        marked(doubled)
        return doubled

    assert model(torch.ones(2)).tolist() == [3, 3]


class Descriptor(SimpleNamespace):
    """Of one graph, as a manager of the V2 runner reads it."""

    def __hash__(self) -> int:
        return id(self)


@pytest.mark.parametrize(("breakable", "split"), [(True, False), (False, True), (False, False)])
def test_the_v2_runner_says_which_graphs_it_captures(
    monkeypatch: pytest.MonkeyPatch, breakable: bool, split: bool
) -> None:
    """Upstream's loop over modes: what an op at which PIECEWISE graphs break sees, in warm-up and capture.

    A compiled model that is not split at attention has it in its PIECEWISE graphs.
    """
    module = importlib.import_module("vllm.v1.worker.gpu.cudagraph_utils")
    modes = module.CUDAGraphMode
    decorate = importlib.import_module("vllm.compilation.breakable_cudagraph").eager_break_during_capture
    seen: list[tuple[str, bool]] = []
    attention = decorate(lambda desc: seen.append((desc.cg_mode.name, context().in_eager_break())))
    manager = object.__new__(module.CudaGraphManager)
    manager.device, manager.ubatch_runner, manager.use_breakable_cg, manager.graphs = "cpu", None, breakable, {}
    manager.vllm_config, manager.pool = SimpleNamespace(), None
    manager.compilation_config = SimpleNamespace(splitting_ops_contain_attention=lambda: split)
    manager._max_full_descs_to_capture = manager._capture_mem_samples = None
    manager._capture_descs = {
        mode: [Descriptor(num_tokens=1, num_ubatches=1, cg_mode=mode)] for mode in (modes.PIECEWISE, modes.FULL)
    }
    for name, stand_in in {
        "graph_capture": lambda **_: nullcontext(),
        "capture_pool": lambda *_: nullcontext(),
        "is_global_first_rank": lambda: False,
        "current_stream": lambda: None,
    }.items():
        monkeypatch.setattr(module, name, stand_in)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: "graph")
    manager.capture(lambda desc, warmup: lambda mode: attention(desc))
    assert seen == [("PIECEWISE", breakable or split)] * 2 + [("FULL", False)] * 2
    attention(manager._capture_descs[modes.PIECEWISE][0])
    assert seen[-1] == ("PIECEWISE", False)


# What ``initialize_kv_cache`` of the V2 runner makes beside the draft's attention.
MADE_ELSEWHERE = (
    "BlockTables", "ModelCudaGraphManager", "check_attention_cp_compatibility", "has_compiled_submodule",
    "init_attn_backend", "init_kv_cache", "initialize_mamba_ssu_backend", "maybe_build_ubatch_runner",
    "maybe_create_adaptive_verification_manager",
)  # fmt: skip


@pytest.mark.parametrize("method", ["mtp", "ngram_gpu"])
def test_the_runner_initialises_the_drafts_attention_in_its_lane(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Upstream's whole method; the draft's builders and its graph managers are made while it calls the draft."""
    module = importlib.import_module("vllm.v1.worker.gpu.model_runner")
    for name in MADE_ELSEWHERE:
        monkeypatch.setattr(module, name, MagicMock(return_value=None))
    module.init_attn_backend.return_value = [], MagicMock(), []
    module.init_kv_cache.return_value = {}
    seen: list[tuple[str, int]] = []

    def note(name: str) -> Any:
        return lambda *args: seen.append((name, context().current_lane()))

    runner = MagicMock(vllm_config=configuration(method), pcp_manager=None, is_encoder_decoder=False, vocab_size=64)
    runner.cache_config.kv_sharing_fast_prefill = False
    runner.speculator = MagicMock(spec=module.DraftModelSpeculator)
    runner.speculator.draft_attn_layer_names = set()
    runner.speculator.set_attn = note("set_attn")
    runner.speculator.init_cudagraph_manager = note("init_cudagraph_manager")
    runner.model_state.initialize_kv_cache = note("target")
    caches = SimpleNamespace(kv_cache_groups=[])
    module.GPUModelRunner.initialize_kv_cache(runner, caches, is_profiling=True)
    lane = int(method == "mtp")
    assert seen == [("set_attn", lane), ("init_cudagraph_manager", lane), ("target", 0)]
