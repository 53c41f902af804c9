"""One indexer layer of the vLLM on the path: real metadata builder, op and kernels over random keys."""

from __future__ import annotations

import importlib
import os
from types import SimpleNamespace
from typing import Any

HEADS, DIM, TOPK, PAGE = 32, 128, 2048, 64
POLICY = "VLLM_NEAPTIDE_INDEXER_LOGITS_POLICY"
SHARED = ("vllm.model_executor.layers.sparse_attn_indexer", "sparse_attn_indexer")
KPOOL = ("vllm.models.glm5next.nvidia.sparse_indexer", "sparse_attn_indexer_kpool")
LAUNCHES = [0]


def config(batched: int, seqs: int, columns: int, next_n: int) -> Any:
    """As much of a ``VllmConfig`` as the indexer's builder reads."""
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=batched, max_num_seqs=seqs),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1, tensor_parallel_size=1,
            cp_kv_cache_interleave_size=1,
        ),
        model_config=SimpleNamespace(max_model_len=columns, hf_text_config=SimpleNamespace(index_n_heads=HEADS)),
        attention_config=SimpleNamespace(
            sparse_mla_prefill_workspace_factor=1, resolve_indexer_kv_dtype=lambda default: default
        ),
        compilation_config=SimpleNamespace(cudagraph_mode=None),
        speculative_config=SimpleNamespace(
            num_speculative_tokens=next_n - 1, enable_adaptive_verification=False
        ) if next_n > 1 else None,
        num_speculative_tokens=next_n - 1,
    )  # fmt: skip


class Indexer:
    """One indexer: builder, paged cache of random keys, and the op, called as a layer calls it."""

    def __init__(self, batched: int, seqs: int, columns: int, kpool: int, next_n: int = 1) -> None:
        import torch
        from vllm.v1.attention.backends.mla import indexer
        from vllm.v1.kv_cache_interface import MLAAttentionSpec

        # Every policy gets the same keys and queries.
        torch.manual_seed(0)
        self.torch, self.columns, self.kpool = torch, columns, kpool
        self.device = torch.device("cuda", 0)
        spec = MLAAttentionSpec(
            block_size=PAGE * kpool, num_kv_heads=1, head_size=DIM + 4, dtype=torch.uint8, tokens_per_state=kpool
        )
        self.pages = -(-columns // (PAGE * kpool))
        self.builder = indexer.DeepseekV32IndexerMetadataBuilder(
            spec, ["k"], config(batched, seqs, columns, next_n), self.device, block_table_width=self.pages
        )
        self.workspace_rows = self.builder.max_prefill_buffer_size
        name, function = KPOOL if kpool > 1 else SHARED
        self.module: Any = importlib.import_module(name)
        self.op = getattr(self.module, function)
        self.context = SimpleNamespace(attn_metadata={}, cudagraph_runtime_mode=0)
        self.cache = self._random_cache()
        self.queries = torch.randn(batched, HEADS, DIM, device=self.device).to(torch.float8_e4m3fn)
        self.weights = torch.rand(batched, HEADS, device=self.device)
        self.hidden = torch.empty(batched, 1, device=self.device)
        self.buffer = torch.empty(batched, TOPK + kpool - 1, dtype=torch.int32, device=self.device)
        self._reserve_workspace()

    def _random_cache(self) -> Any:
        """Random keys in every page, written by vLLM's own kernel."""
        from vllm import _custom_ops as ops

        torch = self.torch
        cache = torch.zeros(self.pages, PAGE, DIM + 4, dtype=torch.uint8, device=self.device)
        for start in range(0, self.pages * PAGE, 1 << 18):
            stop = min(start + (1 << 18), self.pages * PAGE)
            keys = torch.randn(stop - start, DIM, dtype=torch.bfloat16, device=self.device)
            ops.indexer_k_quant_and_cache(keys, cache, torch.arange(start, stop, device=self.device), DIM, "ue8m0")
        return cache

    def _reserve_workspace(self) -> None:
        """As the profiling run does, so that no ladder pays for it."""
        self.module.current_workspace_manager().get_simultaneous(
            ((self.workspace_rows, DIM), self.torch.float8_e4m3fn),
            ((self.workspace_rows, 4), self.torch.uint8),
            ((1 << 20,), self.torch.uint8),
        )

    def metadata(self, rows: list[int], lens: list[int], table: Any) -> Any:
        """Metadata of a step: ``rows`` query rows and ``lens`` tokens of each request."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        torch = self.torch
        starts = torch.tensor([0, *rows], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        seq_lens = torch.tensor(lens, dtype=torch.int32)
        return self.builder.build(0, CommonAttentionMetadata(
            query_start_loc=starts.to(self.device), query_start_loc_cpu=starts, seq_lens=seq_lens.to(self.device),
            num_reqs=len(rows), num_actual_tokens=sum(rows), max_query_len=max(rows), max_seq_len=max(lens),
            block_table_tensor=table, slot_mapping=torch.zeros(sum(rows), dtype=torch.int64, device=self.device),
            seq_lens_cpu_upper_bound=seq_lens,
        ))  # fmt: skip

    def score(self, metadata: Any, rows: int, positions: Any = None) -> Any:
        """One layer's call; returns its rows of the top-k buffer."""
        vars(self.module)["get_forward_context"] = lambda: self.context
        self.context.attn_metadata = {"k": metadata}
        width = {"max_pool_len": self.columns // self.kpool} if self.kpool > 1 else {"max_model_len": self.columns}
        more = {
            "index_kpool": self.kpool, "positions": positions,
        } if self.kpool > 1 else {
            "use_pcp": False, "pcp_shard_decode_requests": False, "dense_mha_metadata_layer_name": "",
        }  # fmt: skip
        self.op(
            hidden_states=self.hidden[:rows], k_cache_prefix="k", kv_cache=self.cache, q_quant=self.queries[:rows],
            q_scale=None, k=None, weights=self.weights[:rows], quant_block_size=DIM, scale_fmt="ue8m0",
            topk_tokens=TOPK, head_dim=DIM, total_seq_lens=self.workspace_rows,
            topk_indices_buffer=self.buffer, skip_k_cache_insert=True, **width, **more,
        )  # fmt: skip
        return self.buffer[:rows]


def choose(policy: str | None) -> None:
    """Set the policy of what is built and run from here on."""
    os.environ.pop(POLICY, None)
    if policy is not None:
        os.environ[POLICY] = policy


def count_launches(module: Any) -> None:
    """Count the calls of a module's prefill scorer in :data:`LAUNCHES`, once for each module."""
    original = module.fp8_fp4_mqa_logits
    if getattr(original, "counted", False):
        return

    def counted(*args: Any) -> Any:
        LAUNCHES[0] += 1
        return original(*args)

    counted.counted = True  # type: ignore[attr-defined]
    module.fp8_fp4_mqa_logits = counted


def row_hashes(torch: Any, topk: Any) -> list[int]:
    """A hash of each row's set of indices, whatever their order."""
    mixed = (topk.long() + 2) * 0x9E3779B1
    mixed = (mixed ^ (mixed >> 15)) * 0x85EBCA77
    hashed: list[int] = mixed.sum(1).tolist()
    return hashed


def memory(torch: Any) -> tuple[int, int]:
    stats = torch.cuda.memory_stats()
    return stats["reserved_bytes.all.current"], stats.get("num_device_alloc", 0)
