"""The patched runners and worker: what is read at which step, what is charged, and what stays upstream's."""

from __future__ import annotations

import contextlib
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from graph_machine import MIB, Machine
from graph_runners import BUILDERS, POOL, TINY, TRANSIENT, Graphs, nothing, scripted_machine, v1_runner, v2_runner
from vllm.config import CUDAGraphMode
from vllm.distributed import capture_streams
from vllm.v1.worker import gpu_worker, graph_meter, graph_profile
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.graph_memory import sampled

RUNNERS = {"v1": v1_runner, "v2": v2_runner}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return scripted_machine(monkeypatch)


def worker_of(runner: Any, kind: str, monkeypatch: pytest.MonkeyPatch, *, mode: Any = CUDAGraphMode.FULL) -> Any:
    monkeypatch.setattr(graph_profile, "warm_up_for_profile", lambda worker: worker.warmed.append(True))
    config = SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode=mode), is_mm_encoder_only=False)
    return SimpleNamespace(
        model_runner=runner,
        use_v2_model_runner=kind == "v2",
        vllm_config=config,
        warmed=[],
        cudagraph_memory_estimate=0,
    )


def profile_result(headroom: int = 0) -> Any:
    return SimpleNamespace(total_consumed=5 * MIB, transient_peak_headroom=headroom, non_kv_cache_memory=0)


