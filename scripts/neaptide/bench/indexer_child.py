"""The sparse indexer's own functions in this process, on a GPU: real metadata builder, real ops, real kernels.

Run as a script with a vLLM on the path: ``indexer_child.py SPEC RESULT``; SPEC lists the cases. Imports nothing
of neaptide, so that the variant under test decides what is imported. Bytes are read from the allocator.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import sys
import time
import traceback
from types import SimpleNamespace
from typing import Any

HEADS, DIM, TOPK, PAGE = 32, 128, 2048, 64
POLICY = "VLLM_NEAPTIDE_INDEXER_LOGITS_POLICY"
SHARED = ("vllm.model_executor.layers.sparse_attn_indexer", "sparse_attn_indexer")
KPOOL = ("vllm.models.glm5next.nvidia.sparse_indexer", "sparse_attn_indexer_kpool")
TIMED = 7
REPEATS = 5
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


class Ladder:
    """A prompt that is prefilled chunk by chunk under one policy; None for a vLLM that has none."""

    def __init__(self, case: dict[str, Any], policy: str | None) -> None:
        import torch

        self.torch, self.case, self.policy = torch, case, policy
        choose(policy)
        self.indexer = Indexer(case["chunk"], 8, case["total"], case["kpool"])
        self.table = torch.arange(self.indexer.pages, dtype=torch.int32, device=self.indexer.device)[None]
        count_launches(self.indexer.module)

    def chunk(self, end: int) -> Any:
        rows = self.case["chunk"]
        positions = self.torch.arange(end - rows, end, device=self.indexer.device)
        metadata = self.indexer.metadata([rows], [end], self.table)
        for _ in range(self.case["layers"]):
            out = self.indexer.score(metadata, rows, positions)
        return out

    def climb(self) -> tuple[float, list[tuple[int, int]], Any]:
        """Seconds, (reserved bytes, cudaMallocs) after each chunk, and the last chunk's indices."""
        seen, out = [], None
        choose(self.policy)
        self.torch.cuda.synchronize()
        begun = time.perf_counter()
        for end in range(self.case["chunk"], self.case["total"] + 1, self.case["chunk"]):
            out = self.chunk(end)
            seen.append(memory(self.torch))
        self.torch.cuda.synchronize()
        return time.perf_counter() - begun, seen, out

    def memory(self) -> dict[str, Any]:
        """Bytes and launches of a climb that begins with an empty cache."""
        torch = self.torch
        # Kernels are compiled and small pools filled by the first chunk; its blocks go back to the driver.
        choose(self.policy)
        self.chunk(self.case["chunk"])
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before, mallocs = memory(torch)
        allocated, launches = torch.cuda.memory_allocated(), LAUNCHES[0]
        _, seen, out = self.climb()
        return {
            "policy": self.policy, "launches": LAUNCHES[0] - launches,
            "growth_first_chunk_bytes": seen[0][0] - before,
            "growth_after_first_chunk_bytes": seen[-1][0] - seen[0][0], "cuda_mallocs": seen[-1][1] - mallocs,
            "peak_bytes": torch.cuda.max_memory_allocated() - allocated, "hashes": row_hashes(torch, out),
            "reserved_bytes": [reserved - before for reserved, _ in seen],
        }  # fmt: skip


def run_ladder(case: dict[str, Any], policies: list[str | None]) -> list[dict[str, Any]]:
    """A ladder under each policy: its memory, then its time, the policies in turns."""
    ladders = [Ladder(case, policy) for policy in policies]
    rows = [ladder.memory() for ladder in ladders]
    times = [[ladder.climb()[0] for ladder in ladders] for _ in range(REPEATS)]
    return [{**row, "seconds": min(taken)} for row, taken in zip(rows, zip(*times, strict=True), strict=True)]


