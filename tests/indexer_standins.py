"""The sparse indexer's decode on a CPU: the real ops of the vLLM on the path, with stand-ins for device kernels.

The scorer has DeepGEMM's rounding: a row takes whole KiB after its columns were rounded to a KV split. What it does
not score, behind a row's length and behind the columns, is garbage.
"""

from __future__ import annotations

import importlib
import sys
import types
import weakref
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from indexer_steps import DIM, K, Step, decode_stride, pack_seq, row_ends, scores_of, unpack_seq
from vllm_modules import load

KERNELS = "vllm.model_executor.kernels.attention.dsa"
OPS = {
    "shared": ("vllm.model_executor.layers.sparse_attn_indexer", "sparse_attn_indexer", "max_model_len"),
    "kpool": ("vllm.models.glm5next.nvidia.sparse_indexer", "sparse_attn_indexer_kpool", "max_pool_len"),
}


def overlay(name: str) -> types.ModuleType:
    return importlib.import_module(f"vllm.model_executor.layers.sparse_indexer_{name}")


@dataclass
class Call:
    """One call of the scorer: its units, its schedule, what it allocates and what it finds alive."""

    start: int
    units: int
    schedule: torch.Tensor
    indices: torch.Tensor | None
    earlier_alive: bool
    bytes: int


