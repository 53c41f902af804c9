"""What upstream's own prefill plan allocates at most: its budget, and what DeepGEMM rounds up.

Upstream's splitter keeps rows x keys within the budget; its launch takes whole row steps and whole strides.
"""

from __future__ import annotations

import importlib
import random
from typing import Any

import pytest
import torch

MIB = 1 << 20


def sizes() -> Any:
    return importlib.import_module("vllm.model_executor.layers.sparse_indexer_logits")


def split(rows: list[int], keys: list[int], workspace: int, budget: int) -> list[tuple[slice, slice]]:
    builder = importlib.import_module("vllm.v1.attention.backends.mla.indexer").DeepseekV32IndexerMetadataBuilder
    chunks: list[tuple[slice, slice]] = builder._split_indexer_prefill_chunks(
        torch.tensor(keys), torch.tensor(rows), workspace, budget
    )
    return chunks


def bound(budget: int, rows: int, columns: int, heads: int, sm100: bool) -> int:
    layout = sizes().logits_layout(sm100=sm100, fp32_copy=True)
    found: int = sizes().upstream_prefill_elements(budget, rows, columns, heads, layout)
    return found


def allocated(rows: int, columns: int, heads: int, sm100: bool) -> int:
    """Elements of a launch: blocks of 128 (row, head) pairs, and whole KiB of FP32 or BF16."""
    row_step, column_step = max(1, 128 // heads), 512 if sm100 else 256
    return -(-rows // row_step) * row_step * (-(-columns // column_step) * column_step)


@pytest.mark.parametrize("sm100", [False, True], ids=["sm90", "sm100"])
def test_every_launch_of_upstreams_plan_is_within_the_bound(sm100: bool) -> None:
    """Random requests, one long request by full chunks, and the launches that come nearest."""
    rng, above, nearest = random.Random(6), 0, 0.0
    for _ in range(1500):
        heads, batched = rng.choice([4, 16, 32, 64, 128, 256]), int(2 ** rng.uniform(0, 13.5))
        columns = int(2 ** rng.uniform(4, 20))
        # A budget of at least the longest row.
        budget = max(rng.choice([1, 4, 64, 512]) * MIB, columns * 4)
        most, count = bound(budget, batched, columns, heads, sm100), rng.choice([1, 1, 2, 8])
        rows = [max(1, batched // count - rng.choice([0, 0, rng.randint(0, batched // count)])) for _ in range(count)]
        if sum(rows) > batched:
            continue
        keys = [rng.choice([columns, rng.randint(1, columns), rng.randint(1, min(columns, 600))]) for _ in rows]
        for requests, where in split(rows, keys, rng.choice([columns, 40 * columns]), budget):
            taken = allocated(where.stop - where.start, max(keys[requests]), heads, sm100)
            assert taken <= most, (budget, batched, columns, heads, rows, keys)
            above += taken > budget // 4
            nearest = max(nearest, taken / most)
    assert above > 50
    assert nearest > 0.99


@pytest.mark.parametrize("sm100", [False, True], ids=["sm90", "sm100"])
@pytest.mark.parametrize("heads", [32, 64])
def test_the_bound_is_near_the_budget_of_a_deployment(heads: int, sm100: bool) -> None:
    """8,192 rows and 1,048,576 columns: rounding adds at most 255 or 511 columns of each row, and 3 whole rows."""
    found = bound(512 * MIB, 8192, 1_048_576, heads, sm100)
    assert 1 < found * 4 / (512 * MIB) < (1.06 if sm100 else 1.04)


def test_one_row_above_the_budget_is_within_the_bound() -> None:
    """Upstream scores at least one row: 4 of 1,048,576 FP32 columns, as DeepGEMM rounds it, at a budget of 1 MiB."""
    assert bound(MIB, 16, 1_048_576, 32, sm100=False) >= 4 * 1_048_576
