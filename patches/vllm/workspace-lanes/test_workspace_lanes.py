"""Lanes: which speculators have a second one, where that is decided, and what of the draft lies in it."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from draft_lanes import Stop, configuration, context, lanes, methods, shared_lanes, speculation
from workspace_device import MIB, Rig

# What the runner builds for a draft architecture of dflash, and for kinds of mtp.
DRAFTS = {
    "dflash": ("Qwen3XPressModel", "LiLiCorrDraftModel", "DFlash2DraftModel", "AnyModel"),
    "mtp": ("one_layer", "many_layers", "gemma4_mtp"),
}


def worker_lanes(config: Any, use_v2: bool = True) -> int:
    return int(importlib.import_module("vllm.v1.worker.gpu_worker")._num_workspace_lanes(config, use_v2))


def runner_lane(config: Any) -> int:
    """The lane that the V2 runner's own constructor takes for the draft."""
    kind = importlib.import_module("vllm.v1.worker.gpu.model_runner").GPUModelRunner
    runner = object.__new__(kind)
    type(config.model_config).dtype = property(lambda _: stop())
    with pytest.raises(Stop):
        kind.__init__(runner, config, torch.device("cpu"))
    return int(runner._draft_workspace_lane)


def stop() -> None:
    raise Stop


def built_speculator(monkeypatch: pytest.MonkeyPatch, method: str, draft: str) -> type | None:
    """The class of what the V2 runner builds; None where it builds none."""
    package = importlib.import_module("vllm.v1.worker.gpu.spec_decode")
    base = importlib.import_module("vllm.v1.worker.gpu.spec_decode.speculator").BaseSpeculator
    built: list[type] = []
    monkeypatch.setattr(base, "__new__", lambda kind, *_, **__: built.append(kind), raising=False)
    try:
        package.init_speculator(configuration(method, draft), torch.device("cpu"), None)
    except NotImplementedError:
        return None
    return built[0]


def test_every_draft_model_of_the_v2_runner_has_a_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row for each method and draft that ``init_speculator`` tells apart, by the class that it builds.

    ``extract_hidden_states`` is of the drafts' class, but only stores what the target computed, and captures nothing.
    """
    base = importlib.import_module("vllm.v1.worker.gpu.spec_decode.speculator").DraftModelSpeculator
    seen = set()
    for method in methods():
        for draft in DRAFTS.get(method, ("AnyModel",)):
            built = built_speculator(monkeypatch, method, draft)
            if built is not None:
                seen.add(built.__name__)
                apart = issubclass(built, base) and method != "extract_hidden_states"
                assert lanes().has_draft_model(speculation(method, draft)) == apart, method
    assert len(seen) == 12, seen


def test_methods_without_a_draft_model() -> None:
    without = {method for method in methods() if not lanes().has_draft_model(speculation(method))}
    assert without == {"ngram", "ngram_gpu", "suffix", "extract_hidden_states"}
    assert not lanes().has_draft_model(None)
    assert lanes().has_draft_model(SimpleNamespace(method="not_known_yet"))


def test_worker_and_runner_take_the_same_lanes() -> None:
    """The draft's lane is the last of the manager's, whatever the method."""
    for method in (None, *methods()):
        config = configuration(method)
        assert runner_lane(config) == worker_lanes(config) - 1 == lanes().lane_plan(config).draft_lane
        assert worker_lanes(config) == 1 + lanes().has_draft_model(config.speculative_config)


def test_the_v1_runner_has_one_lane() -> None:
    for method in (None, *methods()):
        assert worker_lanes(configuration(method), use_v2=False) == 1
        plan = lanes().lane_plan(configuration(method), False)
        assert (plan.draft_lane, plan.eager_in_lane_0) == (0, False)


def test_eager_scratch_is_shared_unless_the_draft_is_dspark_or_nothing_is_profiled() -> None:
    for method in methods():
        plan = lanes().lane_plan(configuration(method))
        assert plan.eager_in_lane_0 == (plan.draft_lane == 1 and method != "dspark"), method
        assert not lanes().lane_plan(configuration(method, kv_cache_memory_bytes=1)).eager_in_lane_0


@pytest.mark.parametrize(("method", "use_v2"), [("mtp", True), ("dspark", True), ("ngram_gpu", True), ("mtp", False)])
def test_the_worker_makes_the_manager_of_the_plan(monkeypatch: pytest.MonkeyPatch, method: str, use_v2: bool) -> None:
    module = importlib.import_module("vllm.v1.worker.gpu_worker")
    made: list[Any] = []
    monkeypatch.setattr(module, "init_workspace_manager", lambda *args, **kwargs: made.append((args, kwargs)))
    worker = MagicMock(vllm_config=configuration(method), use_v2_model_runner=use_v2, rank=1)
    module.Worker._init_workspace_and_model_runner(worker)
    ((args, kwargs),) = made
    plan = lanes().lane_plan(worker.vllm_config, use_v2)
    assert (args[2], kwargs["eager_in_lane_0"]) == (plan.draft_lane + 1, plan.eager_in_lane_0)


def test_eager_scratch_of_the_draft_comes_from_lane_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its size counts there, and its call site is known as the draft's."""
    rig = shared_lanes(monkeypatch)
    rig.get(4 * MIB)
    rig.get(6 * MIB, lane=1)
    assert rig.get(256, lane=1).data_ptr() == rig.get(256).data_ptr()
    rig.manager.commit()
    assert rig.get(256, lane=1).data_ptr() == rig.get(256).data_ptr()
    assert (rig.slot(0).committed_bytes, rig.slot(1).committed_bytes) == (6 * MIB, 0)
    assert {consumer.lane: consumer.max_bytes for consumer in rig.slot(0).consumers} == {0: 4 * MIB, 1: 6 * MIB}


