"""Upstream's two runners with their own profile code; KV cache, model and stream capture are scripted."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from graph_machine import MIB, Machine
from vllm.config import CUDAGraphMode
from vllm.v1.worker import gpu_model_runner, graph_profile
from vllm.v1.worker.gpu import cudagraph_utils, model_runner
from vllm.v1.worker.graph_meter import captures_done

TINY = tuple(range(64, 0, -1))
KV, BUILDERS, POOL, TRANSIENT = 24 * MIB, 94 * MIB, 80 * MIB, 600 * MIB


@contextlib.contextmanager
def nothing(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


def scripted_machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A device that torch's accelerator functions and the meter read."""
    machine = Machine()
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *a: None)
    monkeypatch.setattr(torch.accelerator, "empty_cache", machine.reading)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda *a: (machine.free, machine.total))
    monkeypatch.setattr(graph_profile, "measurable", lambda: True)
    monkeypatch.setattr(graph_profile, "AcceleratorMemory", lambda: machine)
    monkeypatch.setattr(graph_profile, "set_current_vllm_config", nothing)
    for module in (cudagraph_utils, gpu_model_runner):
        platform = type(module.current_platform)
        monkeypatch.setattr(platform, "graph_pool_handle", lambda self: "throwaway", raising=False)
        monkeypatch.setattr(platform, "_global_graph_pool", None, raising=False)
        monkeypatch.setattr(module, "set_current_vllm_config", nothing)
        monkeypatch.setattr(module, "graph_capture", nothing)
    return machine


def kv_caches(machine: Machine) -> list[Any]:
    """The minimal KV cache, with its builders: two layers view one storage, a third has a list."""
    machine.allocate("kv", KV)
    machine.allocate("builders", BUILDERS)
    shared = torch.empty(KV // 2, dtype=torch.uint8)
    return [shared[: KV // 4], shared[KV // 4 :], [torch.empty(KV // 2, dtype=torch.uint8)]]


class Desc:
    """A graph's descriptor, as far as both runners read it."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens, self.num_ubatches, self.num_active_loras = num_tokens, 1, 0
        self.uniform, self.cg_mode = False, CUDAGraphMode.FULL


class Graphs(dict):  # type: ignore[type-arg]
    """A manager's graphs: cleared, they are destroyed on the device."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine

    def clear(self) -> None:
        super().clear()
        self.machine.destroy_graphs()


def v2_manager(machine: Machine, sizes: tuple[int, ...]) -> Any:
    manager: Any = cudagraph_utils.CudaGraphManager.__new__(cudagraph_utils.CudaGraphManager)
    manager.device, manager.ubatch_runner, manager.use_breakable_cg = "cpu", None, False
    manager.vllm_config, manager.pool, manager.graphs = SimpleNamespace(), None, Graphs(machine)
    manager._capture_descs = {CUDAGraphMode.FULL: [Desc(size) for size in sizes]}
    manager._max_full_descs_to_capture = manager._capture_mem_samples = None
    return manager


def v2_runner(machine: Machine, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...] = TINY) -> Any:
    """``profile_cudagraph_memory``, ``_teardown_profiling_state`` and ``CudaGraphManager.capture`` are upstream's."""
    runner: Any = model_runner.GPUModelRunner.__new__(model_runner.GPUModelRunner)
    runner.compilation_config = SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL, static_forward_context={})
    runner.vllm_config, runner.cache_config = SimpleNamespace(), SimpleNamespace(num_gpu_blocks=None)
    runner.model_state = SimpleNamespace(supports_mm_inputs=False)
    runner.lora_config, runner.maybe_remove_all_loras = None, lambda _: None
    runner.eplb = SimpleNamespace(suppress=nothing)
    runner.cudagraph_manager, runner.captured = None, []

    def initialise(target: Any) -> None:
        target.kv_caches, target.attn_groups = kv_caches(machine), []
        target.cudagraph_manager = v2_manager(machine, sizes)

    def forward(desc: Any, warmup: bool) -> Any:
        if warmup:
            return lambda mode: machine.warm_up(TRANSIENT if desc.num_tokens == sizes[0] else MIB)
        runner.captured.append(desc.num_tokens)
        return lambda mode: machine.capture(POOL)

    def capture_model(*, profile_only: bool = False) -> int:
        runner.cudagraph_manager.capture(forward)
        captures_done()
        return 1

    runner.capture_model, runner.initialise = capture_model, initialise
    for name, stand_in in {
        "_init_minimal_kv_cache_for_profiling": initialise,
        "clear_layer_kv_caches": lambda _: machine.release("kv", "builders"),
        "release_hisparse_profiling_cache": lambda _: None,
        "is_global_first_rank": lambda: False,
        "current_stream": lambda: None,
        "capture_pool": nothing,
        "capture_outside_cumem_pool": nothing,
    }.items():
        monkeypatch.setattr(cudagraph_utils, name, stand_in)
    monkeypatch.setattr(torch.cuda, "graph", nothing)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: "graph")
    return runner


def v1_runner(machine: Machine, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...] = TINY) -> Any:
    """``profile_cudagraph_memory``, ``_warmup_and_capture`` and ``_cleanup_profiling_kv_cache`` are upstream's."""
    runner: Any = gpu_model_runner.GPUModelRunner.__new__(gpu_model_runner.GPUModelRunner)
    context: dict[str, Any] = {}
    runner.compilation_config = SimpleNamespace(
        cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE, static_forward_context=context, cudagraph_num_of_warmups=1
    )
    runner.vllm_config, runner.cache_config = SimpleNamespace(), SimpleNamespace(num_gpu_blocks=None)
    runner.max_model_len, runner.max_num_tokens, runner.device = 4096, 2048, "cpu"
    runner.lora_config, runner.maybe_remove_all_loras = None, lambda _: None
    runner.captured = []
    descs = [(mode, [Desc(size) for size in sizes]) for mode in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL)]
    runner.cudagraph_dispatcher = SimpleNamespace(
        get_capture_descs=lambda: descs, cudagraph_keys={}, keys_initialized=True
    )
    runner._create_encoder_cudagraph_manager = lambda: None
    monkeypatch.setattr(gpu_model_runner.GPUModelRunner, "_freeze_gc", staticmethod(nothing))

    class Layer:
        """Its KV cache goes, and the builders with it, when nobody holds the tensor any more."""

        def __init__(self) -> None:
            self.kv_cache = torch.empty(0)
            weakref.finalize(self.kv_cache, machine.release, "kv", "builders").atexit = False

    def initialise() -> None:
        runner.kv_caches, runner.attn_groups = kv_caches(machine), []
        context["layer"] = Layer()

    def dummy_run(num_tokens: int, *, is_graph_capturing: bool = False, **options: Any) -> None:
        if is_graph_capturing:
            runner.captured.append((options["cudagraph_runtime_mode"], num_tokens, options["profile_seq_lens"]))
            machine.capture(POOL)
        else:
            machine.warm_up(TRANSIENT if num_tokens == sizes[0] else MIB)

    runner._init_minimal_kv_cache_for_profiling, runner._dummy_run = initialise, dummy_run
    monkeypatch.setattr(
        gpu_model_runner.CUDAGraphWrapper, "clear_all_graphs", classmethod(lambda cls: machine.destroy_graphs())
    )
    return runner
