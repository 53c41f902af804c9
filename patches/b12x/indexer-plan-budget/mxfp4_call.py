"""Calls of MXFP4 plans on a CPU: upstream's stages from a state that it makes, with torch in the place of kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from budget_plans import HEADS, PAGE, budget, plans

# Top-k, tokens, and query rows that are planned and in one launch.
TOPK, WIDTH, ROWS, LAUNCH = 512, 1024, 96, 32


def mxfp4_caps(rows: int, pages: int = WIDTH // PAGE, plan_budget: Any = None, **more: Any) -> Any:
    """Of the public surface."""
    return plans.module("api").Caps(
        device="cpu", num_q_heads=HEADS, max_q_rows=rows, max_page_table_width=pages, topk=TOPK, mode="prefill",
        cache_format="mxfp4", plan_budget=plan_budget or budget(), **more,
    )  # fmt: skip


def mxfp4_plan(*args: Any, **more: Any) -> Any:
    return plans.module("mxfp4").plan_mxfp4(mxfp4_caps(*args, **more))


class Mxfp4Call:
    """A state with launches of 32 rows, and the public calls of it.

    Row r of a call has row r of ``scores``, which are written where its queries, which are r, are scored.

    Attributes:
        launched: of each scoring and sorting its first row and the row behind its last.
        compiled_rows: rows of the selections that were compiled.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rows: int, *, shared: bool = True, **caps: Any) -> None:
        api, mxfp4 = plans.module("api"), plans.module("mxfp4")
        monkeypatch.setattr(mxfp4, "_compile", lambda kind, recipe, device: (kind, recipe))
        monkeypatch.setattr(mxfp4, "run_row_topk", self._select)
        monkeypatch.setattr(mxfp4, "_launch", self._launch)
        monkeypatch.setattr(api, "require_prepared", lambda plan, component, device=None: self.state)
        self.api, self.launched, self.compiled_rows = api, [], set()
        within = budget(mxfp4_plan(LAUNCH, **caps).nbytes)
        given = mxfp4_caps(ROWS, plan_budget=within, **caps)
        self.plan, self.state = api.plan(given), mxfp4.materialize_mxfp4(given, device_index=0)
        self.scores = torch.rand(rows, WIDTH, generator=torch.Generator().manual_seed(rows)).bfloat16()
        (spec,) = self.state.layout.scratch_specs()
        every, number = range(rows), torch.arange(rows)
        pages = torch.arange((1 if shared else rows) * WIDTH // PAGE, dtype=torch.int32)
        self.operands: dict[str, Any] = {
            "scratch": torch.full(spec.shape, 255, dtype=torch.uint8),
            "q_mxfp4": number.to(torch.uint8).view(rows, 1, 1).repeat(1, HEADS, 64),
            "q_scales": number.to(torch.uint8).view(rows, 1, 1).repeat(1, HEADS, 4),
            "query_weights": number.bfloat16().view(rows, 1).repeat(1, HEADS),
            "index_k_cache": torch.zeros(4, PAGE * 68, dtype=torch.uint8),
            "page_table": pages.view(-1, WIDTH // PAGE),
            "cache_lengths": torch.tensor([1 + 7 * row % WIDTH for row in every], dtype=torch.int32),
            "active_width": torch.tensor([WIDTH], dtype=torch.int32),
            "output_indices": torch.full((rows, TOPK), -7, dtype=torch.int32),
            "output_scores": torch.full((rows, TOPK), 7.0),
        }
        if caps.get("max_candidates"):
            candidates = [torch.randperm(WIDTH)[: caps["max_candidates"]] + WIDTH * row for row in every]
            self.operands["candidate_indices"] = torch.stack(candidates).int()
            self.operands["candidate_lengths"] = torch.arange(rows, dtype=torch.int32) + 600
        if blocks := caps.get("candidate_topk_blocks"):
            self.operands["candidate_output"] = torch.full((rows, blocks * 8), -7, dtype=torch.int32)
            self.operands["candidate_output_lengths"] = torch.full((rows,), -7, dtype=torch.int32)

    def bind(self, **changed: Any) -> Any:
        return self.api.bind(self.plan, **(self.operands | changed))

    def part(self, tensor: torch.Tensor, name: str) -> bool:
        """Whether a tensor is the current rows of an operand, and no copy of them."""
        whole = self.operands[name][slice(*self.rows)]
        return tensor.data_ptr() == whole.data_ptr() and tensor.shape == whole.shape

    def _launch(self, kind: str, recipe: Any, tensors: Any, scalars: Any, *, launcher: Any) -> None:
        assert launcher == (kind, recipe)
        if kind.startswith("score"):
            q, scales, weights, pool, pages, lengths, active, candidates, counts, out = tensors
            self.rows = (int(q[0, 0, 0]), int(q[0, 0, 0]) + scalars[0])
            self.launched.append(("score", *self.rows))
            assert self.part(q, "q_mxfp4")
            assert self.part(scales, "q_scales")
            assert self.part(weights, "query_weights")
            assert self.part(lengths, "cache_lengths")
            table = self.operands["page_table"]
            assert pages is table if len(table) == 1 else self.part(pages, "page_table")
            assert pool is self.operands["index_k_cache"]
            assert active is self.operands["active_width"]
            if "candidate_indices" in self.operands:
                assert self.part(candidates, "candidate_indices")
                assert self.part(counts, "candidate_lengths")
            out.copy_(self.scores[slice(*self.rows), : out.shape[1]])
        elif kind == "prepare":
            scores, logits, lengths, _, counts, chosen = tensors
            stride = 8 if recipe[1] else 1
            logits.copy_(scores[:, ::stride])
            chosen.copy_(-(-(counts if recipe[0] else lengths) // stride))
        else:
            self.launched.append(("sort", *self.rows))
            indices, values, out_indices, out_values = tensors[:4]
            out_indices[:, : indices.shape[1]] = indices
            out_values.copy_(values)
            if recipe[1]:
                assert self.part(out_indices, "candidate_output")
                assert self.part(tensors[6], "candidate_output_lengths")
                tensors[6].fill_(self.rows[0])

    def _select(
        self, *, row_logits: torch.Tensor, lengths: torch.Tensor, topk: int, output_values: torch.Tensor,
        output_indices: torch.Tensor, output_gather_table: Any = None, launcher: Any = None, launcher_sink: Any = None,
    ) -> None:  # fmt: skip
        if launcher_sink is not None:
            self.compiled_rows.add(row_logits.shape[0])
            launcher_sink["row", output_gather_table is not None, True] = ("topk", topk)
            return
        assert launcher == ("topk", topk)
        for row, length in enumerate(lengths.tolist()):
            best, found = torch.topk(row_logits[row, :length], min(topk, length))
            output_indices[row], output_values[row] = -1, -float("inf")
            chosen = found if output_gather_table is None else output_gather_table[row][found]
            output_indices[row, : len(found)], output_values[row, : len(found)] = chosen.int(), best
