"""The paged indexer's real selections over given scores: python indexer_topk_child.py TREE OUTPUT.json

The scorers need block-scaled MMA of sm_120, and only they are replaced, by a copy of a score matrix into the plan's
tile logits. Plan, binding, gather of the packed route, ``run_tiled_topk`` and ``run_row_topk`` are those of ``TREE``, a
folder with b12x before 1.3. The top-k of every row is compared with torch's: the same values, so that equal scores at
the cut may be any of them. What a call allocates is torch's own count.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from indexer_topk_cases import CASES, DEVICE, Case, lengths_of, scores_of

PAGE, HEADS, DIM, TOPK, BLOCK_Q = 64, 32, 128, 2048, 32
MODE = "B12X_INDEXER_TWO_LEVEL_FOLD"
GUARD_BYTES = 1 << 20


class Call:
    """The plan of a case, and its call with the scorers replaced.

    Attributes:
        launches: of each selection.
        gathered_wrong: supertiles whose packed keys are not those of the page table.
    """

    def __init__(self, case: Case) -> None:
        from b12x.attention.nsa_indexer import paged, scratch

        self.case, self.paged, self.begin = case, paged, 0
        self.rows, self.tokens = case.live_rows or case.rows, case.live_tokens or case.tokens
        os.environ[MODE] = case.fold
        caps: dict[str, Any] = {
            "device": DEVICE, "source_layout": "paged", "num_q_heads": HEADS, "topk": TOPK, "page_size": PAGE,
            "max_q_rows": case.rows, "max_page_table_width": case.tokens // PAGE,
            "mode": "prefill" if case.prefill else "decode", "shared_page_table": case.prefill,
            "route": "packed_contiguous" if case.prefill else "paged_tiled",
        }  # fmt: skip
        known = scratch.B12XIndexerScratchCaps.__dataclass_fields__
        if "output_physical_slots" in known:
            caps["output_physical_slots"] = case.physical
        if case.budget_bytes and "plan_budget" in known:
            caps["plan_budget"] = scratch.Budget(case.budget_bytes)
        self.plan = scratch.plan_indexer_scratch(scratch.B12XIndexerScratchCaps(**caps))
        (spec,) = self.plan.scratch_specs()
        self.nbytes = int(spec.shape[0])
        # All bits set, which is no number, wherever nothing has been written.
        self.storage = torch.full((self.nbytes + GUARD_BYTES,), 255, dtype=torch.uint8, device=DEVICE)
        self.supertile = int(self.plan.layout.supertile_tokens)
        self._make_operands()
        self.launches: Counter[str] = Counter()
        self.gathered_wrong, self.check_gather, self.scoring = 0, False, True

    def _make_operands(self) -> None:
        pages, rows = self.tokens // PAGE, self.rows
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(pages))
        tables = torch.stack([order] if self.case.prefill else [order.roll(row) for row in range(rows)])
        self.table = tables.to(DEVICE, torch.int32).expand(rows, pages)
        # Where each page of a row's table stands in it.
        self.places = tables.argsort(1).to(DEVICE, torch.int32).expand(rows, pages)
        self.lengths = lengths_of(self.case, rows, self.tokens)
        padded = -(-rows // BLOCK_Q) * BLOCK_Q, -(-self.tokens // self.supertile) * self.supertile
        self.scores = torch.full(padded, float("nan"), device=DEVICE)
        self.scores[:rows, : self.tokens] = scores_of(self.case, rows, self.tokens)
        self.cache = torch.zeros((1, PAGE * (DIM + 4)), dtype=torch.uint8, device=DEVICE)
        if self.case.prefill:
            self.cache = torch.randint(0, 120, (pages, PAGE * (DIM + 4)), dtype=torch.uint8, device=DEVICE)
        self.q = torch.zeros((rows, HEADS, DIM), dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)
        self.weights = torch.ones((rows, HEADS), device=DEVICE)
        self.indices = torch.full((rows, TOPK), -7, dtype=torch.int32, device=DEVICE)
        self.values = torch.full((rows, TOPK), 7.0, device=DEVICE)

    def __enter__(self) -> Call:
        """Replace the scorers, and count the selections."""
        replaced: dict[str, Callable[..., Any]] = {
            "run_paged_supertile_logits_kernel": self._score_pages,
            "run_contiguous_logits_kernel": self._score_keys,
            "_prepare_shared_paged_supertile": self._gather,
            "run_tiled_topk": self._counted("tiled"),
            "run_row_topk": self._counted("row"),
        }
        self.real = {name: getattr(self.paged, name) for name in replaced}
        vars(self.paged).update(replaced)
        return self

    def __exit__(self, *_: object) -> None:
        vars(self.paged).update(self.real)

    def bind(self) -> None:
        self.binding = self.plan.bind(
            scratch=self.storage[: self.nbytes], real_page_table=self.table, cache_seqlens_int32=self.lengths,
            shared_page_table=self.case.prefill, output_physical_slots=self.case.physical,
        )  # fmt: skip

    def run(self) -> None:
        self.launches.clear()
        self.paged.index_topk_fp8(
            q_fp8=self.q, weights=self.weights, index_k_cache=self.cache, binding=self.binding, topk=TOPK,
            out_indices=self.indices, out_scores=self.values,
        )  # fmt: skip

    def _counted(self, kind: str) -> Callable[..., Any]:
        name = f"run_{kind}_topk"

        def selection(**given: Any) -> Any:
            self.launches[kind] += 1
            return self.real[name](**given)

        return selection

    def _gather(self, *, page_begin: int, seqlens_per_query: torch.Tensor, **given: Any) -> Any:
        self.begin = page_begin * PAGE
        packed = self.real["_prepare_shared_paged_supertile"](
            page_begin=page_begin, seqlens_per_query=seqlens_per_query, **given
        )
        if self.check_gather:
            pages = self.table[0, page_begin : page_begin + self.supertile // PAGE].long()
            keys = self.cache[pages, : PAGE * DIM].reshape(-1, DIM)
            scales = self.cache[pages, PAGE * DIM :].reshape(-1)
            count, (got, got_scales, starts, ends) = keys.shape[0], packed
            wrong = [
                got.view(torch.uint8)[:count].ne(keys).any(),
                got_scales[:count].view(torch.uint8).ne(scales).any(),
                starts.ne(0).any(),
                ends.ne((seqlens_per_query - self.begin).clamp(0, self.supertile)).any(),
            ]
            self.gathered_wrong += int(torch.stack(wrong).any())
        return packed

    def _score_pages(self, *, source_page_offset: int, tile_block_k: int, **given: Any) -> torch.Tensor:
        self.begin = source_page_offset * PAGE
        return self._score_keys(prefill_block_k=tile_block_k, **given)

    def _score_keys(
        self, *, q_fp8: torch.Tensor, tile_logits: torch.Tensor, prefill_block_k: int, **_: Any
    ) -> torch.Tensor:
        """Tiles of 32 rows and ``prefill_block_k`` keys; those of the same rows lie next to each other."""
        if self.scoring:
            row_tiles = -(-q_fp8.shape[0] // BLOCK_Q)
            first = q_fp8.storage_offset() // (HEADS * DIM)
            part = self.scores[first : first + row_tiles * BLOCK_Q, self.begin : self.begin + self.supertile]
            tiles = part.unflatten(1, (-1, prefill_block_k)).unflatten(0, (row_tiles, BLOCK_Q)).transpose(1, 2)
            tile_logits[: part.numel()].view(tiles.shape).copy_(tiles)
        return tile_logits

    def wrong_rows(self) -> dict[str, int]:
        """Rows whose outputs are not a top-k of their scores, and rows of another set than torch's."""
        rows, tokens, lengths = self.rows, self.tokens, self.lengths[:, None]
        live = torch.arange(tokens, device=DEVICE) < lengths
        scores = torch.where(live, self.scores[:rows, :tokens], float("-inf"))
        best, best_at = scores.topk(min(TOPK, tokens), dim=1)
        indices = self.indices.long()
        valid = indices >= 0
        if self.case.physical:
            pages = self.places.gather(1, (indices.clamp(min=0) // PAGE).clamp(max=tokens // PAGE - 1))
            indices = torch.where(valid, pages * PAGE + indices % PAGE, -1)
        inside = (~valid | (indices < lengths)).all(1) & (valid.sum(1) == self.lengths.clamp(max=TOPK))
        got = torch.where(valid, scores.gather(1, indices.clamp(0, tokens - 1)), float("-inf"))
        ordered, wanted = indices.sort(1).values, torch.where(best > float("-inf"), best_at, -1).sort(1).values
        twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(1)
        return {
            "wrong_rows": int((~(inside & ~twice & (got.sort(1, descending=True).values == best).all(1))).sum()),
            "wrong_score_rows": int((self.values != got).any(1).sum()),
            "other_set_rows": int((ordered != wanted).any(1).sum()),
            "guard_bytes_written": int((self.storage[self.nbytes :] != 255).sum()),
        }


def captured(call: Call) -> dict[str, Any]:
    """The call in a CUDA graph: bytes of its pool, and whether a replay puts out the same."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    graph, before = torch.cuda.CUDAGraph(), torch.cuda.memory_reserved()
    with torch.cuda.graph(graph):
        call.run()
    reserved = torch.cuda.memory_reserved() - before
    call.indices.fill_(-7)
    call.values.fill_(7)
    graph.replay()
    torch.cuda.synchronize()
    wrong = call.wrong_rows()
    return {"graph_pool_bytes": reserved, "graph_wrong_rows": wrong["wrong_rows"] + wrong["wrong_score_rows"]}


def selection_us(call: Call, replays: int = 20) -> float:
    """Time of a replay with the selections alone, over the last supertile's scores."""
    call.scoring = False
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.run()
    call.scoring = True
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / replays * 1000


def measure(case: Case) -> dict[str, Any]:
    with Call(case) as call:
        call.bind()
        call.check_gather = case.prefill
        call.run()
        call.check_gather = False
        first = call.wrong_rows()
        call.indices.fill_(-7)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, count = torch.cuda.memory_allocated(), torch.cuda.memory_stats()["allocation.all.allocated"]
        call.run()
        torch.cuda.synchronize()
        made = torch.cuda.memory_stats()["allocation.all.allocated"] - count
        peak = torch.cuda.max_memory_allocated() - before
        wrong = call.wrong_rows()
        return {
            "equal": not any(found[name] for found in (first, wrong) for name in found if name != "other_set_rows")
            and not call.gathered_wrong,
            **wrong,
            "gathered_wrong": call.gathered_wrong,
            "launches": dict(call.launches),
            "plan_bytes": call.nbytes,
            "allocations": made,
            "peak_bytes": peak,
            **captured(call),
            "selection_us": round(selection_us(call), 1),
        }


def main(tree: str, output: str, *names: str) -> int:
    sys.path.insert(0, tree)
    import b12x

    report: dict[str, Any] = {
        "tree": str(Path(b12x.__file__).parent),
        "device": torch.cuda.get_device_name(DEVICE),
        "capability": torch.cuda.get_device_capability(DEVICE),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "triton", "nvidia-cutlass-dsl")},
        # index_topk_fp8 and the planner ask for no architecture; only is_supported does, which nothing here calls.
        "replaced": ["run_paged_supertile_logits_kernel", "run_contiguous_logits_kernel"],
        "lifted": [],
        "rows": [],
    }
    for case in CASES:
        if names and case.name not in names:
            continue
        row = asdict(case)
        row["case"] = row.pop("name")
        try:
            row |= measure(case)
        except Exception as error:
            row |= {
                "equal": False,
                "error": f"{type(error).__name__}: {error}",
                "trace": traceback.format_exc()[-3000:],
            }
        report["rows"].append(row)
        print(json.dumps(row), flush=True)
        Path(output).write_text(json.dumps(report, indent=1))
        torch.cuda.empty_cache()
    return 0 if all(row["equal"] for row in report["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
