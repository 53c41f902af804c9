"""Prefill through the real ops: launches of one canonical size select what upstream's sizes select.

Runs the ops of the vLLM on the path, on a CPU. Only the device kernels are replaced: the K gather, the scorer (which
has DeepGEMM's rounding, and garbage wherever no score belongs), the FP32 copy and the row top-k.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_modules import load

HEADS, DIM, TOPK, ROWS, COLUMNS = 32, 8, 16, 64, 2048
# Whole full chunks up to 1,024 columns of FP32, and up to 512 of BF16 with its FP32 copy, which are 192 KiB.
BUDGET = 256 << 10
Scores = Callable[[torch.Tensor], torch.Tensor]
OPS = {
    "shared": (
        "vllm.model_executor.layers.sparse_attn_indexer", "sparse_attn_indexer",
        {"max_model_len": COLUMNS, "use_pcp": False, "pcp_shard_decode_requests": False,
         "dense_mha_metadata_layer_name": ""},
    ),
    "kpool": (
        "vllm.models.glm5next.nvidia.sparse_indexer", "sparse_attn_indexer_kpool", {"max_pool_len": COLUMNS},
    ),
}  # fmt: skip
# Steps of a prefill: (rows, keys) of each request.
STEPS = [
    [(64, 64)], [(64, 512)], [(64, 960)], [(64, 1024)], [(64, 1088)], [(64, 1984)], [(64, 2048)],
    [(20, 700), (30, 31), (14, 900)], [(5, 5), (3, 2048), (40, 2000), (16, 17)], [(1, 1)], [(7, 2048)],
]  # fmt: skip


def some_infinite(scores: torch.Tensor) -> torch.Tensor:
    scores[:, 1::3] = float("-inf")
    return scores


SCORES: dict[str, Scores] = {"random": lambda s: s, "ties": lambda s: (s / 8).floor(), "infinite": some_infinite}


class Device:
    """Stand-ins for the device kernels; keeps what each launch allocated and what the top-k was given."""

    def __init__(self, scores: Scores, layout: Any) -> None:
        self.keys = torch.randn(16, COLUMNS, DIM, generator=torch.Generator().manual_seed(5))
        self.scores, self.layout = scores, layout
        self.launches: list[tuple[int, int]] = []
        self.copies: list[tuple[tuple[int, ...], int]] = []
        self.ranked: list[tuple[int, torch.dtype]] = []

    def live_bytes(self) -> list[int]:
        """Bytes of each launch's logits and of their copy."""
        copies = [size for _, size in self.copies] or [0] * len(self.launches)
        sizes = [allocated * self.layout.element_bytes for _, allocated in self.launches]
        return [size + copy for size, copy in zip(sizes, copies, strict=True)]

    def gather(self, cache: Any, k_quant: torch.Tensor, k_scale: Any, table: Any, lens: torch.Tensor) -> None:
        bounds = lens.tolist()
        for request, start, end in zip(table[:, 0].tolist(), bounds, bounds[1:], strict=False):
            k_quant[start:end] = self.keys[request, : end - start]

    def score(self, q: Any, kv: Any, weights: torch.Tensor, starts: Any, ends: Any, width: int) -> torch.Tensor:
        rows, bf16 = q[0].shape[0], self.layout.element_bytes == 2
        step = 512 if bf16 else 256
        stride = -(-width // step) * step
        storage = torch.full((-(-rows // 4) * 4, stride), float("inf"), dtype=torch.bfloat16 if bf16 else torch.float)
        self.launches.append((rows, storage.numel()))
        scores = self.scores((torch.einsum("mhd,nd->mhn", q[0], kv[0]).relu() * weights[:, :, None]).sum(1))
        for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
            storage[row, : end - start] = scores[row, start:end]
        return storage[:rows, :width]

    def copy(self, logits: torch.Tensor, row_ends: torch.Tensor) -> torch.Tensor:
        if logits.dtype == torch.float32:
            return logits
        out = torch.empty_strided(logits.shape, logits.stride(), dtype=torch.float32)
        self.copies.append((tuple(logits.shape), out.untyped_storage().nbytes()))
        return out.copy_(logits)

    def top_k(self, logits: torch.Tensor, starts: Any, ends: torch.Tensor, out: torch.Tensor, *rest: int) -> None:
        assert rest[:3] == (logits.shape[0], logits.stride(0), logits.stride(1))
        self.ranked.append((logits.shape[1], logits.dtype))
        for row, end in enumerate(ends.tolist()):
            best = logits[row, :end].sort(descending=True, stable=True).indices[: out.shape[1]]
            out[row, : best.numel()] = best.to(torch.int32)


def metadata(step: list[tuple[int, int]], launch: Any, plan: Any) -> Any:
    """The indexer's metadata of one prefill step, planned for ``plan`` and scored with ``launch``."""
    indexer = importlib.import_module("vllm.v1.attention.backends.mla.indexer")
    planner = importlib.import_module("vllm.model_executor.layers.sparse_indexer_plan")
    rows, keys = [r for r, _ in step], [k for _, k in step]
    chunks = []
    for requests, where in planner.plan_chunks(rows, keys, keys, 4 * COLUMNS, plan):
        starts, ends, bounds = [], [], [0]
        for count, length in step[requests]:
            starts += [bounds[-1]] * count
            ends += range(bounds[-1] + length - count + 1, bounds[-1] + length + 1)
            bounds.append(bounds[-1] + length)
        lens, at = torch.tensor(bounds, dtype=torch.int32), sum(rows[: requests.start])
        chunks.append(indexer.DeepseekV32IndexerPrefillChunkMetadata(
            block_table=torch.arange(requests.start, requests.stop, dtype=torch.int32)[:, None],
            cu_seqlen_ks=torch.tensor(starts, dtype=torch.int32)[where],
            cu_seqlen_ke=torch.tensor(ends, dtype=torch.int32)[where], cu_seq_lens=lens,
            token_to_seq=torch.zeros(bounds[-1], dtype=torch.int32), total_seq_lens=bounds[-1],
            max_seqlen_k=max(keys[requests]), token_start=at + where.start, token_end=at + where.stop,
            num_reqs=len(step[requests]), local_cu_seq_lens=lens, local_total_seq_lens=bounds[-1],
            max_local_total_seq_lens=bounds[-1], skip_kv_gather=where.start > 0,
        ))  # fmt: skip
    tokens = sum(rows)
    return indexer.DeepseekV32IndexerMetadata(
        seq_lens=torch.tensor(keys), max_seq_len=COLUMNS, slot_mapping=torch.zeros(tokens, dtype=torch.int64),
        num_decodes=0, num_decode_tokens=0, num_prefills=len(step), num_prefill_tokens=tokens,
        prefill=indexer.DeepseekV32IndexerPrefillMetadata(
            chunks=chunks, max_prefill_seq_len=COLUMNS, logits_launch=launch
        ),
    )  # fmt: skip


def run(which: str, device: Device, meta: Any, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The top-k indices that an op writes for a step."""
    name, op, last = OPS[which]
    module: types.ModuleType = load(name)
    tokens, random = meta.num_prefill_tokens, torch.Generator().manual_seed(6)
    space = [torch.empty(4 * COLUMNS, DIM), torch.empty(4 * COLUMNS, 4, dtype=torch.uint8)]
    kernels = SimpleNamespace(cp_gather_indexer_k_quant_cache=device.gather, top_k_per_row_prefill=device.top_k)
    context = SimpleNamespace(attn_metadata={"k": meta}, cudagraph_runtime_mode=None)
    monkeypatch.setattr(module, "get_forward_context", lambda: context)
    monkeypatch.setattr(
        module, "current_workspace_manager", lambda: SimpleNamespace(get_simultaneous=lambda *specs: space)
    )
    monkeypatch.setattr(module, "fp8_fp4_mqa_logits", device.score)
    monkeypatch.setattr(module, "as_fp32_logits", device.copy)
    monkeypatch.setattr(module, "ops", kernels, raising=False)
    monkeypatch.setattr(torch.ops, "_C", kernels)
    buffer = torch.full((tokens, TOPK), -7, dtype=torch.int32)
    getattr(module, op)(
        hidden_states=torch.empty(tokens, 1), k_cache_prefix="k", kv_cache=torch.empty(1),
        q_quant=torch.randn(tokens, HEADS, DIM, generator=random), q_scale=None, k=None,
        weights=torch.rand(tokens, HEADS, generator=random), quant_block_size=128, scale_fmt=None, topk_tokens=TOPK,
        head_dim=DIM, total_seq_lens=4 * COLUMNS, topk_indices_buffer=buffer, skip_k_cache_insert=True, **last,
    )  # fmt: skip
    return buffer.tolist()


def launch_of(policy: str, *, sm100: bool = False, budget: int = BUDGET) -> Any:
    sizes = importlib.import_module("vllm.model_executor.layers.sparse_indexer_logits")
    layout = sizes.logits_layout(sm100=sm100, fp32_copy=True)
    return sizes.prefill_launch(policy, budget, ROWS, COLUMNS, HEADS, layout)


@pytest.mark.parametrize("which", OPS)
@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize(
    ("policy", "sm100"), [("constant_bytes", False), ("constant_bytes", True), ("fixed_width", True)]
)
def test_selection_is_that_of_upstreams_sizes(
    which: str, scores: str, policy: str, sm100: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = launch_of(policy, sm100=sm100)
    short = 0
    for step in STEPS:
        wide, exact = Device(SCORES[scores], launch.layout), Device(SCORES[scores], launch.layout)
        found = run(which, wide, metadata(step, launch, launch), monkeypatch)
        assert found == run(which, exact, metadata(step, None, launch), monkeypatch)
        assert wide.ranked == exact.ranked
        assert all(allocated <= launch.elements for _, allocated in wide.launches)
        assert policy != "constant_bytes" or max(wide.live_bytes()) <= BUDGET
        short += sum(-1 in row for row in found)
        assert not any(-7 in row for row in found)
    assert short > 0


@pytest.mark.parametrize("which", OPS)
@pytest.mark.parametrize(
    ("sm100", "budget", "width"),
    [(False, BUDGET, 1024), (True, BUDGET, 512), (True, 384 << 10, 1024)],
    ids=["sm90", "sm100", "sm100-384-KiB"],
)
def test_every_full_chunk_allocates_the_canonical_size(
    which: str, sm100: bool, budget: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the FP32 copy of BF16 logits, which is made at the wide stride and narrowed afterwards."""
    launch = launch_of("constant_bytes", sm100=sm100, budget=budget)
    device = Device(SCORES["random"], launch.layout)
    for keys in range(128, COLUMNS + 1, 128):
        run(which, device, metadata([(ROWS, keys)], launch, launch), monkeypatch)
    full = [allocated for rows, allocated in device.launches if rows == ROWS]
    assert len(full) == width // 128
    assert set(full) == {ROWS * width}
    assert max(allocated for _, allocated in device.launches) == ROWS * width
    assert max(device.live_bytes()) == ROWS * width * (6 if sm100 else 4) <= budget
    assert {dtype for _, dtype in device.ranked} == {torch.float32}
    assert sorted({ranked for ranked, _ in device.ranked}) == list(range(128, COLUMNS + 1, 128))
    if sm100:
        assert {shape for shape, _ in device.copies if shape[0] == ROWS} == {(ROWS, width)}
        assert {size for shape, size in device.copies if shape[0] == ROWS} == {ROWS * width * 4}
        assert len(device.copies) == len(device.launches)


@pytest.mark.parametrize("which", OPS)
@pytest.mark.parametrize("step", [[(64, 1000)], [(64, 2048)], [(20, 700), (30, 31), (14, 900)]])
def test_row_sharded_launches_stay_within_the_canonical_size(
    which: str, step: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank of three scores its own rows, at its own widths; together they select what one rank does."""
    shared, launch, shares = load(OPS["shared"][0]), launch_of("constant_bytes"), [39, 5, 20]
    whole = run(which, Device(SCORES["random"], launch.layout), metadata(step, launch, launch), monkeypatch)
    monkeypatch.setattr(shared.PrefillRowShard, "exchange_topk", lambda self, buffer, width: None)
    found: list[list[int]] = []
    for rank, share in enumerate(shares):
        monkeypatch.setattr(shared, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
        meta, device = metadata(step, launch, launch), Device(SCORES["random"], launch.layout)
        meta.prefill.row_shard_sizes = shares
        rows = run(which, device, meta, monkeypatch)
        found += rows[len(found) : len(found) + share]
        assert sum(count for count, _ in device.launches) == share
        assert all(allocated <= launch.elements for _, allocated in device.launches)
    assert found == whole
