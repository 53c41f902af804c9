"""``index_topk_fp8`` of a tree on a CPU: the scorer gives back a score matrix, and the two selections are torch's."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

HEADS, PAGE = 32, 64


def op_module(name: str) -> Any:
    """A module of the indexer, whose package has another name before 1.3."""
    package = next(p for p in ("dsa_indexer", "nsa_indexer") if find_spec(f"b12x.attention.{p}"))
    return importlib.import_module(f"b12x.attention.{package}.{name}")


class AnyDevice:
    """Passes for a CUDA device, and for the one that any tensor is on."""

    type = "cuda"

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


class Queries:
    """What the call asks of ``q_fp8`` itself."""

    def __init__(self, rows: int) -> None:
        self.shape, self.device = (rows, HEADS, 128), AnyDevice()


class Allocations(TorchDispatchMode):
    """Counts new tensors of the call, not those of the stand-ins."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[str] = []
        self.outside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if not self.outside and name in ("empty", "full", "zeros", "ones", "empty_strided", "clone", "empty_like"):
            self.made.append(name)
        return func(*args, **(kwargs or {}))

    @contextmanager
    def stand_in(self) -> Iterator[None]:
        self.outside = True
        try:
            yield
        finally:
            self.outside = False


class Call:
    """One plan, and calls of it over given scores [rows, tokens]; with ``own_outputs`` it has top-k buffers.

    Attributes:
        launches: of each selection its kind, slices and supertile.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        rows: int,
        tokens: int,
        topk: int,
        own_outputs: bool = False,
        **caps: Any,
    ) -> None:
        self.paged, scratch = op_module("paged"), op_module("scratch")
        caps |= {"device": "cpu", "num_q_heads": HEADS, "topk": topk, "page_size": PAGE, "max_q_rows": rows}
        caps["max_page_table_width"] = -(-tokens // PAGE)
        if own_outputs:
            self.plan = scratch.plan_indexer_paged_scratch(scratch.B12XIndexerPagedScratchCaps(**caps))
        else:
            self.plan = scratch.plan_indexer_scratch(scratch.B12XIndexerScratchCaps(source_layout="paged", **caps))
        (spec,) = self.plan.scratch_specs()
        self.storage = torch.randint(0, 255, spec.shape, dtype=torch.uint8)
        self.topk, self.launches, self.allocations = topk, [], Allocations()
        self.page_begin = 0
        for name, stand_in in {
            "run_paged_supertile_logits_kernel": self._score_pages,
            "run_contiguous_logits_kernel": self._score_keys,
            "_prepare_shared_paged_supertile": self._gather,
            "run_tiled_topk": self._select,
            "run_row_topk": self._finish,
            "_validate_q_head_contract": lambda **_: None,
        }.items():
            monkeypatch.setattr(self.paged, name, stand_in)

    def run(
        self, scores: torch.Tensor, lengths: torch.Tensor, *, shared: bool = False, physical: bool = False,
        out_scores: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """Indices and scores that the call puts out."""
        self.scores, (rows, tokens) = scores, scores.shape
        table = torch.arange(-(-tokens // PAGE), dtype=torch.int32).repeat(rows, 1)
        binding = self.plan.bind(
            scratch=self.storage, real_page_table=table, cache_seqlens_int32=lengths, shared_page_table=shared,
            output_physical_slots=physical,
        )  # fmt: skip
        indices = torch.full((rows, self.topk), -7, dtype=torch.int32)
        values = torch.full((rows, self.topk), 7.0) if out_scores else None
        operands = {"q_fp8": Queries(rows), "weights": torch.ones(rows, HEADS), "index_k_cache": torch.empty(0)}
        self.launches.clear()
        self.allocations.made.clear()
        with self.allocations:
            self.paged.index_topk_fp8(
                **operands, binding=binding, topk=self.topk, out_indices=indices, out_scores=values
            )  # fmt: skip
        return indices, values

    def _gather(self, *, page_begin: int, **_: Any) -> tuple[None, ...]:
        self.page_begin = page_begin
        return None, None, None, None

    def _score_pages(self, *, source_page_offset: int, tile_logits: torch.Tensor, **_: Any) -> torch.Tensor:
        self.page_begin = source_page_offset
        return self._score_keys(tile_logits=tile_logits)

    def _score_keys(self, *, tile_logits: torch.Tensor, **_: Any) -> torch.Tensor:
        with self.allocations.stand_in():
            part = self.scores[:, self.page_begin * PAGE :]
            width = min(part.shape[1], int(self.plan.layout.supertile_tokens))
            tile_logits[: part.shape[0] * width].view(-1, width).copy_(part[:, :width])
        return tile_logits

    def _select(
        self, *, tile_logits: torch.Tensor, lengths: torch.Tensor, topk: int, output_values: torch.Tensor,
        output_indices: torch.Tensor, input_index_offset: int, input_extent: int, is_first: bool = True,
        carry_values: Any = None, carry_indices: Any = None, extent_splits: int = 1, output_row_stride: Any = None,
        output_row_base: int = 0, output_page_table: Any = None, write_values: bool = True, **_: Any,
    ) -> None:  # fmt: skip
        rows = lengths.shape[0]
        width = min(self.scores.shape[1] - input_index_offset, int(self.plan.layout.supertile_tokens))
        kind = "fold" if output_row_stride is not None else "first" if is_first else "carry"
        self.launches.append((kind, extent_splits, input_index_offset))
        with self.allocations.stand_in():
            tile = tile_logits[: rows * width].view(rows, width)
            for row in range(rows):
                for split in range(extent_splits):
                    begin, end = split * input_extent, min((split + 1) * input_extent, width)
                    end = max(begin, min(end, int(lengths[row]) - input_index_offset))
                    values = tile[row, begin:end]
                    indices = torch.arange(begin, end, dtype=torch.int32) + input_index_offset
                    if not is_first:
                        values = torch.cat([carry_values[row], values])
                        indices = torch.cat([carry_indices[row], indices])
                    best, at = best_of(values, indices, topk)
                    if output_page_table is not None:
                        at = torch.where(at < 0, at, at + 1000)
                    place = row * (output_row_stride or extent_splits) + output_row_base + split
                    output_indices[place] = at
                    if write_values:
                        output_values[place] = best

    def _finish(
        self, *, row_logits: torch.Tensor, lengths: torch.Tensor, topk: int, output_values: torch.Tensor,
        output_indices: torch.Tensor, output_gather_table: torch.Tensor, write_values: bool = True, **_: Any,
    ) -> None:  # fmt: skip
        self.launches.append(("finish", 1, 0))
        with self.allocations.stand_in():
            for row in range(row_logits.shape[0]):
                count = int(lengths[row])
                best, at = best_of(row_logits[row, :count], output_gather_table[row, :count], topk)
                output_indices[row] = at
                if write_values:
                    output_values[row] = best


def best_of(values: torch.Tensor, indices: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest values with their indices, filled up with -inf and -1."""
    values = torch.where(indices < 0, torch.tensor(float("-inf")), values)
    best, places = torch.topk(values, min(topk, values.shape[0]))
    fill = topk - best.shape[0]
    return (
        torch.cat([best, torch.full((fill,), float("-inf"))]),
        torch.cat([indices[places], torch.full((fill,), -1, dtype=torch.int32)]),
    )