def test_eager_scratch_has_its_own_lane_where_it_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, num_lanes=2)
    assert rig.get(MIB, lane=1).data_ptr() != rig.get(MIB).data_ptr()


@pytest.mark.parametrize("capture", ["graph_capture", "stream_capture"])
def test_graphs_of_the_draft_lie_apart(monkeypatch: pytest.MonkeyPatch, capture: str) -> None:
    """What is captured and the warm-up before it; the draft's eager requests do not move or enlarge it."""
    rig = shared_lanes(monkeypatch)
    rig.get(8 * MIB)
    rig.manager.commit()
    with rig.graph_capture():
        rig.get(MIB, lane=1)
        with getattr(rig, capture)():
            draft, target = rig.get(MIB, lane=1).data_ptr(), rig.get(MIB).data_ptr()
    assert draft != target
    assert (rig.slot(0).committed_bytes, rig.slot(1).committed_bytes) == (8 * MIB, MIB)
    rig.get(8 * MIB, lane=1)
    with rig.graph_capture():
        assert rig.get(MIB, lane=1).data_ptr() == draft
    assert bool(rig.slot(1).retained_by) == (capture == "stream_capture")


def test_a_graph_of_the_draft_does_not_hold_lane_0(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = shared_lanes(monkeypatch)
    with rig.graph_capture():
        rig.get(MIB, lane=1)
        with rig.stream_capture():
            rig.get(MIB, lane=1)
    assert rig.get(2 * MIB, lane=1).numel() == 2 * MIB
    with rig.graph_capture(), pytest.raises(rig.module.WorkspaceGrowthRefused):
        rig.get(2 * MIB, lane=1)


@pytest.mark.parametrize("given", [None, 1 << 30])
def test_builders_of_the_draft(monkeypatch: pytest.MonkeyPatch, given: int | None) -> None:
    """They are in the draft's lane; what they reserve is eager, unless the lane is a whole one."""
    config = configuration("mtp", kv_cache_memory_bytes=given)
    rig = Rig(monkeypatch, num_lanes=2, eager_in_lane_0=lanes().lane_plan(config).eager_in_lane_0)
    with lanes().draft_initialisation(config):
        rig.manager.get_simultaneous(((MIB,), torch.uint8))
        flags = rig.manager.get_persistent("flags", (8,), torch.int32)
    with rig.module.use_workspace_lane(1):
        assert rig.manager.get_persistent("flags", (8,), torch.int32) is flags
    sizes = (0, MIB) if given else (MIB, 0)
    assert (rig.slot(0).high_water_bytes, rig.slot(1).high_water_bytes) == sizes


@pytest.mark.parametrize("given", [None, 1 << 30])
def test_a_draft_whose_full_graphs_hold_more_than_its_piecewise_ones(
    monkeypatch: pytest.MonkeyPatch, given: int | None
) -> None:
    """Sizes are known before the first graph that lasts: by a throwaway capture, or for lack of one by a whole lane."""
    plan = lanes().lane_plan(configuration("mtp", kv_cache_memory_bytes=given))
    rig = Rig(monkeypatch, num_lanes=2, eager_in_lane_0=plan.eager_in_lane_0)
    attention = context().eager_break(lambda: rig.get(8 * MIB, lane=1))

    def captures() -> None:
        for piecewise in (True, False):
            with context().capturing_graphs(piecewise=piecewise):
                rig.get(MIB, lane=1)
                attention()
                with rig.stream_capture(disposable=rig._disposable):
                    rig.get(MIB, lane=1)
                    if not piecewise:
                        attention()

    rig.get(8 * MIB, lane=1)  # A layer reserves its scratch.
    rig.manager.commit()
    if not given:
        with rig.graph_capture(disposable=True):
            captures()
    with rig.graph_capture():
        captures()
    assert rig.slot(1).committed_bytes == 8 * MIB


def test_lane_0_has_what_the_draft_is_warmed_up_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step for which there is no graph asks it there; a graph that holds lane 0 is left alone."""
    rig = shared_lanes(monkeypatch)
    rig.get(4 * MIB)
    rig.manager.commit()
    with rig.graph_capture(disposable=True):
        rig.get(8 * MIB, lane=1)
    with rig.graph_capture():
        rig.get(4 * MIB)
        with rig.stream_capture():
            held = rig.get(4 * MIB).data_ptr()
        rig.get(16 * MIB, lane=1)
    rig.manager.lock()
    assert (rig.slot(0).committed_bytes, rig.slot(1).committed_bytes) == (8 * MIB, 16 * MIB)
    assert rig.get(8 * MIB, lane=1).data_ptr() == held


def test_initialisation_without_a_draft_model_stays_in_lane_0(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    with lanes().draft_initialisation(configuration("ngram_gpu")):
        rig.manager.get_simultaneous(((MIB,), torch.uint8))
    assert rig.slot().high_water_bytes == MIB


def test_ubatches_share_within_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them run at the same time, so eager scratch of the draft is that of lane 0 of its own ubatch."""
    rig = shared_lanes(monkeypatch, ubatches=2)
    places = []
    for rig.ubatch in (0, 1):
        target, draft = rig.get(MIB).data_ptr(), rig.get(MIB, lane=1).data_ptr()
        assert draft == target
        with rig.graph_capture():
            places += [target, rig.get(MIB, lane=1).data_ptr()]
    assert len(set(places)) == 4
