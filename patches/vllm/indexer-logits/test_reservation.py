"""What the profiling run reserves for logits: enough for every launch and tile, and not more than the policy needs.

Runs the profiling branch of the real ops of the vLLM on the path, with tensors on the meta device, and reads the
largest storage that it makes.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm_modules import load

MIB, HEADS = 1 << 20, 32
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


def sizes() -> Any:
    return importlib.import_module("vllm.model_executor.layers.sparse_indexer_logits")


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
    policy: str = "constant_bytes", sm100: bool = False, budget_mb: int = 1, **extra: Any,
) -> int:  # fmt: skip
    name, op, width, more = OPS[which]
    module, envs = load(name), importlib.import_module("vllm.envs")
    prefill = importlib.import_module("vllm.model_executor.layers.sparse_indexer_prefill")
    monkeypatch.setattr(prefill, "current_platform", SimpleNamespace(is_cuda=lambda: True))
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
        # SM100 prefill: 5 steps of 96 rows x 512 columns, BF16 and its FP32 copy
        ("constant_bytes", 8193, config(64, 96, 5), True, {}, 5 * 96 * 512 * 6),
        # prefill at fixed width has the budget; decode 48 rows of 8,193 columns, as 33 steps of 256
        ("fixed_width", 8193, config(8, 3072, 5), False, {}, 48 * 8448 * 4),
        ("fixed_width", 8193, config(1, 3072, None), False, {}, MIB),
        # BF16 and its FP32 copy: 8,193 columns are 22 splits of 384, which are 17 steps of 512
        ("fixed_width", 8193, config(8, 3072, 5), True, {}, 48 * 8704 * 6),
        ("fixed_width", 8193, config(1, 3072, None), True, {}, MIB // 4 * 6),
        ("upstream", 8193, config(8, 3072, 5), False, {}, 48 * 8448 * 4),
        ("upstream", 8193, config(8, 3072, 5), True, {}, 48 * 8704 * 6),
        ("upstream", 1024, config(4, 3072, None), False, {}, MIB),
        ("upstream", 1024, config(4, 3072, None), True, {}, MIB // 4 * 6),
        # no more sequences than tokens in a batch
        ("upstream", 65_536, config(64, 16, None), False, {}, 16 * 65_536 * 4),
        # under decode context parallelism prefill is as wide as the fullest rank, 256 of 512 columns; decode is not
        ("constant_bytes", 512, config(4, 256, 5), False, {"dcp_world_size": 2}, 256 * 256 * 4),
        ("upstream", 8193, config(8, 3072, 5), False, {"dcp_world_size": 2}, 48 * 8448 * 4),
        # a merge across ranks reads FP32 whatever the backend
        ("upstream", 8193, config(8, 3072, 5), True, {"topk_backend": "deep_select", "dcp_world_size": 2},
         48 * 8704 * 6),
    ],
)  # fmt: skip
def test_reservation(
    which: str, policy: str, columns: int, vllm_config: Any, sm100: bool, extra: dict[str, Any], wanted: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    found = reserved_bytes(which, columns, vllm_config, monkeypatch, policy=policy, sm100=sm100, **extra)
    assert found == wanted


@pytest.mark.parametrize("policy", ["constant_bytes", "fixed_width", "upstream"])
@pytest.mark.parametrize(
    ("which", "vllm_config"),
    # Upstream's kpool op itself reads the scheduler of a config.
    [("shared", None), ("shared", SimpleNamespace(compilation_config=None)), ("kpool", None)],
)
def test_without_scheduler_the_budget_stays(
    which: str, policy: str, vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reserved_bytes(which, 1 << 20, vllm_config, monkeypatch, policy=policy) == MIB


def test_deep_select_of_the_shared_op_keeps_decode_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    found = reserved_bytes(
        "shared", 8192, config(64, 3072, 5), monkeypatch, policy="upstream", sm100=True, topk_backend="deep_select"
    )
    assert found == 384 * 8704 * 2


@pytest.mark.parametrize("policy", ["constant_bytes", "fixed_width", "upstream"])
def test_deep_select_of_the_shared_op_reserves_the_copy_of_prefill(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill copies BF16 logits to FP32 whatever the top-k of decode is: 2,048 rows of 512 columns, 1 Mi elements."""
    found = reserved_bytes(
        "shared", 512, config(1, 2048, None), monkeypatch,
        policy=policy, sm100=True, budget_mb=4, topk_backend="deep_select",
    )  # fmt: skip
    assert found == 2048 * 512 * 6


