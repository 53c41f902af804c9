"""Sizes of the indexer's logits: strides, bytes of a logit, row steps, local columns, budget errors."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any

import pytest

MIB = 1 << 20


def sizes() -> Any:
    return importlib.import_module("vllm.model_executor.layers.sparse_indexer_logits")


def next_multiple(value: int, step: int) -> int:
    return next(n for n in range(value, value + step) if n % step == 0)


@pytest.mark.parametrize(
    ("sm100", "element_bytes", "decode_split"), [(False, 4, 256), (True, 2, 384)], ids=["sm90", "sm100"]
)
def test_strides(sm100: bool, element_bytes: int, decode_split: int) -> None:
    """Columns are rounded to the block, then to whole KiB of the element that the kernel writes."""
    layout = sizes().logits_layout(sm100=sm100, fp32_copy=True)
    kib = 1024 // element_bytes
    for columns in [*range(0, 4000), 8193, 163_840, 524_288, 1_048_576, 1_048_577]:
        assert layout.prefill_stride(columns) == next_multiple(next_multiple(columns, 256), kib)
        assert layout.decode_stride(columns) == next_multiple(next_multiple(columns, decode_split), kib)


@pytest.mark.parametrize(
    ("sm100", "fp32_copy", "live_bytes"), [(False, True, 4), (False, False, 4), (True, True, 6), (True, False, 2)]
)
def test_live_bytes_of_a_logit(sm100: bool, fp32_copy: bool, live_bytes: int) -> None:
    assert sizes().logits_layout(sm100=sm100, fp32_copy=fp32_copy).live_bytes == live_bytes


@pytest.mark.parametrize(
    ("heads", "rows"),
    [(256, 1), (192, 1), (129, 1), (128, 1), (64, 2), (32, 4), (16, 8), (8, 16), (1, 128)],
)
def test_row_step_holds_128_pairs_of_row_and_head(heads: int, rows: int) -> None:
    """And never less than one row."""
    assert sizes().prefill_row_step(heads) == rows


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16, 32, 64, 128, 256])
def test_row_step_of_unknown_heads_is_a_multiple_of_every_other(heads: int) -> None:
    assert sizes().prefill_row_step(0) % sizes().prefill_row_step(heads) == 0


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("interleave", [1, 3, 16, 64])
def test_local_columns_are_those_of_the_fullest_rank(world_size: int, interleave: int) -> None:
    held = [0] * world_size
    for columns in range(700):
        assert sizes().local_columns(columns, world_size, interleave) == max(held)
        held[columns // interleave % world_size] += 1


@pytest.mark.parametrize("budget_mb", [0, -1, -512])
def test_a_budget_that_is_not_positive_is_refused(budget_mb: int) -> None:
    with pytest.raises(ValueError, match=rf"VLLM_SPARSE_INDEXER_MAX_LOGITS_MB is {budget_mb}, .*unset it for 512"):
        sizes().budget_bytes(budget_mb)


def test_a_budget_is_in_mib() -> None:
    assert sizes().budget_bytes(512) == 536_870_912


def prefill_of(policy: str, budget_mb: int, rows: int, columns: int, heads: int = 32, *, sm100: bool) -> Any:
    layout = sizes().logits_layout(sm100=sm100, fp32_copy=True)
    return sizes().prefill_launch(policy, budget_mb * MIB, rows, columns, heads, layout)


def prefill(policy: str, sm100: bool) -> Callable[[int], Any]:
    return lambda budget_mb: prefill_of(policy, budget_mb, 8192, 1_048_576, sm100=sm100)


def decode(next_n: int, step: int, sm100: bool) -> Callable[[int], Any]:
    layout = sizes().logits_layout(sm100=sm100, fp32_copy=True)
    return lambda budget_mb: sizes().decode_tile_units(budget_mb * MIB, next_n, step, 1_048_576, layout)


@pytest.mark.parametrize(
    ("make", "smallest"),
    [
        # 4 rows of 32 heads x 1,048,576 columns, of 4 bytes, or of BF16 with the FP32 copy
        (lambda: prefill("constant_bytes", False), 16),
        (lambda: prefill("constant_bytes", True), 24),
        # as upstream counts: 4 bytes on both architectures
        # 6 rows of a request x 1,048,576 FP32 columns
        (lambda: decode(6, 1, False), 24),
        # 2 rows x 1,049,088 columns of BF16 with their FP32 copy: 12,589,056 bytes
        (lambda: decode(1, 2, True), 13),
    ],
)
def test_a_small_budget_is_refused_by_the_smallest_that_works(
    make: Callable[[], Callable[[int], Any]], smallest: int
) -> None:
    with_budget = make()
    with pytest.raises(ValueError, match=r"VLLM_SPARSE_INDEXER_MAX_LOGITS_MB allows 1048576 bytes") as caught:
        with_budget(1)
    named = re.search(r"smallest value that works is (\d+)\.", str(caught.value))
    assert named is not None
    assert int(named[1]) == smallest
    assert with_budget(smallest)
    with pytest.raises(ValueError, match=rf"works is {smallest}\."):
        with_budget(smallest - 1)
