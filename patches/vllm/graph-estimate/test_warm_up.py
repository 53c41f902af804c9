"""Warm-up on a profile's KV cache, and the worker's own warm-up and capture afterwards."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from graph_machine import MIB
from graph_runners import nothing
from vllm.config import CUDAGraphMode
from vllm.model_executor.warmup import attention_warmup, kernel_warmup
from vllm.v1.worker import gpu_worker, graph_profile
from vllm.v1.worker.gpu import warmup
from vllm.v1.worker.profile_warmup import in_profile_warm_up, warm_up_for_profile


def worker_with(hisparse: Any = None) -> Any:
    return SimpleNamespace(
        vllm_config=SimpleNamespace(attention_config=SimpleNamespace(hisparse_config=hisparse)),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
        model_config=SimpleNamespace(max_model_len=64),
        use_v2_model_runner=False,
        model_runner=SimpleNamespace(_dummy_run=lambda **options: pytest.fail("a mixed step ran")),
    )


@pytest.mark.parametrize(("hisparse", "local"), [(None, False), (object(), True)])
def test_kernels_are_warmed_up_without_mixed_steps(hisparse: Any, local: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def kernels(worker: Any, *, process_local_only: bool) -> None:
        # An empty runner: a mixed step that asked it for anything would raise.
        mixed = warmup.run_mixed_prefill_decode_warmup(SimpleNamespace(), None, None, 16)
        attention_warmup.mixed_batch_attention_warmup(worker)
        seen.append((process_local_only, in_profile_warm_up(), mixed))

    monkeypatch.setattr(kernel_warmup, "kernel_warmup", kernels)
    warm_up_for_profile(worker_with(hisparse))
    assert seen == [(local, True, False)]
    assert not in_profile_warm_up()


def test_a_failed_warm_up_is_raised_and_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernels(worker: Any, *, process_local_only: bool) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(kernel_warmup, "kernel_warmup", kernels)
    with pytest.raises(RuntimeError, match="no kernel"):
        warm_up_for_profile(worker_with())
    assert not in_profile_warm_up()


def test_upstreams_own_warm_up_runs_mixed_steps() -> None:
    with pytest.raises(AttributeError, match="is_pooling_model"):
        warmup.run_mixed_prefill_decode_warmup(SimpleNamespace(), None, None, 16)


def test_the_worker_measures_its_captures_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """``_compile_or_warm_up_model`` itself, with an estimate of nothing, about which upstream says nothing."""
    monkeypatch.setattr(gpu_worker, "kernel_warmup", lambda worker: None)
    monkeypatch.setattr(gpu_worker, "capture_graphs", lambda worker: 6 * MIB)
    for name in ("set_random_seed", "freeze_gc_heap", "maybe_attach_gc_debug_callback", "enable_gpu_sync_check"):
        monkeypatch.setattr(gpu_worker, name, lambda *a: None)
    profile = SimpleNamespace(builder_bytes=94 * MIB, residue_bytes=3 * MIB, transient_bytes=2 * MIB)
    compilation = SimpleNamespace(
        mode=gpu_worker.CompilationMode.NONE, cudagraph_mode=CUDAGraphMode.FULL, compilation_time=0.0,
        encoder_compilation_time=0.0,
    )  # fmt: skip
    worker: Any = SimpleNamespace(
        vllm_config=SimpleNamespace(
            compilation_config=compilation, kernel_config=SimpleNamespace(enable_jit_warmup=False)
        ),
        compilation_config=compilation,
        model_runner=SimpleNamespace(maybe_remove_all_loras=lambda config: None, lora_config=None),
        model_config=SimpleNamespace(enforce_eager=False, seed=0),
        parallel_config=SimpleNamespace(data_parallel_index=0),
        cache_config=SimpleNamespace(kv_cache_memory_bytes=1),
        use_v2_model_runner=True,
        _get_cudagraph_capture_context=nothing,
        _maybe_activate_jit_monitor=lambda: None,
        cudagraph_memory_estimate=0,
        graph_profile=profile,
    )
    monkeypatch.setattr(graph_profile.logger, "propagate", True)
    with caplog.at_level(logging.INFO, logger=graph_profile.logger.name):
        gpu_worker.Worker._compile_or_warm_up_model(worker)
    said = [record.getMessage() for record in caplog.records if "CUDA graph pool memory" in record.getMessage()]
    assert said == [graph_profile.comparison(worker, 6 * MIB)]
    assert "6.0 MiB (actual), 0.0 MiB (estimated)" in said[0]
