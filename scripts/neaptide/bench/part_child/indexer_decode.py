"""A decode step, untiled and tiled: scores, sets, bytes, CUDA graph and time."""

from __future__ import annotations

import statistics
import time
from typing import Any

from indexer_layer import Indexer, choose, memory, row_hashes

TIMED = 7


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


def run_decode(case: dict[str, Any], spec: dict[str, Any]) -> list[dict[str, Any]]:
    """A decode step, tiled against untiled."""
    return [DecodeStep(case).run()]