@pytest.mark.parametrize("which", OPS)
@pytest.mark.parametrize(
    ("policy", "wanted"),
    [
        # 256 sequences of 1 + 5 rows; 1,048,576 columns are 2,731 splits of 384, which are 2,049 steps of 512
        ("upstream", 1536 * 1_049_088 * 6),
        ("fixed_width", 1536 * 1_049_088 * 6),
        # prefill: 8,192 rows of 32 x 512 columns, BF16 and its FP32 copy; a decode tile has 85 rows, 535 MB
        ("constant_bytes", 8192 * 16_384 * 6),
    ],
)
def test_the_deployment_of_pull_request_62860(
    which: str, policy: str, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 sequences, 1,048,576 tokens, 5 speculative tokens, SM100, 512 MiB."""
    found = reserved_bytes(
        which, 1_048_576, config(256, 8192, 5), monkeypatch, policy=policy, sm100=True, budget_mb=512
    )
    assert found == wanted
    if policy == "constant_bytes":
        assert 85 * 1_049_088 * 6 <= 512 * MIB < 86 * 1_049_088 * 6
        assert found == 768 * MIB


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
    monkeypatch.setattr(prefill, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    assert prefill.builder_launch(builder).live_bytes == found


def settings(count: int) -> Iterator[tuple[str, int, int, Any, Any, int]]:
    """(policy, budget, columns, layout, config, reserved bytes) of random settings that are allowed."""
    rng, made = random.Random(4), 0
    while made < count:
        policy = rng.choice(["constant_bytes", "constant_bytes", "fixed_width"])
        budget, columns = rng.choice([4, 7, 64, 512]) * MIB, int(2 ** rng.uniform(4, 20.1))
        layout = sizes().logits_layout(sm100=rng.random() < 0.5, fp32_copy=True)
        vllm_config = config(int(2 ** rng.uniform(0, 9)), int(2 ** rng.uniform(0, 14)), rng.choice([None, 1, 3, 5]))
        try:
            found = sizes().reserved_logits_bytes(
                policy, budget, columns, HEADS, layout, vllm_config, varlen=layout.element_bytes == 2
            )
        except ValueError:
            continue
        made += 1
        yield policy, budget, columns, layout, vllm_config, found


def test_reservation_holds_every_planned_prefill_launch() -> None:
    planner, rng = importlib.import_module("vllm.model_executor.layers.sparse_indexer_prefill"), random.Random(5)
    for policy, budget, columns, layout, vllm_config, found in settings(400):
        batched, step = vllm_config.scheduler_config.max_num_batched_tokens, 1024 // layout.element_bytes
        launch = sizes().prefill_launch(policy, budget, batched, columns, HEADS, layout)
        keys = [columns, rng.randint(1, columns), rng.randint(1, columns), 1]
        rows = [max(1, batched // rng.randint(1, 4)) for _ in keys]
        for requests, where in planner.plan_chunks(rows, keys, keys, 40 * columns, launch):
            count = where.stop - where.start
            stride = -(-launch.width(count, max(keys[requests])) // step) * step
            assert -(-count // 4) * 4 * stride * (4 if step == 256 else 6) <= found


def test_reservation_holds_every_decode_tile() -> None:
    """Native and padded steps (whole requests), flattened ones and the varlen form of SM100."""
    tiler, tiled = importlib.import_module("vllm.model_executor.layers.sparse_indexer_decode"), 0
    for policy, budget, columns, layout, vllm_config, found in settings(400):
        speculative, scheduler = vllm_config.speculative_config, vllm_config.scheduler_config
        next_n = 1 if speculative is None else 1 + speculative.num_speculative_tokens
        seqs = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
        varlen = layout.element_bytes == 2
        forms = [(seqs * next_n, 1)] if varlen else [(seqs * next_n, 1), (seqs, next_n)]
        for units, rows in forms:
            tiles = tiler.decode_tiles(policy, budget, units, rows, columns, varlen, layout)
            tiled += len(tiles) > 1
            for start, stop in tiles:
                assert sizes().decode_logits_bytes((stop - start) * rows, columns, layout) <= found
    assert tiled > 20
