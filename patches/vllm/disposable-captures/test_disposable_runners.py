"""Both runners' profiling captures: in a throwaway pool, disposable, and with no wrapper left on that pool."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

REAL = "real pool"


class Wrapper:
    """A wrapper that binds the platform's global pool when it is made, as upstream's do."""

    def __init__(self, platform: Any) -> None:
        self.graph_pool, self.graphs = platform.get_global_graph_pool(), 0

    def clear_graphs(self) -> None:
        self.graphs = 0


def new_platform(pool: Any) -> Any:
    """A platform whose pools are numbered."""
    numbers = itertools.count()

    class Platform:
        _global_graph_pool: Any = pool

        def graph_pool_handle(self) -> str:
            return f"pool {next(numbers)}"

        def get_global_graph_pool(self) -> Any:
            if type(self)._global_graph_pool is None:
                type(self)._global_graph_pool = self.graph_pool_handle()
            return type(self)._global_graph_pool

    return Platform()


@pytest.fixture(params=[REAL, None])
def platform(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Where modules look for it, with and without a global pool so far; the wrappers are the test's own."""
    from vllm.compilation import throwaway_pool
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
    from vllm.compilation.cuda_graph import CUDAGraphWrapper
    from vllm.v1.worker import gpu_model_runner
    from vllm.v1.worker.gpu import cudagraph_utils

    made = new_platform(request.param)
    for module in (throwaway_pool, gpu_model_runner, cudagraph_utils):
        monkeypatch.setattr(module, "current_platform", made)
    for kind in (CUDAGraphWrapper, BreakableCUDAGraphWrapper):
        monkeypatch.setattr(kind, "_all_instances", [])
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (1 << 30, 1 << 30))
    return made


def v1_runner(events: list[str], capture: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    from vllm.v1.worker import gpu_model_runner as module

    @contextmanager
    def graph_capture(device: Any) -> Any:
        from vllm.distributed.capture_scopes import captured_by_others

        with captured_by_others(SimpleNamespace(stream="stream")):
            yield

    monkeypatch.setattr(module, "set_current_vllm_config", lambda config: nullcontext())
    monkeypatch.setattr(module, "graph_capture", graph_capture)
    runner: Any = module.GPUModelRunner.__new__(module.GPUModelRunner)
    mode = module.CUDAGraphMode.PIECEWISE
    vars(runner).update(
        vllm_config=None, device="cuda:0", max_model_len=64, max_num_tokens=64, lora_config=None,
        cudagraph_dispatcher=SimpleNamespace(
            get_capture_descs=lambda: [(mode, [SimpleNamespace(num_tokens=8)])], cudagraph_keys={},
            keys_initialized=True,
        ),
        _init_minimal_kv_cache_for_profiling=lambda: events.append("init"),
        _create_encoder_cudagraph_manager=lambda: None,
        _freeze_gc=nullcontext,
        _warmup_and_capture=lambda *args, **kwargs: capture(),
        maybe_remove_all_loras=lambda config: None,
        _cleanup_profiling_kv_cache=lambda: events.append("destroy"),
    )  # fmt: skip
    return runner.profile_cudagraph_memory  # type: ignore[no-any-return]


def v2_runner(events: list[str], capture: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    from vllm.distributed.capture_scopes import captured_by_others
    from vllm.v1.worker.gpu import cudagraph_utils as module

    def capture_model(*, profile_only: bool) -> int:
        assert profile_only
        with captured_by_others(SimpleNamespace(stream="stream")):
            capture()
        return 1 << 20

    monkeypatch.setattr(module, "set_current_vllm_config", lambda config: nullcontext())
    monkeypatch.setattr(module, "_init_minimal_kv_cache_for_profiling", lambda runner: events.append("init"))
    monkeypatch.setattr(module, "_teardown_profiling_state", lambda runner: events.append("destroy"))
    runner = SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_mode=module.CUDAGraphMode.PIECEWISE), vllm_config=None,
        cudagraph_manager=SimpleNamespace(use_breakable_cg=False, _capture_descs={}),
        needs_cudagraph_capture=lambda: True, capture_model=capture_model,
    )  # fmt: skip
    return lambda: module.profile_cudagraph_memory(runner)  # type: ignore[arg-type]


RUNNERS = {"V1": v1_runner, "V2": v2_runner}
Registered = Callable[..., Any]


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("which", RUNNERS)
def test_participants_are_rolled_back_once_the_graphs_are_gone(
    which: str, raises: bool, platform: Any, events: list[str], registered: Registered, monkeypatch: pytest.MonkeyPatch
) -> None:
    def capture() -> None:
        events.append("capture")
        if raises:
            raise ValueError("no capture")

    kept = registered("a")
    profile = RUNNERS[which](events, capture, monkeypatch)
    with pytest.raises(ValueError, match="no capture") if raises else nullcontext():
        profile()
    seen = [event for event in events if event not in ("synchronize", "init")]
    assert seen == ["checkpoint a", "enter a", "capture", "leave a", "destroy", "rollback a"]
    assert events[events.index("destroy") :] == ["destroy", "synchronize", "rollback a"]
    assert kept


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("which", RUNNERS)
def test_no_wrapper_keeps_the_throwaway_pool(
    which: str,
    raises: bool,
    platform: Any,
    scopes: Any,
    events: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
    from vllm.compilation.cuda_graph import CUDAGraphWrapper

    pool = type(platform)._global_graph_pool
    before: Any = Wrapper(platform) if pool else None
    private: Any = SimpleNamespace(graph_pool="its own pool", clear_graphs=lambda: None)
    older: list[Any] = [before, private] if pool else [private]
    CUDAGraphWrapper._all_instances.extend(older)  # type: ignore[attr-defined]
    made: list[Any] = []

    def capture() -> None:
        for kind in (CUDAGraphWrapper, BreakableCUDAGraphWrapper):
            made.append(Wrapper(platform))
            kind._all_instances.append(made[-1])  # type: ignore[attr-defined]
        made[0].during = [wrapper.graph_pool for wrapper in (*older, *made)]
        if raises:
            raise ValueError("no capture")

    profile = RUNNERS[which](events, capture, monkeypatch)
    with pytest.raises(ValueError, match="no capture") if raises else nullcontext():
        profile()
    # All in one pool while it lasted, and none of them in the real one.
    assert len(set(made[0].during)) == 1
    assert made[0].during[0] not in (pool, None)
    real = platform.get_global_graph_pool()
    assert real not in made[0].during
    assert [wrapper.graph_pool for wrapper in made] == [real, real]
    assert private.graph_pool == "its own pool"
    if pool:
        assert real == before.graph_pool == REAL


@pytest.mark.parametrize("which", RUNNERS)
def test_without_wrappers_no_pool_is_made(
    which: str, platform: Any, scopes: Any, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = type(platform)._global_graph_pool
    RUNNERS[which](events, lambda: None, monkeypatch)()
    assert type(platform)._global_graph_pool == pool
