"""Sizes of the indexer's logits: strides, canonical launch size, budget errors. Integers only."""

from __future__ import annotations

import importlib
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

MIB = 1 << 20
POLICIES = ("constant_bytes", "fixed_width")


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


@pytest.mark.parametrize(("heads", "rows"), [(128, 1), (64, 2), (32, 4), (16, 8), (8, 16), (1, 128)])
def test_row_step_holds_128_pairs_of_row_and_head(heads: int, rows: int) -> None:
    assert sizes().prefill_row_step(heads) == rows


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16, 32, 64, 128])
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


def prefill(policy: str, sm100: bool) -> Callable[[int], Any]:
    layout = sizes().logits_layout(sm100=sm100, fp32_copy=True)
    return lambda budget_mb: sizes().prefill_launch(policy, budget_mb * MIB, 8192, 1_048_576, 32, layout)


def decode(next_n: int, step: int, sm100: bool) -> Callable[[int], Any]:
    layout = sizes().logits_layout(sm100=sm100, fp32_copy=True)
    return lambda budget_mb: sizes().decode_tile_units(budget_mb * MIB, next_n, step, 1_048_576, layout)


@pytest.mark.parametrize(
    ("make", "smallest"),
    [
        # 4 rows of 32 heads x 1,048,576 columns, counted as FP32 on both architectures
        (lambda: prefill("constant_bytes", False), 16),
        (lambda: prefill("constant_bytes", True), 16),
        (lambda: prefill("fixed_width", True), 16),
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


def test_upstream_and_no_columns_have_no_launch() -> None:
    layout = sizes().logits_layout(sm100=False, fp32_copy=True)
    assert sizes().prefill_launch("upstream", 1, 8192, 1_048_576, 32, layout) is None
    assert sizes().prefill_launch("constant_bytes", MIB, 8192, 0, 32, layout) is None


Case = tuple[Any, int, int, int, int]


def launches(policy: str = "constant_bytes", count: int = 1500) -> Iterator[Case]:
    """(launch, rows of a full chunk, columns, row step, budget) of random settings that the budget allows."""
    module, rng, made = sizes(), random.Random(1), 0
    while made < count:
        heads, rows = rng.choice([0, 8, 16, 32, 64, 128]), int(2 ** rng.uniform(0, 15))
        columns, budget = int(2 ** rng.uniform(0, 20.2)), rng.choice([1, 3, 16, 100, 511, 512, 2048]) * MIB
        layout = module.logits_layout(sm100=rng.random() < 0.5, fp32_copy=rng.random() < 0.5)
        try:
            launch = module.prefill_launch(policy, budget, rows, columns, heads, layout)
        except ValueError:
            continue
        made += 1
        yield launch, rows, columns, 128 // heads if heads else 128, budget


def step_of(launch: Any) -> int:
    return 256 if launch.layout.element_bytes == 4 else 512


@pytest.mark.parametrize("policy", POLICIES)
def test_canonical_size_is_within_the_budget(policy: str) -> None:
    for launch, _, _, _, budget in launches(policy):
        assert 0 < launch.elements * 4 <= budget


def test_canonical_size_is_whole_steps_of_a_full_chunk_unless_capped() -> None:
    for launch, rows, columns, row_step, budget in launches():
        full_rows, step = next_multiple(rows, row_step), step_of(launch)
        capped = launch.elements == full_rows * next_multiple(columns, step)
        granule = full_rows * step if full_rows * step * 4 <= budget else row_step * step
        assert capped or launch.elements % granule == 0


def test_canonical_size_of_a_chunk_that_fits_at_full_width_is_what_it_takes() -> None:
    seen = 0
    for launch, rows, columns, row_step, budget in launches():
        whole = next_multiple(rows, row_step) * next_multiple(columns, step_of(launch))
        if whole * 4 <= budget:
            seen += 1
            assert launch.elements == whole
        else:
            assert launch.elements < whole
    assert 100 < seen < 1400


@pytest.mark.parametrize("policy", POLICIES)
def test_a_launch_that_fits_stays_within_the_canonical_size(policy: str) -> None:
    rng, seen = random.Random(2), 0
    for launch, rows, columns, row_step, _ in launches(policy):
        for _ in range(4):
            some, keys = rng.randint(1, rows), int(2 ** rng.uniform(0, columns.bit_length() - 1))
            if not launch.fits(some, keys):
                continue
            seen += 1
            width = launch.width(some, keys)
            assert width >= keys
            assert next_multiple(some, row_step) * next_multiple(width, step_of(launch)) <= launch.elements
    assert seen > 1000


def test_a_full_chunk_allocates_exactly_the_canonical_size() -> None:
    seen = 0
    for launch, rows, columns, row_step, _ in launches():
        for keys in {1, columns // 3 + 1, columns}:
            if launch.fits(rows, keys):
                seen += 1
                width = next_multiple(launch.width(rows, keys), step_of(launch))
                assert next_multiple(rows, row_step) * width == launch.elements
    assert seen > 1000


@pytest.mark.parametrize("policy", POLICIES)
def test_most_rows_of_a_launch_fit_and_no_more(policy: str) -> None:
    """At any width up to the longest: a budget that is accepted holds one row step at full width."""
    for launch, rows, columns, row_step, budget in launches(policy):
        for keys in {1, columns // 3 + 1, columns}:
            most = launch.max_rows(keys)
            assert launch.fits(most, keys), (launch, rows, keys, budget)
            assert not launch.fits(most + row_step, keys)


@pytest.mark.parametrize(
    ("rows", "columns", "heads", "budget"),
    [(8192, 1_310_720, 32, 23 * MIB), (3072, 1_048_576, 0, 512 * MIB)],
    ids=["small-budget", "unknown-heads"],
)
def test_rounding_to_whole_chunks_leaves_room_for_one_row_step(
    rows: int, columns: int, heads: int, budget: int
) -> None:
    """4 rows take 20 MiB where whole steps of a chunk are 8 MiB each; 128 rows take 512 MiB, whole steps of 3 MiB."""
    layout = sizes().logits_layout(sm100=False, fp32_copy=True)
    launch = sizes().prefill_launch("constant_bytes", budget, rows, columns, heads, layout)
    assert launch.fits(launch.row_step, columns)
