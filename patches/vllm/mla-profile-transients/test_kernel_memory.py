"""What FLASHMLA_SPARSE allocates, by its real methods on the meta device, and sizes known from elsewhere."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from live_bytes import LiveBytes

MIB = 1 << 20
ROWS, LATENT, ROPE, TOPK = 640, 512, 64, 2048
ATTENTION = "vllm.model_executor.layers.attention."


def module(name: str) -> Any:
    return importlib.import_module(name)


def call(heads: int, world: int, rows: int = ROWS, **more: Any) -> Any:
    sizes = {"latent": LATENT, "rope": ROPE, "element_bytes": 2, "query_bytes": 2} | more
    return module(ATTENTION + "mla_transients").MqaCall(rows=rows, heads=heads, world=world, **sizes)


def kernel(of: Any, **backend: Any) -> Any:
    memory = module(ATTENTION + "mla_kernel_memory")
    return memory.kernel_memory(of, memory.Backend(name="FLASHMLA_SPARSE", topk=TOPK, **backend))


def largest(kernel_memory: Any) -> int:
    steps = [kernel_memory.during, kernel_memory.after or ()]
    return max(sum(size for _, size in step) for step in steps)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.fixture
def flashmla(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The backend's module; the libraries' functions allocate as their sources say."""
    sparse = module("vllm.v1.attention.backends.mla.flashmla_sparse")

    def slots(req_id: Any, table: Any, topk: torch.Tensor, **options: Any) -> Any:
        found = torch.empty_like(topk)
        return (found, meta(topk.shape[0], dtype=torch.int32)) if options.get("return_valid_counts") else found

    def decode(q: torch.Tensor, head_dim_v: int, **rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        batch, rows, heads, _ = q.shape
        output, lse = meta(batch, rows, heads, head_dim_v), meta(batch, heads, rows, dtype=torch.float32)
        splits = batch + 1
        accumulators = [meta(splits, rows, heads, width, dtype=torch.float32) for width in (head_dim_v, 1)]
        del accumulators
        return output, lse

    def prefill(q: torch.Tensor, *rest: Any, **options: Any) -> tuple[torch.Tensor, ...]:
        rows, heads, _ = q.shape
        return meta(rows, heads, LATENT), *(meta(rows, heads, dtype=torch.float32) for _ in range(2))

    for name in ("triton_filter_and_convert_dcp_index", "triton_convert_req_index_to_global_index"):
        monkeypatch.setattr(sparse, name, slots)
    monkeypatch.setattr(sparse, "flash_mla_with_kvcache", decode)
    monkeypatch.setattr(sparse, "flash_mla_sparse_fwd", prefill)
    monkeypatch.setattr(sparse, "_fp8_kv_pages", lambda cache, size: (cache, 64))
    return sparse


def run(sparse: Any, heads: int, world: int, cache_dtype: str, method: str) -> int:
    made = object.__new__(sparse.FlashMLASparseImpl)
    made.__dict__.update(
        dcp_world_size=world, dcp_rank=0, num_heads=heads, softmax_scale=1.0, need_to_return_lse_for_decode=world > 1,
        fp8_decode_padded_heads=64 if heads <= 64 else 128, kv_cache_dtype=cache_dtype, prefill_padding=64,
        index_group=None, kv_lora_rank=LATENT, workspace_specs=[],
    )  # fmt: skip
    queries, cache = meta(ROWS, heads * world, LATENT + ROPE), meta(4, 64, 576)
    topk, numbers = meta(ROWS, TOPK, dtype=torch.int32), meta(ROWS, dtype=torch.int32)
    kernel_metadata = sparse.FlashMLASparseMetadata.FP8KernelMetadata(None, numbers, numbers)
    metadata = SimpleNamespace(
        fp8_extra_metadata=kernel_metadata, block_table=numbers, req_id_per_token=numbers, block_size=64,
        cp_kv_cache_interleave_size=1, num_decode_tokens=0, num_actual_tokens=ROWS,
    )  # fmt: skip
    arguments = [queries, cache, topk, metadata] + ([heads] if method == "_forward_bf16_kv" else [])
    with LiveBytes(queries, cache, topk, numbers) as live:
        held = getattr(made, method)(*arguments)
    del held
    return live.peak


@pytest.mark.parametrize(("heads", "world"), [(16, 4), (16, 2), (8, 4), (16, 1)])
def test_the_mixed_fp8_batch(flashmla: Any, heads: int, world: int) -> None:
    real = run(flashmla, heads, world, "fp8_ds_mla", "_forward_fp8_kv_mixed_batch")
    sized = largest(kernel(call(heads, world), cache_dtype="fp8_ds_mla", mixed=True, decode_heads=64))
    # The number of valid slots of a row, which this path does not ask for.
    assert sized - ROWS * 4 == real


@pytest.mark.parametrize("heads", [64, 128])
def test_the_bf16_cache(flashmla: Any, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashmla, "flat_kv_row_view", lambda cache, size: (cache, 64))
    real = run(flashmla, heads, 1, "auto", "_forward_bf16_kv")
    assert largest(kernel(call(heads, 1), cache_dtype="auto")) == real


def test_the_workspace_holds_the_separate_fp8_path() -> None:
    memory = kernel(call(64, 1), cache_dtype="fp8_ds_mla", mixed=False, decode_heads=64)
    assert (memory.output, [name for name, _ in memory.during]) == (0, ["top-k slots"])


def test_sizes_of_24_heads_on_four_ranks_at_8192_tokens() -> None:
    """The figures of the study of vLLM 0.33.0's seams: one gathered query, the output, an A2A's two buffers."""
    transients, of = module(ATTENTION + "mla_transients"), call(24, 4, rows=8192)
    assert of.query(of.heads, 2) * of.world == 864 * MIB
    assert of.output == 768 * MIB
    combine = transients.combine_tensors(of, transients.Route("nccl", "a2a"))
    assert combine["send"] + combine["receive"] == 1542 * MIB
    steps = {m.name: m for m in transients.moments(of, transients.Route("nccl", "a2a"), transients.Kernel((), 0))}
    assert steps["gather"].tensors["gathered by rank"] == steps["gather"].tensors["gathered by head"] == 864 * MIB


def test_output_and_query_measured_at_3072_tokens_of_64_heads() -> None:
    memory = kernel(call(64, 1, rows=3072), cache_dtype="auto")
    assert memory.output == 201_326_592
