"""The profiling run allocates the larger of the prefill budget and the worst decode step.

Runs the profiling branch of the real ops of the vLLM on the path, on a CPU, and reads the largest
allocation from the profiler.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_modules import load

MIB = 1 << 20
COMMON = {
    "k_cache_prefix": "k", "q_scale": None, "k": None, "quant_block_size": 128, "scale_fmt": None,
    "topk_tokens": 8, "head_dim": 64, "total_seq_lens": 4, "skip_k_cache_insert": True,
}  # fmt: skip
OPS = {
    "shared": (
        "vllm.model_executor.layers.sparse_attn_indexer", "sparse_attn_indexer", "max_model_len",
        {"use_pcp": False, "pcp_shard_decode_requests": False, "dense_mha_metadata_layer_name": ""},
    ),
    "kpool": ("vllm.models.glm5next.nvidia.sparse_indexer", "sparse_attn_indexer_kpool", "max_pool_len", {}),
}  # fmt: skip


def config(seqs: int, batched: int, speculative: int | None) -> Any:
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=seqs, max_num_batched_tokens=batched),
        speculative_config=None if speculative is None else SimpleNamespace(num_speculative_tokens=speculative),
    )


def reserved_bytes(
    which: str, columns: int, vllm_config: Any, monkeypatch: pytest.MonkeyPatch, *, sm100: bool = False, **extra: Any
) -> int:
    """The largest allocation of the op's profiling branch."""
    name, op, width, more = OPS[which]
    module = load(name)
    context, workspace = SimpleNamespace(attn_metadata=None), SimpleNamespace(get_simultaneous=lambda *specs: None)
    monkeypatch.setattr(module, "get_forward_context", lambda: context)
    monkeypatch.setattr(module, "current_workspace_manager", lambda: workspace)
    monkeypatch.setattr(module, "get_current_vllm_config_or_none", lambda: vllm_config)
    monkeypatch.setattr(module, "_reserve_row_shard_exchange_transient", lambda *args: None)
    monkeypatch.setattr(module, "mqa_logits_use_mx_scales", lambda: sm100)
    monkeypatch.setattr(module.envs, "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB", 1)
    arguments = {
        **COMMON, "hidden_states": torch.empty(4, 4), "kv_cache": torch.empty(4), "q_quant": torch.empty(4, 4),
        "weights": torch.empty(4), "topk_indices_buffer": torch.empty(4, 8, dtype=torch.int32),
        width: columns, **more, **extra,
    }  # fmt: skip
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        getattr(module, op)(**arguments)
    return max(event.cpu_memory_usage for event in profile.events())


@pytest.mark.parametrize("which", OPS)
@pytest.mark.parametrize(
    ("columns", "vllm_config", "sm100", "extra", "wanted"),
    [
        # 8 sequences of 1 + 5 rows, 8,192 columns of FP32
        (8192, config(8, 3072, 5), False, {}, 48 * 8192 * 4),
        # 8,193 columns take 33 steps of 256
        (8193, config(8, 3072, 5), False, {}, 48 * 8448 * 4),
        # BF16 and its FP32 copy; 8,193 columns take 6 steps of 1,536
        (8193, config(8, 3072, 5), True, {}, 48 * 9216 * 6),
        # no more sequences than tokens in a batch
        (65536, config(64, 16, None), False, {}, 16 * 65536 * 4),
        # the prefill budget is larger
        (1024, config(4, 3072, None), False, {}, MIB),
        # a decode-context-parallel merge reads FP32 whatever the backend
        (8193, config(8, 3072, 5), True, {"topk_backend": "deep_select", "dcp_world_size": 2}, 48 * 9216 * 6),
    ],
)
def test_reservation(
    which: str, columns: int, vllm_config: Any, sm100: bool, extra: dict[str, Any], wanted: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    assert reserved_bytes(which, columns, vllm_config, monkeypatch, sm100=sm100, **extra) == wanted


def test_deep_select_of_the_shared_op_keeps_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    found = reserved_bytes("shared", 8192, config(64, 3072, 5), monkeypatch, sm100=True, topk_backend="deep_select")
    assert found == 384 * 9216 * 2


@pytest.mark.parametrize("vllm_config", [None, SimpleNamespace(compilation_config=None)])
def test_without_scheduler_the_budget_stays(vllm_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reserved_bytes("shared", 1 << 20, vllm_config, monkeypatch) == MIB


def test_the_case_of_pull_request_62860() -> None:
    """786 and 1,536 rows at a width of 1,048,576, and of 1,049,088 as DeepGEMM pads it on SM100."""
    sizes = importlib.import_module("vllm.model_executor.layers.sparse_indexer_logits")
    width = 1_049_088
    rows = sizes.max_decode_rows(256, 8192, 5)
    assert rows == 1536
    assert sizes.decode_logits_bytes(rows, 1 << 20, sm100=True, fp32_copy=True) == rows * width * 6
    assert sizes.decode_logits_bytes(rows, 1 << 20, sm100=True, fp32_copy=False) == rows * width * 2
    copy = sizes.decode_logits_bytes(786, 1 << 20, sm100=True, fp32_copy=True) * 4 // 6
    assert copy == 786 * width * 4
