"""The configuration that rank 0 writes: vLLM's own names, values as they are in force."""

from __future__ import annotations

import json
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import (
    AttentionConfig,
    CacheConfig,
    CompilationConfig,
    KernelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.config.model import ModelConfig
from vllm.v1.core import kv_cache_utils
from vllm.v1.worker import configuration_dump
from vllm.v1.worker.configuration_dump import PATHS, TEXT, configuration

CONFIGS = {
    "cache_config": CacheConfig, "compilation_config": CompilationConfig, "model_config": ModelConfig,
    "parallel_config": ParallelConfig, "scheduler_config": SchedulerConfig, "attention_config": AttentionConfig,
    "speculative_config": SpeculativeConfig, "kernel_config": KernelConfig,
}  # fmt: skip


class Mode(Enum):
    FULL_AND_PIECEWISE = (2, 1)


class Backend:
    @staticmethod
    def get_name() -> str:
        return "FLASHMLA_SPARSE"


def layer(**more: Any) -> Any:
    return SimpleNamespace(get_attn_backend=lambda: Backend, **more)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(
        torch.cuda, "get_device_properties",
        lambda _: SimpleNamespace(major=12, minor=0, multi_processor_count=188),
    )  # fmt: skip
    monkeypatch.setattr(kv_cache_utils, "get_kv_cache_capacity", lambda config, of_runner: (of_runner.tokens, 1.0))
    text = SimpleNamespace(hidden_size=6144, num_attention_heads=64, kv_lora_rank=512, index_topk=2048)
    config = SimpleNamespace(
        use_v2_model_runner=False,
        model_config=SimpleNamespace(architecture="GlmMoeDsaForCausalLM", max_model_len=1024, hf_text_config=text),
        compilation_config=SimpleNamespace(
            cudagraph_mode=Mode.FULL_AND_PIECEWISE, max_cudagraph_capture_size=64,
            static_forward_context={"a": SimpleNamespace(), "b": layer(kv_lora_rank=512)},
        ),
        cache_config=SimpleNamespace(cache_dtype="fp8_ds_mla"), speculative_config=None,
        attention_config=SimpleNamespace(backend=None, sparse_mla_prefill_workspace_factor=2),
        parallel_config=SimpleNamespace(dcp_q_replicate=None, tensor_parallel_size=4),
    )  # fmt: skip
    runner = SimpleNamespace(kv_cache_config=SimpleNamespace(tokens=1000))
    return SimpleNamespace(vllm_config=config, model_runner=runner, device=torch.device("cpu"))


def test_plain_values_under_vllms_own_names(worker: Any) -> None:
    found = configuration(worker, 14_352_000)
    assert json.loads(json.dumps(found)) == found
    assert found["use_v2_model_runner"] is False
    assert found["model_config"]["hf_text_config"]["index_topk"] == 2048
    assert found["compilation_config"] == {"cudagraph_mode": "FULL_AND_PIECEWISE", "max_cudagraph_capture_size": 64}
    assert found["kv_cache"] == {"bytes": 14_352_000, "tokens": 1000}
    assert found["device"] == {"capability": [12, 0], "multiprocessors": 188}
    assert found["parallel_config"] == {"dcp_q_replicate": None, "tensor_parallel_size": 4}


def test_the_backend_is_that_of_the_layers(worker: Any) -> None:
    """vLLM chooses one where the configuration names none."""
    assert configuration(worker, 1)["attention_config"]["backend"] == "FLASHMLA_SPARSE"
    worker.vllm_config.compilation_config.static_forward_context = {"a": layer()}
    assert configuration(worker, 1)["attention_config"]["backend"] is None


def test_what_there_is_not_is_left_out(worker: Any) -> None:
    found = configuration(worker, 1)
    assert "index_kpool" not in found["model_config"]["hf_text_config"]
    assert found["speculative_config"] == {"method": None, "num_speculative_tokens": None}


@pytest.mark.parametrize("path", [path for path in PATHS if not path.startswith(TEXT)])
def test_vllm_has_an_attribute_of_every_path(path: str) -> None:
    """Of this release: a name that upstream drops would be missing from every dump."""
    *part, name = path.split(".")
    owner: Any = CONFIGS[part[0]] if part else VllmConfig
    assert name in owner.__dataclass_fields__ or hasattr(owner, name)


def test_the_tokens_are_those_that_vllm_logs(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    config, of_runner = worker.vllm_config, worker.model_runner.kv_cache_config
    monkeypatch.setattr(kv_cache_utils, "get_max_concurrency_for_kv_cache_config", lambda *given: 2.5)
    assert configuration_dump.kv_tokens(config, of_runner) == 2560