@pytest.mark.parametrize("kind", RUNNERS)
def test_a_profile_charges_what_the_engine_then_takes(
    kind: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = RUNNERS[kind](machine, monkeypatch)
    worker, result = worker_of(runner, kind, monkeypatch), profile_result(headroom=MIB)
    start = machine.free
    estimate = graph_profile.profile_graphs(worker, result)

    modes, count = (2, 128) if kind == "v1" else (1, 64)
    assert len(runner.captured) == 16 * modes
    # The driver keeps what the 16 sampled graphs of each mode had; their pool goes back.
    kept = start - machine.free
    assert kept == 16 * modes * MIB
    # Within the driver's step for each graph that was not captured.
    assert abs(estimate - (POOL + (count - 16 * modes) * MIB)) <= 7 * MIB * modes
    assert result.total_consumed == 5 * MIB + BUILDERS + kept
    # The KV cache of the profile is no communicator's, though V1's clean-up holds it until it returns.
    assert worker.graph_profile.rolled_back_bytes == 0
    # V1's second mode warms up when the pool already stands.
    assert result.transient_peak_headroom == TRANSIENT - (POOL if kind == "v2" else 0)
    assert result.non_kv_cache_memory == result.total_consumed + result.transient_peak_headroom
    assert worker.warmed == [True]


def test_v2_samples_from_the_largest_to_the_smallest(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = v2_runner(machine, monkeypatch)
    graph_profile.profile_graphs(worker_of(runner, "v2", monkeypatch), profile_result())
    assert runner.captured == sampled(TINY)


def test_v1_samples_every_mode_and_gives_the_first_its_long_sequences(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = v1_runner(machine, monkeypatch)
    graph_profile.profile_graphs(worker_of(runner, "v1", monkeypatch), profile_result())
    full = [(size, lens) for mode, size, lens in runner.captured if mode == CUDAGraphMode.FULL]
    assert full == [(size, 32 if index == 0 else None) for index, size in enumerate(sampled(TINY))]
    assert [size for mode, size, _ in runner.captured if mode == CUDAGraphMode.PIECEWISE] == sampled(TINY)


@pytest.mark.parametrize("kind", RUNNERS)
def test_without_a_worker_a_runner_samples_as_upstream_does(
    kind: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = RUNNERS[kind](machine, monkeypatch)
    profile = (lambda: cudagraph_utils.profile_cudagraph_memory(runner)) if kind == "v2" else None
    estimate = profile() if profile else runner.profile_cudagraph_memory()
    assert len(runner.captured) == (2 if kind == "v2" else 4)
    assert isinstance(estimate, int)


@pytest.mark.parametrize("kind", RUNNERS)
def test_a_failed_capture_is_raised_and_leaves_no_meter_open(
    kind: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = RUNNERS[kind](machine, monkeypatch)

    def fail(*args: Any) -> None:
        raise RuntimeError("capture failed")

    monkeypatch.setattr(machine, "capture", fail)
    worker, result = worker_of(runner, kind, monkeypatch), profile_result()
    with pytest.raises(RuntimeError, match="capture failed"):
        graph_profile.profile_graphs(worker, result)
    assert result.total_consumed == 5 * MIB
    assert graph_meter._open is None
    assert capture_streams._next_in_pass is None
    assert "kv" not in machine.live


@pytest.mark.parametrize("kind", RUNNERS)
@pytest.mark.parametrize("wanted", [True, False])
def test_eager_mode_measures_builders_and_warm_up(
    kind: str, wanted: bool, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = RUNNERS[kind](machine, monkeypatch)
    worker, result = worker_of(runner, kind, monkeypatch, mode=CUDAGraphMode.NONE), profile_result(headroom=MIB)
    monkeypatch.setenv("VLLM_NEAPTIDE_PROFILE_WARMUP", "1" if wanted else "0")
    graph_profile.profile_without_graphs(worker, result)
    assert result.total_consumed == 5 * MIB + (BUILDERS if wanted else 0)
    assert result.transient_peak_headroom == MIB
    assert worker.warmed == [True] * wanted
    assert runner.captured == []
    assert "kv" not in machine.live


def test_encoder_graphs_alone_are_profiled_as_upstream_does(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be the first pipeline stage's only; every stage measures the rest, with collectives of all."""
    runner = v2_runner(machine, monkeypatch)
    runner.profile_cudagraph_memory = lambda: 7 * MIB
    worker, result = worker_of(runner, "v2", monkeypatch, mode=CUDAGraphMode.NONE), profile_result()
    assert graph_profile.profile_graphs(worker, result) == 7 * MIB
    assert (worker.warmed, result.total_consumed) == ([], 5 * MIB)
    graph_profile.profile_without_graphs(worker, result)
    assert (worker.warmed, result.total_consumed) == ([True], 5 * MIB + BUILDERS)


@pytest.mark.parametrize("kind", RUNNERS)
def test_decoder_graphs_are_not_profiled_twice(kind: str, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, result = worker_of(RUNNERS[kind](machine, monkeypatch), kind, monkeypatch), profile_result()
    graph_profile.profile_without_graphs(worker, result)
    assert (worker.warmed, result.total_consumed) == ([], 5 * MIB)


def test_graphs_of_one_size_are_told_apart_by_what_their_descriptors_have() -> None:
    from vllm.forward_context import BatchDescriptor
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

    fields = {field.name for of in (BatchDescriptor, BatchExecutionDescriptor) for field in dataclasses.fields(of)}
    assert set(graph_meter.KIND) <= fields
    graphs = [
        BatchExecutionDescriptor(CUDAGraphMode.FULL, num_tokens=size, num_reqs=size, num_active_loras=loras)
        for size in range(35, 0, -1)
        for loras in (0, 4)
    ]
    with graph_meter.measuring(graph_meter.CaptureMeter(Machine())):
        chosen = graph_meter.graphs_to_profile(graphs, 2)
    assert [sum(graph.num_active_loras == loras for graph in chosen) for loras in (0, 4)] == [9, 9]
    assert chosen[:2] == graphs[:2]


def test_the_actual_leaves_out_what_warm_ups_cached(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = v2_runner(machine, monkeypatch)
    runner.initialise(runner)
    machine.warm_up(TRANSIENT)

    def capture_model() -> int:
        machine.capture(POOL)
        machine.warm_up(TRANSIENT)
        return TRANSIENT

    runner.capture_model = capture_model
    assert graph_profile.capture_graphs(worker_of(runner, "v2", monkeypatch)) == POOL + 2 * MIB


def test_the_line_names_estimate_actual_and_what_else_was_charged(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = v2_runner(machine, monkeypatch)
    worker = worker_of(runner, "v2", monkeypatch)
    graph_profile.profile_graphs(worker, profile_result())
    worker.cudagraph_memory_estimate = 128 * MIB
    assert graph_profile.comparison(worker, 130 * MIB) == (
        "CUDA graph pool memory: 130.0 MiB (actual), 128.0 MiB (estimated), difference: 2.0 MiB (1.5%). "
        "Charged beside the graphs: 94.0 MiB of builder and runner buffers, 16.0 MiB that warm-up and throwaway "
        "captures left; captures needed 520.0 MiB for a while."
    )


def test_the_line_comes_with_an_estimate_of_nothing_and_not_without_a_profile() -> None:
    worker = SimpleNamespace(cudagraph_memory_estimate=0)
    assert graph_profile.comparison(worker, 5) is None
    worker.cudagraph_memory_estimate = 4 * MIB
    line = graph_profile.comparison(worker, 5 * MIB)
    assert line == "CUDA graph pool memory: 5.0 MiB (actual), 4.0 MiB (estimated), difference: 1.0 MiB (20.0%)."


def test_the_line_of_eager_mode_has_what_was_charged_alone(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = worker_of(v2_runner(machine, monkeypatch), "v2", monkeypatch, mode=CUDAGraphMode.NONE)
    graph_profile.profile_without_graphs(worker, profile_result())
    line = graph_profile.comparison(worker, 0)
    assert line is not None
    assert line.startswith("Charged beside the graphs: 94.0 MiB of builder")


def test_the_second_pass_has_the_streams_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_streams, "_streams", [])
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())
    with capture_streams.capture_pass():
        first = [capture_streams.capture_stream("cuda") for _ in range(3)]
        with pytest.raises(RuntimeError, match="within another one"), capture_streams.capture_pass():
            pass
    with capture_streams.capture_pass():
        assert [capture_streams.capture_stream("cuda") for _ in range(2)] == first[:2]
    assert len(set(first)) == 3
    assert capture_streams.capture_stream("cuda") not in first


class Estimates:
    """A worker's surroundings, as far as ``determine_available_memory`` reads them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, mode: Any) -> None:
        self.result = profile_result(headroom=7 * MIB)
        self.result.after_profile = SimpleNamespace(free_memory=90 * MIB)

        @contextlib.contextmanager
        def memory_profiling(*args: Any, **kwargs: Any) -> Any:
            yield self.result
            self.result.non_kv_cache_memory = self.result.total_consumed + self.result.transient_peak_headroom

        for name, stand_in in {
            "maybe_apply_startup_plan": lambda worker: None,
            "memory_profiling": memory_profiling,
            "set_current_vllm_config": nothing,
            "maybe_rocm_profiling_fallback": lambda result: None,
            "reserve_mm_ipc_gpu_memory": lambda available, *rest: available,
            "current_platform": SimpleNamespace(is_cuda_alike=lambda: True, is_xpu=lambda: False),
        }.items():
            monkeypatch.setattr(gpu_worker, name, stand_in)
        worker: Any = gpu_worker.Worker.__new__(gpu_worker.Worker)
        worker.cache_config = SimpleNamespace(kv_cache_memory_bytes=None, gpu_memory_utilization=0.9)
        worker.init_snapshot = SimpleNamespace(free_memory=100 * MIB, total_memory=100 * MIB)
        worker.requested_memory = 95 * MIB
        monkeypatch.setattr(gpu_worker.Worker, "randomize_dummy_inputs", False)
        worker.use_v2_model_runner, worker._scoped_allocator_max_split = True, nothing
        worker.vllm_config = SimpleNamespace(
            compilation_config=SimpleNamespace(cudagraph_mode=mode, cudagraph_mm_encoder=False),
            is_mm_encoder_only=False,
        )
        worker.model_config = SimpleNamespace(enforce_eager=False, multimodal_config=None)
        worker.parallel_config = SimpleNamespace()
        worker.model_runner = SimpleNamespace(
            model_memory_usage=0, profile_run=lambda **k: None, profile_cudagraph_memory=lambda: 11 * MIB
        )
        self.worker = worker


@pytest.mark.parametrize("applied", ["1", "0"])
def test_the_worker_takes_facts_and_estimate_from_the_kv_cache(applied: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Estimates(monkeypatch, CUDAGraphMode.FULL)

    def profile(worker: Any, result: Any) -> int:
        result.total_consumed += 20 * MIB
        result.non_kv_cache_memory += 20 * MIB
        return 3 * MIB

    monkeypatch.setattr(gpu_worker, "profile_graphs", profile)
    monkeypatch.setenv("VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS", applied)
    available = here.worker.determine_available_memory()
    assert available == (95 - 5 - 7 - 20 - 3 * int(applied)) * MIB
    assert here.worker.cudagraph_memory_estimate == 3 * MIB
    assert here.worker.total_consumed == 25 * MIB


def test_the_worker_measures_in_eager_mode_too(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Estimates(monkeypatch, CUDAGraphMode.NONE)

    def measure(worker: Any, result: Any) -> None:
        result.non_kv_cache_memory += 20 * MIB

    monkeypatch.setattr(gpu_worker, "profile_without_graphs", measure)
    assert here.worker.determine_available_memory() == (95 - 5 - 7 - 20) * MIB


def test_where_nothing_can_be_read_the_estimate_is_the_runners(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Estimates(monkeypatch, CUDAGraphMode.FULL)
    monkeypatch.setattr(graph_profile, "measurable", lambda: False)
    assert here.worker.determine_available_memory() == (95 - 5 - 7 - 11) * MIB
    assert here.worker.cudagraph_memory_estimate == 11 * MIB


def test_graphs_that_are_cleared_give_their_pool_back(machine: Machine) -> None:
    """The stand-in does what the tests above rely on."""
    graphs = Graphs(machine)
    machine.capture(POOL)
    before = machine.reading().free_bytes
    graphs.clear()
    assert machine.reading().free_bytes - before == POOL
