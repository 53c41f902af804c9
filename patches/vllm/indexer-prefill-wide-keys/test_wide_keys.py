"""Constant bytes where the width of a launch is that of the key tensor: vLLM 0.27's real op on a CPU.

Only the device kernels are replaced: the K gather, the scorer (which allocates as DeepGEMM does) and the row top-k.
"""

from __future__ import annotations

import importlib
import random
import weakref
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

HEADS, DIM, TOPK, ROWS, CAPACITY = 32, 4, 8, 64, 4096
MIB = 1 << 20


def sizes() -> ModuleType:
    return importlib.import_module("vllm.model_executor.layers.sparse_indexer_logits")


def launch(budget: int = MIB, rows: int = ROWS, columns: int = 2048) -> Any:
    layout = importlib.import_module("vllm.model_executor.layers.sparse_indexer_layout").gathered_keys_layout()
    return sizes().prefill_launch("constant_bytes", budget, rows, columns, HEADS, layout)


class Device:
    """Stand-ins for the kernels; remembers what each launch allocated and whether earlier logits were alive."""

    def __init__(self) -> None:
        self.keys = torch.randn(CAPACITY, DIM)
        self.last: weakref.ref[torch.Tensor] | None = None
        self.allocated: list[int] = []
        self.alive: list[bool] = []

    def gather(self, cache: Any, k_quant: torch.Tensor, k_scale: Any, table: Any, lens: Any) -> None:
        k_quant.copy_(self.keys[: k_quant.shape[0]])

    def score(self, q: Any, kv: Any, weights: torch.Tensor, starts: Any, ends: Any, clean_logits: bool) -> torch.Tensor:
        assert not clean_logits
        self.alive.append(self.last is not None and self.last() is not None)
        rows, keys = q[0].shape[0], kv[0].shape[0]
        stride, step = -(-(keys + 256) // 256) * 256, 128 // HEADS
        storage = torch.full((-(-rows // step) * step, stride), float("nan"))
        self.allocated.append(storage.numel() * 4)
        scores = (torch.einsum("mhd,nd->mhn", q[0], self.keys[:keys]).relu() * weights[:, :, None]).sum(1)
        for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
            storage[row, start:end] = scores[row, start:end]
        logits = storage[:rows, :keys]
        self.last = weakref.ref(logits)
        return logits

    @staticmethod
    def top_k(logits: Any, starts: Any, ends: Any, out: torch.Tensor, *rest: int) -> None:
        for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
            count = min(out.shape[1], end - start)
            out[row, :count] = logits[row, start:end].topk(count).indices.to(torch.int32)


def chunk(index: int, keys: int) -> Any:
    indexer = importlib.import_module("vllm.v1.attention.backends.mla.indexer")
    lens = torch.tensor([0, keys], dtype=torch.int32)
    return indexer.DeepseekV32IndexerPrefillChunkMetadata(
        block_table=torch.zeros(1, 1, dtype=torch.int32), cu_seqlen_ks=torch.zeros(ROWS, dtype=torch.int32),
        cu_seqlen_ke=torch.arange(keys - ROWS, keys, dtype=torch.int32) + 1, cu_seq_lens=lens,
        token_to_seq=torch.zeros(keys, dtype=torch.int32), total_seq_lens=keys, token_start=index * ROWS,
        token_end=(index + 1) * ROWS, num_reqs=1, local_cu_seq_lens=lens, local_total_seq_lens=keys,
        max_local_total_seq_lens=keys,
    )  # fmt: skip


def run(made: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Device, list[list[int]]]:
    """The op over four chunks of a growing context, planned with ``made`` or, for None, as upstream."""
    torch.manual_seed(0)
    indexer = importlib.import_module("vllm.v1.attention.backends.mla.indexer")
    module = importlib.import_module("vllm.model_executor.layers.sparse_attn_indexer")
    device, tokens, chunks = Device(), 4 * ROWS, [chunk(i, 512 * (i + 1)) for i in range(4)]
    metadata = indexer.DeepseekV32IndexerMetadata(
        seq_lens=torch.tensor([2048]), max_seq_len=2048, slot_mapping=torch.zeros(tokens, dtype=torch.int64),
        num_decodes=0, num_decode_tokens=0, num_prefills=1, num_prefill_tokens=tokens,
        prefill=indexer.DeepseekV32IndexerPrefillMetadata(chunks=chunks, logits_launch=made),
    )  # fmt: skip
    context = SimpleNamespace(attn_metadata={"k": metadata}, cudagraph_runtime_mode=None)
    workspace = SimpleNamespace(
        get_simultaneous=lambda *specs: [torch.empty(CAPACITY, DIM), torch.empty(CAPACITY, 4, dtype=torch.uint8)]
    )
    kernels = SimpleNamespace(cp_gather_indexer_k_quant_cache=device.gather, top_k_per_row_prefill=device.top_k)
    monkeypatch.setattr(module, "get_forward_context", lambda: context)
    monkeypatch.setattr(module, "current_workspace_manager", lambda: workspace)
    monkeypatch.setattr(module, "fp8_fp4_mqa_logits", device.score)
    monkeypatch.setattr(module, "ops", kernels)
    buffer = torch.full((tokens, TOPK), -7, dtype=torch.int32)
    module.sparse_attn_indexer(
        hidden_states=torch.empty(tokens, 1), k_cache_prefix="k", kv_cache=torch.empty(1),
        q_quant=torch.randn(tokens, HEADS, DIM), q_scale=None, k=None, weights=torch.rand(tokens, HEADS),
        quant_block_size=128, scale_fmt=None, topk_tokens=TOPK, head_dim=DIM, max_model_len=2048,
        total_seq_lens=CAPACITY, topk_indices_buffer=buffer, skip_k_cache_insert=True, use_pcp=False,
        dense_mha_metadata_layer_name="",
    )  # fmt: skip
    return device, [sorted(row) for row in buffer.tolist()]


def test_every_chunk_allocates_the_canonical_size_and_ranks_as_upstream(monkeypatch: pytest.MonkeyPatch) -> None:
    made = launch()
    upstream, wanted = run(None, monkeypatch)
    device, found = run(made, monkeypatch)
    assert found == wanted
    assert len(set(upstream.allocated)) == 4
    assert device.allocated == [made.elements * 4] * 4
    assert device.alive == [False] * 4


def test_the_workspace_bounds_the_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget for more keys than there are: the kernel gets the workspace and no more."""
    made = launch(budget=64 * MIB, columns=1 << 17)
    device, found = run(made, monkeypatch)
    assert found == run(None, monkeypatch)[1]
    assert device.allocated == [ROWS * (CAPACITY + 256) * 4] * 4


def test_planned_launches_allocate_within_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random requests: every row once, and what DeepGEMM allocates for the keys of a pack stays within the size."""
    launcher = importlib.import_module("vllm.model_executor.layers.sparse_indexer_launch")
    rng = random.Random(1)
    for _ in range(200):
        rows = [rng.randint(1, ROWS) for _ in range(rng.randint(1, 6))]
        keys = [r + rng.randint(0, 2048 - r) for r in rows]
        made = launch(budget=rng.choice([1, 2, 3]) * MIB // 4 * 4)
        builder = SimpleNamespace(prefill_launch=made, dcp_world_size=1, cp_kv_cache_interleave_size=1)
        planned = launcher.plan_builder_chunks(
            builder, None, torch.tensor(keys), torch.tensor(rows), CAPACITY, MIB, request_offset=3
        )
        seen = []
        for requests, part in planned:
            total = sum(keys[requests.start - 3 : requests.stop - 3])
            stride = -(-(total + 256) // 256) * 256
            assert -(-(part.stop - part.start) // 4) * 4 * stride <= made.elements
            offset = sum(rows[: requests.start - 3])
            seen += range(offset + part.start, offset + part.stop)
        assert seen == list(range(sum(rows)))


def test_without_a_launch_size_the_plan_is_upstreams() -> None:
    launcher = importlib.import_module("vllm.model_executor.layers.sparse_indexer_launch")
    said = object()
    found = launcher.plan_builder_chunks(
        SimpleNamespace(prefill_launch=None), lambda *args, request_offset: said, None, None, 1, 1, request_offset=0
    )
    assert found is said


@pytest.mark.parametrize(
    ("sequences", "cuda", "wanted"),
    [
        # a decode step of 256 rows, and a prefill of whole chunks of 3,072 rows x 256 columns
        (256, True, 256 * 131072 * 4),
        (1, True, 21 * 3072 * 256 * 4),
        # as upstream
        (256, False, 64 * MIB),
    ],
)
def test_reservation_holds_a_decode_step_which_is_not_tiled(
    sequences: int, cuda: bool, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys_module = importlib.import_module("vllm.model_executor.layers.sparse_indexer_prefill_keys")
    monkeypatch.setattr(importlib.import_module("vllm.platforms").current_platform, "is_cuda", lambda: cuda)
    scheduler = SimpleNamespace(max_num_seqs=sequences, max_num_batched_tokens=3072)
    config = SimpleNamespace(scheduler_config=scheduler, speculative_config=None)
    assert keys_module.reserved_bytes(64 * MIB, 131072, HEADS, config, 1, 1) == wanted
