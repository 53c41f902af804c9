"""Plans of the paged indexer on a CPU: as this b12x makes them, and as upstream does."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from random import Random
from types import ModuleType
from typing import Any

import pytest
import torch

PAGE, TOPK, HEADS = 64, 2048, 32
# A context of 524,288 tokens.
WIDTH = 8192
SWITCH, BUDGET = "B12X_INDEXER_TWO_LEVEL_FOLD", "B12X_INDEXER_TWO_LEVEL_FOLD_MAX_MIB"
VARIABLES = (SWITCH, BUDGET, "B12X_PAGED_INDEX_SUPERTILE_K", "B12X_FUSED_INDEXER")


def prepared_plans() -> bool:
    """Whether this b12x has the prepared path, whose callers bring their outputs (1.3 and later)."""
    return importlib.util.find_spec("b12x.attention.dsa_indexer") is not None


def module(name: str) -> ModuleType:
    """A module of the indexer, whatever this b12x calls the indexer."""
    return importlib.import_module(f"b12x.attention.{'dsa' if prepared_plans() else 'nsa'}_indexer.{name}")


def plan(rows: int, width: int = WIDTH, mode: str = "decode", **more: Any) -> Any:
    """The plan that a caller of the public function gets; a prefill shares its page table."""
    scratch = module("scratch")
    named = {"num_q_heads": HEADS, "topk": TOPK, "page_size": PAGE, "shared_page_table": mode == "prefill"} | more
    return scratch.plan_indexer_scratch(
        scratch.B12XIndexerScratchCaps(
            device="cpu", source_layout="paged", max_page_table_width=width, max_q_rows=rows, mode=mode, **named
        )
    )


def inner_plan(rows: int, width: int = WIDTH, mode: str = "decode", **more: Any) -> Any:
    """A plan of the paged indexer itself, for which one says whether callers bring their outputs."""
    scratch = module("scratch")
    named = {"num_q_heads": HEADS, "topk": TOPK, "page_size": PAGE, "shared_page_table": mode == "prefill"} | more
    named["paged_tile_logits_k_rows"] = named.pop("supertile_k", 0)
    return scratch.plan_indexer_paged_scratch(
        scratch.B12XIndexerPagedScratchCaps(
            device="cpu", max_page_table_width=width, max_q_rows=rows, mode=mode, **named
        )
    )


def upstream_plan(*args: Any, **named: Any) -> Any:
    """The plan of the same caps with upstream's own layout."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module("scratch"), "laid_out", lambda caps, layout: layout)
        return plan(*args, **named)


def bound(planned: Any, storage: torch.Tensor | None = None) -> Any:
    """The scratch that a call over one row and one page sees."""
    if storage is None:
        storage = torch.empty(planned.layout.nbytes, dtype=torch.uint8)
    binding = planned.bind(
        scratch=storage,
        real_page_table=torch.zeros(1, 1, dtype=torch.int32),
        cache_seqlens_int32=torch.ones(1, dtype=torch.int32),
        shared_page_table=planned.layout.route == "packed_contiguous",
    )
    return binding.scratch


def fold_of(scratch: Any, rows: int, width: int = WIDTH, supertile: int = 512, physical: bool = False) -> Any:
    """What a call decides."""
    return module("paged_views").held_fold(
        scratch, q_rows=rows, topk=TOPK, page_size=PAGE, page_table_width=width, supertile_pages=supertile,
        output_physical_slots=physical,
    )  # fmt: skip


def upstream_fold(rows: int, width: int, supertile: int, topk: int = TOPK, page: int = PAGE) -> Any:
    """What upstream would decide if bytes were no matter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, "on")
        return module("paged")._plan_two_level_fold(
            q_rows=rows, topk=topk, page_size=page, page_table_width=width, supertile_pages=supertile,
            output_physical_slots=False,
        )  # fmt: skip


WIDTHS = [
    -(-tokens // PAGE)
    for tokens in (
        1, 16_384, 32_704, 32_768, 32_832, 523_264, 524_224, 524_288, 524_352, 557_056, 768_000, 1_000_000, 1_015_808,
        1_015_872, 1_046_592, 1_048_512, 1_048_576, 1_048_640, 2_000_000, 2 << 20, 4 << 20,
    )
]  # fmt: skip
SUPERTILES = (64, 128, 256, 512)


def calls(count: int, seed: int = 0) -> Iterator[tuple[int, int, int]]:
    """Rows, pages and supertile pages: the noted widths, then as many by chance, half of them short."""
    draw = Random(seed)
    for width in WIDTHS:
        for supertile in SUPERTILES:
            yield draw.randint(1, 4096), width, supertile
    for index in range(count):
        yield draw.randint(1, 4096), draw.randint(1, (4 << 20) // PAGE >> 3 * (index % 2)), draw.choice(SUPERTILES)
