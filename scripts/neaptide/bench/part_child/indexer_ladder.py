"""A prefill ladder: bytes, launches and time of one prompt, chunk by chunk."""

from __future__ import annotations

import time
from typing import Any

from indexer_layer import LAUNCHES, Indexer, choose, count_launches, memory, row_hashes

REPEATS = 5


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


def run_ladder(case: dict[str, Any], spec: dict[str, Any]) -> list[dict[str, Any]]:
    """A ladder under each of the spec's policies: its memory, then its time, the policies in turns."""
    ladders = [Ladder(case, policy) for policy in spec["policies"]]
    rows = [ladder.memory() for ladder in ladders]
    times = [[ladder.climb()[0] for ladder in ladders] for _ in range(REPEATS)]
    return [{**row, "seconds": min(taken)} for row, taken in zip(rows, zip(*times, strict=True), strict=True)]