@dataclass
class Device:
    """Stand-ins for the kernels of one run."""

    sm100: bool = False
    garbage: float = float("nan")
    calls: list[Call] = field(default_factory=list)
    schedules: list[tuple[torch.Tensor, int, int, torch.Tensor | None, torch.Tensor]] = field(default_factory=list)
    ranked: list[tuple[str, torch.dtype, int, int]] = field(default_factory=list)
    gathered: list[tuple[int, ...]] = field(default_factory=list)
    alive: list[weakref.ref[torch.Tensor]] = field(default_factory=list)

    def schedule(self, lens: torch.Tensor, page: int, units: int, indices: Any = None) -> torch.Tensor:
        made = torch.tensor([len(self.schedules)])
        self.schedules.append((lens, page, units, indices, made))
        return made

    def score(
        self, q: Any, kv_cache: Any, weights: Any, lens: torch.Tensor, tables: torch.Tensor, schedule: torch.Tensor,
        max_model_len: int, indices: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        alive, (units, next_n) = any(one() is not None for one in self.alive), q[0].shape[:2]
        assert len(lens) == len(tables) == units
        exact = scores_of(q, kv_cache[:, :, 0], weights, tables, max_model_len)
        visible = torch.arange(max_model_len) < row_ends(lens, next_n)[:, None]
        dtype = torch.bfloat16 if self.sm100 else torch.float32
        storage = torch.full((units * next_n, decode_stride(max_model_len, self.sm100)), self.garbage, dtype=dtype)
        logits = storage[:, :max_model_len]
        logits.copy_(torch.where(visible, exact, self.garbage))
        self.calls.append(Call(lens.storage_offset() // lens.stride(0), units, schedule, indices, alive, 0))
        self._count(logits)
        return logits

    def fp32(self, logits: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        if logits.dtype == torch.float32:
            return logits
        assert ends.shape == (logits.shape[0],)
        copy = torch.empty_strided(logits.shape, logits.stride(), dtype=torch.float32)
        copy.copy_(torch.where(torch.arange(logits.shape[1]) < ends[:, None], logits.float(), self.garbage))
        self._count(copy)
        return copy

    def _count(self, logits: torch.Tensor) -> None:
        self.calls[-1].bytes += logits.shape[0] * logits.stride(0) * logits.element_size()
        self.alive.append(weakref.ref(logits))

    def top_k(self, backend: str) -> torch.nn.Module:
        """vLLM's dispatcher as on an SM90 or SM100, ranking by its own CPU reference."""
        topk = importlib.import_module("vllm.model_executor.layers.indexer_topk")
        real, reference, device = topk.SparseIndexerTopk(backend), topk.get_indexer_topk("torch"), self
        real._is_cuda = real._cooperative_capable = True
        if backend in ("torch", "deep_select"):
            real.resolve_backend = lambda *args: backend

        def rank(logits: torch.Tensor, lens: Any, next_n: int, out: Any, k: int, max_seq_len: int) -> None:
            chosen = real.resolve_backend(logits, k, logits.shape[0])
            device.ranked.append((chosen, logits.dtype, logits.shape[0], max_seq_len))
            reference(logits, lens, next_n, out, k, max_seq_len)

        real.forward = rank
        return real

    def pack(
        self, logits: Any, topk: torch.Tensor, packed: torch.Tensor, rank: int, world: int, turn: int, starts: Any
    ) -> None:  # fmt: skip
        """(score, global id) of this rank's candidates; the other keys belong to the other ranks."""
        assert len(logits) == len(topk) == len(packed)
        packed[..., 0] = logits.gather(1, topk.long().clamp(min=0)).masked_fill(topk < 0, float("-inf"))
        packed[..., 1] = torch.where(topk < 0, -1, (topk // turn * world + rank) * turn + topk % turn).float()

    def all_gather(self, packed: torch.Tensor, dim: int) -> torch.Tensor:
        """With the candidates of a second rank: scores between this rank's, ids of keys that this rank has not."""
        self.gathered.append(tuple(packed.shape))
        draw = torch.Generator().manual_seed(5)
        other = torch.stack(
            [torch.randint(0, 90, packed.shape[:2], generator=draw) + 0.5 / 4096,
             torch.arange(packed.shape[1]).expand(packed.shape[:2]) * 2.0 + 1], dim=-1,
        )  # fmt: skip
        return torch.cat([packed, other], dim=dim)

    @staticmethod
    def select(gathered: torch.Tensor, k: int, out: torch.Tensor) -> None:
        order = gathered[..., 0].sort(dim=1, descending=True, stable=True).indices[:, :k]
        out.copy_(gathered[..., 1].gather(1, order))


def run(
    step: Step, monkeypatch: pytest.MonkeyPatch, *, budget: int, policy: str = "constant_bytes", which: str = "shared",
    sm100: bool = False, backend: str = "torch", k: int = K, garbage: float = float("nan"), extra_columns: int = 0,
    **arguments: Any,
) -> tuple[torch.Tensor, Device]:  # fmt: skip
    """One call of an op; ``budget`` in bytes. Returns the buffer's rows of the step's tokens, and the device."""
    shape, device, decode = step.shape, Device(sm100, garbage), overlay("decode")
    name, op, width = OPS[which]
    module, shared, deep_gemm = load(name), load(OPS["shared"][0]), load("vllm.utils.deep_gemm")
    metadata = load("vllm.v1.attention.backends.mla.indexer").DeepseekV32IndexerMetadata(
        seq_lens=step.decode.seq_lens, max_seq_len=shape.lengths[1], num_decodes=shape.units,
        slot_mapping=torch.zeros(shape.tokens, dtype=torch.int64), num_decode_tokens=shape.tokens, num_prefills=0,
        num_prefill_tokens=0, decode=step.decode,
    )  # fmt: skip
    kernels = types.ModuleType(f"{KERNELS}.dcp_indexer_cutedsl")
    kernels.pack_dcp_topk_candidates_cutedsl = device.pack  # type: ignore[attr-defined]
    kernels.stable_topk_from_gathered_candidates_cutedsl = device.select  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    monkeypatch.setattr(load(KERNELS), "dcp_indexer_cutedsl", kernels, raising=False)
    settings = SimpleNamespace(VLLM_NEAPTIDE_INDEXER_LOGITS_POLICY=policy, VLLM_SPARSE_INDEXER_MAX_LOGITS_MB=budget)
    replaced: dict[Any, dict[str, Any]] = {
        decode: {
            "envs": settings, "budget_bytes": int, "num_compute_units": lambda *args: 132,
            "get_paged_mqa_logits_metadata": device.schedule, "mqa_logits_use_mx_scales": lambda: sm100,
            "current_platform": SimpleNamespace(is_cuda=lambda: True),
        },
        deep_gemm: {"mqa_logits_use_mx_scales": lambda: sm100},
        load("vllm.v1.attention.ops.common"): {"pack_seq_triton": pack_seq, "unpack_seq_triton": unpack_seq},
        shared: {
            "get_dcp_group": lambda: device, "_assert_cutedsl_dcp_merge_supported": lambda *args: None,
        },
    }  # fmt: skip
    context = SimpleNamespace(attn_metadata={"k": metadata}, cudagraph_runtime_mode=None)
    for one in (shared, module):
        replaced.setdefault(one, {}).update(
            get_forward_context=lambda: context, fp8_fp4_paged_mqa_logits=device.score, as_fp32_logits=device.fp32,
            get_indexer_topk=device.top_k, pack_seq_triton=pack_seq, unpack_seq_triton=unpack_seq,
        )  # fmt: skip
    for target, values in replaced.items():
        for attribute, value in values.items():
            monkeypatch.setattr(target, attribute, value)
    if which == "shared":
        arguments |= {"use_pcp": False, "pcp_shard_decode_requests": False, "dense_mha_metadata_layer_name": ""}
    buffer = torch.full((shape.rows, k + extra_columns), -7, dtype=torch.int32)
    getattr(module, op)(
        hidden_states=torch.empty(shape.rows, 1), k_cache_prefix="k", kv_cache=step.kv_cache, q_quant=step.q,
        q_scale=step.q_scale, k=None, weights=step.weights, quant_block_size=128, scale_fmt=None, topk_tokens=k,
        head_dim=DIM, total_seq_lens=64, topk_indices_buffer=buffer, skip_k_cache_insert=True,
        use_fp4_cache=shape.fp4, topk_backend=backend, **{width: shape.columns}, **arguments,
    )  # fmt: skip
    return buffer[: shape.tokens], device
