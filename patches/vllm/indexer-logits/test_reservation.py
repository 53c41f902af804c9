"""What the profiling run reserves for logits: enough for every launch and tile, and not more than the policy needs.

Runs the profiling branch of the real ops of the vLLM on the path, with tensors on the meta device, and reads the
largest storage that it makes.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm_modules import load

MIB, HEADS = 1 << 20, 32
POLICIES = ("constant_bytes", "fixed_width", "upstream")
COMMON = {
    "k_cache_prefix": "k", "q_scale": None, "k": None, "quant_block_size": 128, "scale_fmt": None,
    "topk_tokens": 8, "head_dim": 64, "total_seq_lens": 4, "skip_k_cache_insert": True,
}  # fmt: skip
SHARED = {"use_pcp": False, "pcp_shard_decode_requests": False, "dense_mha_metadata_layer_name": ""}
OPS = {
    "shared": (
        "vllm.model_executor.layers.sparse_attn_indexer", "sparse_attn_indexer", "max_model_len", SHARED
    ),
    "kpool": ("vllm.models.glm5next.nvidia.sparse_indexer", "sparse_attn_indexer_kpool", "max_pool_len", {}),
}  # fmt: skip


def config(seqs: int, batched: int, speculative: int | None) -> Any:
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=seqs, max_num_batched_tokens=batched),
        speculative_config=None if speculative is None else SimpleNamespace(num_speculative_tokens=speculative),
    )


class Largest(TorchDispatchMode):
    """The bytes of the largest storage that an operation returned."""

    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.found = max(self.found, out.untyped_storage().nbytes())
        return out


def reserved_bytes(
    which: str, columns: int, vllm_config: Any, monkeypatch: pytest.MonkeyPatch, *,
    policy: str = "constant_bytes", sm100: bool = False, budget_mb: int = 1, cuda: bool = True, **extra: Any,
) -> int:  # fmt: skip
    name, op, width, more = OPS[which]
    module, envs = load(name), importlib.import_module("vllm.envs")
    launch = importlib.import_module("vllm.model_executor.layers.sparse_indexer_launch")
    monkeypatch.setattr(launch.current_platform, "is_cuda", lambda: cuda)
    context, workspace = SimpleNamespace(attn_metadata=None), SimpleNamespace(get_simultaneous=lambda *specs: None)
    for variable, value in {
        "VLLM_NEAPTIDE_INDEXER_LOGITS_POLICY": policy, "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB": str(budget_mb)
    }.items():  # fmt: skip
        monkeypatch.delitem(vars(envs), variable, raising=False)
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(module, "get_forward_context", lambda: context)
    monkeypatch.setattr(module, "current_workspace_manager", lambda: workspace)
    monkeypatch.setattr(module, "get_current_vllm_config_or_none", lambda: vllm_config)
    monkeypatch.setattr(module, "_reserve_row_shard_exchange_transient", lambda *args: None)
    monkeypatch.setattr(module, "mqa_logits_use_mx_scales", lambda: sm100)
    empty = {name: torch.empty(4, HEADS, device="meta") for name in ("hidden_states", "kv_cache", "q_quant", "weights")}
    buffer = torch.empty(4, 8, dtype=torch.int32, device="meta")
    with Largest() as largest:
        getattr(module, op)(**{**COMMON, **empty, "topk_indices_buffer": buffer, width: columns, **more, **extra})
    return largest.found


@pytest.mark.parametrize("which", OPS)
@pytest.mark.parametrize(
    ("policy", "columns", "vllm_config", "sm100", "extra", "wanted"),
    [
        # prefill as it is capped: 256 rows of 512 columns; decode 24 rows of 512
        ("constant_bytes", 512, config(4, 256, 5), False, {}, 256 * 512 * 4),
        # prefill 1 MiB in whole chunks of 96 rows x 256 columns: 10; decode 31 tiles of 8,448 columns, 1,047,552 bytes
        ("constant_bytes", 8193, config(64, 96, 5), False, {}, 31 * 8448 * 4),
        # the same without speculation: no more rows than sequences
        ("constant_bytes", 8193, config(8, 96, None), False, {}, 10 * 96 * 256 * 4),
        # SM100: 6 bytes, BF16 and its FP32 copy. Decode 20 rows of 8,193 columns, which are 22 splits of 384, which are
        # 17 steps of 512; prefill 3 steps of 96 rows x 512 columns
        ("constant_bytes", 8193, config(64, 96, 5), True, {}, 20 * 8704 * 6),
        ("constant_bytes", 8193, config(2, 96, None), True, {}, 3 * 96 * 512 * 6),
        # under decode context parallelism prefill is as wide as the fullest rank, 256 of 512 columns; decode is not
        ("constant_bytes", 512, config(4, 256, 5), False, {"dcp_world_size": 2}, 256 * 256 * 4),
        # a merge across ranks reads FP32 whatever the backend
        ("constant_bytes", 8193, config(64, 96, 5), True, {"topk_backend": "deep_select", "dcp_world_size": 2},
         20 * 8704 * 6),
    ],
)  # fmt: skip
def test_reservation(
    which: str, policy: str, columns: int, vllm_config: Any, sm100: bool, extra: dict[str, Any], wanted: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    found = reserved_bytes(which, columns, vllm_config, monkeypatch, policy=policy, sm100=sm100, **extra)
    assert found == wanted


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("which", OPS)
def test_a_dummy_step_outside_of_profiling_takes_nothing(
    which: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A running engine has no current configuration, and no memory that was not reserved."""
    assert reserved_bytes(which, 1 << 20, None, monkeypatch, policy=policy) == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_without_scheduler_the_budget_stays(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the shared op; upstream's kpool op itself reads the scheduler of a configuration."""
    found = reserved_bytes("shared", 1 << 20, SimpleNamespace(compilation_config=None), monkeypatch, policy=policy)
    assert found == MIB


def test_deep_select_of_the_shared_op_keeps_decode_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    found = reserved_bytes(
        "shared", 8192, config(64, 96, 5), monkeypatch, sm100=True, budget_mb=16, topk_backend="deep_select"
    )
    assert found == 384 * 8704 * 2


def test_deep_select_of_the_shared_op_reserves_the_copy_of_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill copies BF16 logits to FP32 whatever the top-k of decode is: 2,048 rows of 512 columns."""
    found = reserved_bytes(
        "shared", 512, config(1, 2048, None), monkeypatch, sm100=True, budget_mb=6, topk_backend="deep_select"
    )
    assert found == 2048 * 512 * 6


@pytest.mark.parametrize("which", OPS)
def test_the_deployment_of_pull_request_62860(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """256 sequences, 1,048,576 tokens, 5 speculative tokens, SM100, 512 MiB.

    1,048,576 columns are 2,731 splits of 384, which are 2,049 steps of 512. A tile has 85 such rows; a prefill launch
    takes 21 steps of 8,192 rows x 512 columns, 528,482,304 bytes.
    """
    found = reserved_bytes(which, 1_048_576, config(256, 8192, 5), monkeypatch, sm100=True, budget_mb=512)
    assert found == 85 * 1_049_088 * 6 == 535_034_880
    assert 21 * 8192 * 512 * 6 < found <= 512 * MIB < 86 * 1_049_088 * 6


@pytest.mark.parametrize(("world_size", "planned"), [(1, True), (2, False)])
def test_prefill_of_pcp_with_dcp_is_reserved_as_upstream_plans_it(
    world_size: int, planned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the full width, which PCP does not shard; decode is tiled all the same, or 384 rows would take 13 MB."""
    found = reserved_bytes("shared", 8193, config(64, 96, 5), monkeypatch, use_pcp=True, dcp_world_size=world_size)
    assert found == (31 * 8448 * 4 if planned else (MIB // 4 + 96 * 255 + 3 * 8448) * 4)


AS_UPSTREAM = [("fixed_width", True), ("upstream", True), *((policy, False) for policy in POLICIES)]


@pytest.mark.parametrize(("policy", "cuda"), AS_UPSTREAM)
@pytest.mark.parametrize("sm100", [False, True])
def test_other_policies_and_platforms_reserve_as_upstream(
    policy: str, cuda: bool, sm100: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The budget in the shared op; in the kpool op the larger of it and FP32 rows that are not rounded."""
    for sequences, rows in ((8, 48), (64, 96), (1, 6)):
        given = {"policy": policy, "cuda": cuda, "sm100": sm100}
        assert reserved_bytes("shared", 8193, config(sequences, 96, 5), monkeypatch, **given) == MIB
        found = reserved_bytes("kpool", 8193, config(sequences, 96, 5), monkeypatch, **given)
        assert found == max(MIB, rows * 8193 * 4)


@pytest.mark.parametrize("ratio", [1, 4])
@pytest.mark.parametrize("max_model_len", [4096, 4097, 4099, 65_536])
def test_reserved_prefill_is_the_launch_of_the_builder(
    ratio: int, max_model_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The op knows ``max_model_len // ratio`` columns, and the builder must not allow a launch more than those."""
    prefill = importlib.import_module("vllm.model_executor.layers.sparse_indexer_prefill")
    indexer = importlib.import_module("vllm.v1.attention.backends.mla.indexer")
    found = reserved_bytes("kpool", max_model_len // ratio, config(1, 512, None), monkeypatch, budget_mb=64)
    builder = object.__new__(indexer.DeepseekV32IndexerMetadataBuilder)
    builder.vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(
            max_model_len=max_model_len, hf_text_config=SimpleNamespace(index_n_heads=HEADS)
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=512),
    )  # fmt: skip
    builder.dcp_world_size, builder.use_pcp, builder.compress_ratio = 1, False, ratio
    builder.compressed_cp_interleave_size = 1
    monkeypatch.setattr(importlib.import_module("vllm.platforms").current_platform, "is_cuda", lambda: True)
    assert prefill.builder_launch(builder).live_bytes == found
