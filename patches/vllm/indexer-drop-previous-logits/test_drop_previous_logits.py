"""The logits of one prefill launch are dead when the next launch, or decode, allocates.

Runs the real ops of the vLLM on the path, on a CPU. Only the device kernels are replaced: the K
gather, the scorer (which has DeepGEMM's column rounding) and the row top-k.
"""

from __future__ import annotations

import gc
import importlib
import sys
import types
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_modules import load

ROWS, HEADS, DIM, TOPK, LAUNCHES = 6, 2, 8, 4, 3


class Device:
    """Stand-ins for the device kernels, watching whether earlier logits are alive at each launch."""

    def __init__(self) -> None:
        self.keys = torch.randn(64, DIM)
        self.last: weakref.ref[torch.Tensor] | None = None
        self.alive_at_launch: list[bool] = []

    def gather(self, cache: Any, k_quant: torch.Tensor, k_scale: Any, table: Any, lens: Any) -> None:
        k_quant.copy_(self.keys[: k_quant.shape[0]])

    def score(self, q: Any, kv: Any, weights: torch.Tensor, starts: Any, ends: Any, width: int) -> torch.Tensor:
        gc.collect()
        self.alive_at_launch.append(self.last is not None and self.last() is not None)
        scores = torch.einsum("mhd,nd->mhn", q[0], kv[0]).relu() * weights[:, :, None]
        storage = torch.full((q[0].shape[0], -(-width // 256) * 256), float("nan"))
        logits = storage[:, :width]
        logits.copy_(scores.sum(1)[:, :width])
        self.last = weakref.ref(logits)
        return logits

    @staticmethod
    def top_k(logits: Any, starts: Any, ends: Any, out: torch.Tensor, *rest: int) -> None:
        for row, end in enumerate(ends.tolist()):
            count = min(out.shape[1], end)
            out[row, :count] = logits[row, :end].topk(count).indices.to(torch.int32)


def chunk(index: int) -> Any:
    indexer = importlib.import_module("vllm.v1.attention.backends.mla.indexer")
    start, width = index * ROWS, 16 * (index + 1)
    ends = torch.arange(width - ROWS, width, dtype=torch.int32) + 1
    lens = torch.tensor([0, width], dtype=torch.int32)
    return indexer.DeepseekV32IndexerPrefillChunkMetadata(
        block_table=torch.zeros(1, 1, dtype=torch.int32), cu_seqlen_ks=torch.zeros(ROWS, dtype=torch.int32),
        cu_seqlen_ke=ends, cu_seq_lens=lens, token_to_seq=torch.zeros(width, dtype=torch.int32),
        total_seq_lens=width, max_seqlen_k=width, token_start=start, token_end=start + ROWS, num_reqs=1,
        local_cu_seq_lens=lens, local_total_seq_lens=width, max_local_total_seq_lens=width,
    )  # fmt: skip


def metadata(launches: int) -> Any:
    indexer = importlib.import_module("vllm.v1.attention.backends.mla.indexer")
    tokens = launches * ROWS
    return indexer.DeepseekV32IndexerMetadata(
        seq_lens=torch.tensor([64]), max_seq_len=64, slot_mapping=torch.zeros(tokens, dtype=torch.int64),
        num_decodes=0, num_decode_tokens=0, num_prefills=1, num_prefill_tokens=tokens,
        prefill=indexer.DeepseekV32IndexerPrefillMetadata(
            chunks=[chunk(i) for i in range(launches)], max_prefill_seq_len=64
        ),
    )  # fmt: skip


def run(module: types.ModuleType, op: str, last: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[Device, Any]:
    """Run an op over three launches of growing width; returns the device and (indices, wanted indices)."""
    torch.manual_seed(0)
    device, tokens = Device(), LAUNCHES * ROWS
    context = SimpleNamespace(attn_metadata={"k": metadata(LAUNCHES)}, cudagraph_runtime_mode=None)
    workspace = SimpleNamespace(
        get_simultaneous=lambda *specs: [torch.empty(64, DIM), torch.empty(64, 4, dtype=torch.uint8)]
    )
    kernels = SimpleNamespace(cp_gather_indexer_k_quant_cache=device.gather, top_k_per_row_prefill=device.top_k)
    monkeypatch.setattr(module, "get_forward_context", lambda: context)
    monkeypatch.setattr(module, "current_workspace_manager", lambda: workspace)
    monkeypatch.setattr(module, "fp8_fp4_mqa_logits", device.score)
    monkeypatch.setattr(module, "ops", kernels, raising=False)
    monkeypatch.setattr(torch.ops, "_C", kernels)
    queries, weights = torch.randn(tokens, HEADS, DIM), torch.rand(tokens, HEADS)
    buffer = torch.full((tokens, TOPK), -7, dtype=torch.int32)
    getattr(module, op)(
        hidden_states=torch.empty(tokens, 1), k_cache_prefix="k", kv_cache=torch.empty(1), q_quant=queries,
        q_scale=None, k=None, weights=weights, quant_block_size=128, scale_fmt=None, head_dim=DIM,
        total_seq_lens=64, topk_indices_buffer=buffer, skip_k_cache_insert=True, **{"topk_tokens": TOPK, **last},
    )  # fmt: skip
    wanted = []
    for row in range(tokens):
        piece = chunk(row // ROWS)
        end = int(piece.cu_seqlen_ke[row % ROWS])
        scores = (torch.einsum("hd,nd->hn", queries[row], device.keys[:end]).relu() * weights[row][:, None]).sum(0)
        wanted.append(sorted(scores.topk(TOPK).indices.tolist()))
    return device, ([sorted(row) for row in buffer.tolist()], wanted)


OPS = {
    "shared": (
        "vllm.model_executor.layers.sparse_attn_indexer", "sparse_attn_indexer",
        {"max_model_len": 64, "use_pcp": False, "pcp_shard_decode_requests": False,
         "dense_mha_metadata_layer_name": ""},
    ),
    "kpool": (
        "vllm.models.glm5next.nvidia.sparse_indexer", "sparse_attn_indexer_kpool", {"max_pool_len": 64},
    ),
}  # fmt: skip


@pytest.mark.parametrize("which", OPS)
def test_previous_logits_are_dead_when_the_next_launch_allocates(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, op, last = OPS[which]
    device, (found, wanted) = run(load(name), op, last, monkeypatch)
    assert device.alive_at_launch == [False] * LAUNCHES
    assert found == wanted


def test_expanded_pools_are_dead_when_the_next_launch_allocates(monkeypatch: pytest.MonkeyPatch) -> None:
    """They lie in the block that their launch's logits left: alive, they would force a second one."""
    name, op, last = OPS["kpool"]
    module, held, alive = load(name), [], []

    def expand(pools: torch.Tensor, lens: torch.Tensor, size: int) -> torch.Tensor:
        out = torch.zeros(pools.shape[0], pools.shape[1] * size + size - 1, dtype=torch.int32)
        held.extend(weakref.ref(tensor) for tensor in (pools, out))
        return out

    def score(self: Device, *args: Any) -> torch.Tensor:
        gc.collect()
        alive.append(sum(ref() is not None for ref in held))
        return real(self, *args)

    real = Device.score
    monkeypatch.setattr(Device, "score", score)
    monkeypatch.setattr(module.kpool_ops, "expand_pools_and_append_tail", expand)
    # The buffer is wider than what is selected: each row's unfinished pool comes behind it.
    more = {"index_kpool": 2, "topk_tokens": TOPK - 2, "positions": torch.arange(LAUNCHES * ROWS)}
    run(module, op, {**last, **more}, monkeypatch)
    assert len(held) == 2 * LAUNCHES
    assert alive == [0] * LAUNCHES


@pytest.mark.parametrize("which", OPS)
def test_last_logits_are_dead_before_decode(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a mixed step decode allocates after prefill, inside the same call of the op."""
    name, op, last = OPS[which]
    module = load(name)
    seen: list[bool] = []
    real = metadata

    class Decode(Exception):
        pass

    def stop(*args: Any, **kwargs: Any) -> None:
        gc.collect()
        seen.append(device.last is not None and device.last() is not None)
        raise Decode

    device = Device()
    monkeypatch.setattr(sys.modules[__name__], "Device", lambda: device)
    monkeypatch.setattr(sys.modules[__name__], "metadata", lambda n: _with_decode(real(n)))
    monkeypatch.setattr(module, "kv_cache_as_quant_view", stop)
    with pytest.raises(Decode):
        run(module, op, last, monkeypatch)
    assert seen == [False]


def _with_decode(meta: Any) -> Any:
    meta.num_decodes = 1
    meta.decode = object()
    return meta
