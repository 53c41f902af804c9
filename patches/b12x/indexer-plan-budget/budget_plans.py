"""Plans under a budget, and calls of them in chunks on a CPU, which check that all operands are of the same rows."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "indexer-regions"))

plans = importlib.import_module("indexer_plans")
calls = importlib.import_module("indexer_call")
HEADS, PAGE = calls.HEADS, calls.PAGE
MIB = 1 << 20


def budget(plan_bytes: int = 0, arena_bytes: int = 0, least_chunk_rows: int = 0) -> Any:
    return plans.module("plan_budget").Budget(plan_bytes, arena_bytes, least_chunk_rows)


def choice_of(planned: Any) -> Any:
    """What was given up for the budget; None without one."""
    return planned.inner.caps.choice


def bytes_of(rows: int, tokens: int, mode: str, **caps: Any) -> int:
    """A plan of so many rows after all steps before chunks: small supertiles, and no fold beyond the carry."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(plans.SWITCH, "off")
        supertile = 16384 if tokens > 16384 else 0
        return int(plans.plan(rows, -(-tokens // PAGE), mode, supertile_k=supertile, **caps).layout.nbytes)


def operand(dtype: str, *shape: int) -> dict[str, Any]:
    """The description of a contiguous tensor."""
    strides = torch.empty(shape, device="meta").stride()
    return {"shape": shape, "strides": strides, "dtype": dtype, "alignment": 16}


def fp8_plan(rows: int, pages: int, mode: str, plan_budget: Any = None) -> Any:
    """The public plan; its outputs are indices only."""
    api = plans.module("api")
    caps = api.Caps(
        device="cpu", num_q_heads=HEADS, max_q_rows=rows, max_page_table_width=pages, topk=plans.TOPK, mode=mode,
        plan_budget=plan_budget or budget(),
    )  # fmt: skip
    operands = {
        "q_fp8": operand("float8_e4m3fn", rows, HEADS, 128),
        "query_weights": operand("float32", rows, HEADS),
        "index_k_cache": operand("uint8", 9, PAGE * 132),
        "page_table": operand("int32", rows, pages),
        "cache_lengths": operand("int32", rows),
        "active_width": operand("int32", 1),
        "output_indices": operand("int32", rows, plans.TOPK),
    }
    return api.plan(caps, invocation=api.invocation_from_descriptors(caps, operands=operands))


def fp8_layout(plan: Any) -> Any:
    """What its state has."""
    preparation = plans.module("_preparation")
    config = plans.module("_tuning").DsaIndexerConfig(backend="native")
    caps = preparation._scratch_caps(plan.query, device=torch.device("cpu"), config=config)
    return preparation.plan_indexer_scratch(caps, fused_merge=config.fused_merge)


class Rows(calls.Queries):
    """Queries that know which rows of the call they are."""

    def __init__(self, rows: int, first: int = 0) -> None:
        super().__init__(rows)
        self.first = first

    def __getitem__(self, part: slice) -> Rows:
        start, stop, _ = part.indices(self.shape[0])
        return Rows(stop - start, self.first + start)


class ChunkCall(calls.Call):
    """Calls of a plan whose launches are of ``launch`` rows.

    Attributes:
        scored: of each call of the scorer its first row and the row behind its last.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, rows: int, launch: int, tokens: int, mode: str = "decode",
        least: int = 32, **caps: Any,
    ) -> None:  # fmt: skip
        caps |= {"mode": mode, "topk": caps.get("topk", 24), "shared_page_table": mode == "prefill"}
        if mode == "decode":
            caps["route"] = "paged_tiled"
        most = bytes_of(launch, tokens, **caps)
        super().__init__(monkeypatch, rows=rows, tokens=tokens, plan_budget=budget(most, 0, least), **caps)
        assert choice_of(self.plan).rows == launch
        self.mode, self.physical = mode, bool(caps.get("output_physical_slots"))
        self.scored: list[tuple[int, int]] = []

    def table(self, rows: int, tokens: int) -> torch.Tensor:
        """The pages of each row, which are its own in a decode and those of all in a prefill."""
        width = -(-tokens // PAGE)
        if self.mode == "prefill":
            return torch.arange(width, dtype=torch.int32).expand(rows, width)
        return torch.arange(rows * width, dtype=torch.int32).view(rows, width)

    def bind(self, lengths: torch.Tensor, tokens: int, **more: Any) -> Any:
        self.lengths, self.pages = lengths, more.pop("table", self.table(lengths.shape[0], tokens))
        return self.plan.bind(
            scratch=self.storage, real_page_table=self.pages, cache_seqlens_int32=lengths,
            shared_page_table=self.mode == "prefill", output_physical_slots=self.physical, **more,
        )  # fmt: skip

    def operands(self, rows: int) -> dict[str, Any]:
        """Of a call; the weights of a row are its number."""
        self.weights = torch.arange(rows).float().view(rows, 1).repeat(1, HEADS)
        return {"q_fp8": Rows(rows), "weights": self.weights, "index_k_cache": torch.empty(0), "topk": self.topk}

    def run(
        self, scores: torch.Tensor, lengths: torch.Tensor, *, wants_scores: bool = True, **changed: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Indices and scores that the call puts out; ``changed`` takes the place of operands."""
        self.scores, (rows, tokens) = scores, scores.shape
        binding = self.bind(lengths, tokens)
        indices = torch.full((rows, self.topk), -7, dtype=torch.int32)
        outputs = {"out_indices": indices, "out_scores": torch.full((rows, self.topk), 7.0) if wants_scores else None}
        given = self.operands(rows) | outputs | changed
        self.launches.clear()
        self.scored.clear()
        self.allocations.made.clear()
        with self.allocations:
            found = self.paged.index_topk_fp8(binding=binding, **given)
        assert found.data_ptr() == indices.data_ptr()
        assert found.shape == indices.shape
        return indices, outputs["out_scores"]

    def _own_rows(self, q: Rows, **operands: torch.Tensor) -> None:
        """Every operand is the rows of the queries."""
        with self.allocations.stand_in():
            start, stop = q.first, q.first + q.shape[0]
            for name, part in operands.items():
                whole = getattr(self, name)
                assert torch.equal(part, whole[start:stop]), (name, start, stop)
                assert part.stride() == whole.stride(), name

    def _score_pages(
        self, *, q_fp8: Rows, weights: Any, real_page_table: Any, seqlens_per_query: Any, source_page_offset: int,
        **given: Any,
    ) -> torch.Tensor:  # fmt: skip
        self.page_begin = source_page_offset
        self._own_rows(q_fp8, pages=real_page_table, lengths=seqlens_per_query)
        return self._score_keys(q_fp8=q_fp8, weights=weights, **given)

    def _gather(
        self, *, real_page_table: Any, seqlens_per_query: Any, q_rows: int, page_begin: int, **_: Any
    ) -> tuple[None, ...]:
        self.gathered = {"pages": real_page_table, "lengths": seqlens_per_query}
        assert q_rows == seqlens_per_query.shape[0]
        return super()._gather(page_begin=page_begin)

    def _score_keys(self, *, q_fp8: Rows, weights: Any, tile_logits: torch.Tensor, **_: Any) -> torch.Tensor:
        gathered = self.gathered if self.mode == "prefill" else {}
        self._own_rows(q_fp8, weights=weights, **gathered)
        part = (q_fp8.first, q_fp8.first + q_fp8.shape[0])
        self.scored.append(part)
        whole, self.scores = self.scores, self.scores[slice(*part)]
        try:
            return super()._score_keys(tile_logits=tile_logits)
        finally:
            self.scores = whole

    def _select(self, *, output_page_table: Any = None, output_indices: torch.Tensor, **given: Any) -> None:
        super()._select(output_indices=output_indices, **given)
        if output_page_table is not None:
            with self.allocations.stand_in():
                found = output_indices.long()
                pages = output_page_table.gather(1, found.clamp(min=0) // PAGE)
                output_indices.copy_(torch.where(found < 0, found, pages * PAGE + found % PAGE))


def assert_topk(
    scores: torch.Tensor, lengths: torch.Tensor, topk: int, indices: torch.Tensor, values: torch.Tensor | None = None
) -> None:
    """Each row has its largest scores, whichever of equal ones; the rest of its places are -1."""
    for row, length in enumerate(lengths.tolist()):
        found = indices[row][indices[row] >= 0].long()
        assert indices[row].min() >= -1
        assert len(found.unique()) == len(found) == min(topk, length), row
        assert found.max() < length
        best = scores[row, found].sort(descending=True).values
        assert torch.equal(best, torch.topk(scores[row, :length], len(found)).values), row
        if values is not None:
            assert torch.equal(values[row][indices[row] >= 0], scores[row, found]), row