class DecodeStep:
    """One decode step, untiled (policy ``upstream``) and tiled, in the same process on the same inputs."""

    def __init__(self, case: dict[str, Any]) -> None:
        import torch

        seqs, next_n, self.torch, self.columns = case["rows"], case["next_n"], torch, case["columns"]
        self.rows = seqs * next_n
        self.indexer = Indexer(max(self.rows, 1024), seqs, self.columns, 1, next_n)
        shape = (seqs, self.indexer.pages)
        table = torch.randint(self.indexer.pages, shape, dtype=torch.int32, device=self.indexer.device)
        lens = torch.randint(self.columns // 2, self.columns + 1, (seqs,)).tolist()
        self.metadata = self.indexer.metadata([next_n] * seqs, lens, table)
        self.lens = self.metadata.decode.seq_lens.reshape(-1)
        self.original = self.indexer.module.fp8_fp4_paged_mqa_logits
        self.original = getattr(self.original, "original", self.original)

    def step(self) -> Any:
        return self.indexer.score(self.metadata, self.rows)

    def peak(self) -> int:
        torch = self.torch
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.step()
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated() - before)

    def seconds(self) -> float:
        torch, taken = self.torch, []
        for _ in range(TIMED):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            self.step()
            torch.cuda.synchronize()
            taken.append(time.perf_counter() - begun)
        return statistics.median(taken)

    def watched(self, see: Any) -> Any:
        """A step whose kernel's result is shown to ``see`` with its first row."""
        base = self.metadata.decode.seq_lens.data_ptr()

        def kernel(*args: Any, **kwargs: Any) -> Any:
            logits = self.original(*args, **kwargs)
            see((args[3].data_ptr() - base) // 4, logits)
            return logits

        kernel.original = self.original  # type: ignore[attr-defined]
        self.indexer.module.fp8_fp4_paged_mqa_logits = kernel
        out = self.step().clone()
        self.indexer.module.fp8_fp4_paged_mqa_logits = self.original
        return out

    def compare(self) -> dict[str, Any]:
        """Scores and sets, tiled against untiled."""
        torch, kept, unequal, tiles = self.torch, [], 0, 0
        choose("upstream")
        untiled = self.untiled = self.watched(lambda start, logits: kept.append(logits))
        reference = self.reference = kept[0]
        inside = torch.arange(self.columns, device=self.lens.device)

        def see(start: int, logits: Any) -> None:
            nonlocal unequal, tiles
            tiles += 1
            for row in range(logits.shape[0]):
                valid = inside[: int(self.lens[start + row])]
                unequal += not torch.equal(logits[row, valid], reference[start + row, valid])

        choose("constant_bytes")
        tiled = self.watched(see)
        pairs = zip(row_hashes(torch, untiled), row_hashes(torch, tiled), strict=True)
        other = [row for row, (a, b) in enumerate(pairs) if a != b]
        return {
            "tiles": tiles, "rows_of_unequal_scores": unequal, "rows_of_other_sets": len(other),
            "rows_of_other_set_scores": self.rows_of_other_scores(tiled),
        }  # fmt: skip

    def graph(self) -> dict[str, Any]:
        """Bytes that a CUDA graph of the step keeps, and whether its replay selects the eager step's scores."""
        torch = self.torch
        self.step()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = memory(torch)[0]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        kept = memory(torch)[0] - before
        self.indexer.buffer.fill_(-7)
        graph.replay()
        torch.cuda.synchronize()
        other = self.rows_of_other_scores(self.indexer.buffer[: self.rows])
        return {"graph_bytes": kept, "graph_replay_rows_of_other_set_scores": other}

    def rows_of_other_scores(self, topk: Any) -> int:
        """Rows whose selected scores are not the untiled ones: ties may be broken either way, scores may not differ."""
        torch, count = self.torch, 0
        for row in range(self.rows):
            mine, other = (t[row][t[row] >= 0].long() for t in (topk, self.untiled))
            scores = [torch.sort(self.reference[row][t]).values for t in (mine, other)]
            count += not torch.equal(*scores)
        return count

    def run(self) -> dict[str, Any]:
        out: dict[str, Any] = self.compare()
        for name, policy in (("untiled", "upstream"), ("tiled", "constant_bytes")):
            choose(policy)
            self.step()
            out[f"{name}_peak_bytes"] = self.peak()
            out[f"{name}_seconds"] = self.seconds()
            try:
                out |= {f"{name}_{key}": value for key, value in self.graph().items()}
            except RuntimeError as error:
                out[f"{name}_graph_error"] = str(error)[:300]
        out["time_ratio"] = out["tiled_seconds"] / out["untiled_seconds"]
        return out


def versions() -> dict[str, str]:
    from importlib import metadata

    deep_gemm = sys.modules.get("vllm.third_party.deep_gemm")
    names = ("vllm", "torch", "triton")
    return {n: metadata.version(n) for n in names} | {"deep_gemm": str(getattr(deep_gemm, "__version__", "absent"))}


def main(spec_path: str, result_path: str) -> int:
    with open(spec_path) as handle:
        spec = json.load(handle)
    import torch
    from vllm.v1.worker.workspace import init_workspace_manager

    init_workspace_manager(torch.device("cuda", 0))
    rows: list[dict[str, Any]] = []
    for case in spec["cases"]:
        torch.cuda.empty_cache()
        try:
            found = run_ladder(case, spec["policies"]) if case["kind"] == "prefill" else [DecodeStep(case).run()]
            rows += [{"case": case["name"], "outcome": "done", **row} for row in found]
        except Exception as error:
            where = traceback.format_exc()[-1500:]
            rows.append({"case": case["name"], "outcome": "failed", "error": str(error)[:500], "where": where})
        with open(result_path, "w") as handle:
            json.dump({"device": torch.cuda.get_device_name(), "rows": rows, "versions": versions()}, handle)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
