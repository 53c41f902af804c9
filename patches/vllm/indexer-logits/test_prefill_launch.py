"""The canonical size of a prefill launch: within the budget, as large as it allows, and met by a full chunk."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator
from typing import Any

import pytest

MIB = 1 << 20
POLICIES = ("constant_bytes", "fixed_width")


def sizes() -> Any:
    return importlib.import_module("vllm.model_executor.layers.sparse_indexer_logits")


def next_multiple(value: int, step: int) -> int:
    return next(n for n in range(value, value + step) if n % step == 0)


def prefill_of(policy: str, budget_mb: int, rows: int, columns: int, heads: int = 32, *, sm100: bool) -> Any:
    layout = sizes().logits_layout(sm100=sm100, fp32_copy=True)
    return sizes().prefill_launch(policy, budget_mb * MIB, rows, columns, heads, layout)


def test_upstream_and_no_columns_have_no_launch() -> None:
    layout = sizes().logits_layout(sm100=False, fp32_copy=True)
    assert sizes().prefill_launch("upstream", 1, 8192, 1_048_576, 32, layout) is None
    assert sizes().prefill_launch("constant_bytes", MIB, 8192, 0, 32, layout) is None


Case = tuple[Any, int, int, int, int]


def launches(policy: str = "constant_bytes", count: int = 1500) -> Iterator[Case]:
    """(launch, rows of a full chunk, columns, row step, budget) of random settings that the budget allows."""
    module, rng, made = sizes(), random.Random(1), 0
    while made < count:
        heads, rows = rng.choice([0, 8, 16, 32, 64, 128, 256]), int(2 ** rng.uniform(0, 15))
        columns, budget = int(2 ** rng.uniform(0, 20.2)), rng.choice([1, 3, 16, 100, 511, 512, 2048]) * MIB
        layout = module.logits_layout(sm100=rng.random() < 0.5, fp32_copy=True)
        try:
            launch = module.prefill_launch(policy, budget, rows, columns, heads, layout)
        except ValueError:
            continue
        made += 1
        yield launch, rows, columns, max(1, 128 // heads) if heads else 128, budget


def is_sm100(launch: Any) -> bool:
    return bool(launch.layout.element_bytes == 2)


def step_of(launch: Any) -> int:
    return 512 if is_sm100(launch) else 256


def live_bytes(launch: Any) -> int:
    """Bytes alive of a logit: FP32, or BF16 with the FP32 copy that prefill always makes."""
    return 6 if is_sm100(launch) else 4


@pytest.mark.parametrize("policy", POLICIES)
def test_canonical_size_is_within_the_budget(policy: str) -> None:
    """Of ``constant_bytes`` with the copy; of ``fixed_width`` without it, as upstream counts."""
    for launch, _, _, _, budget in launches(policy):
        counted = live_bytes(launch) if policy == "constant_bytes" else 4
        assert 0 < launch.elements * counted <= budget
        assert launch.live_bytes == sum(launch.allocations) == launch.elements * live_bytes(launch)


@pytest.mark.parametrize("sm100", [False, True], ids=["sm90", "sm100"])
def test_a_launch_holds_its_logits_and_their_copy(sm100: bool) -> None:
    """8,192 rows at full width: 128 Mi elements of FP32 are 512 MiB, and of BF16 with the copy 256 and 512 MiB."""
    launch = prefill_of("constant_bytes", 768 if sm100 else 512, 8192, 16_384, sm100=sm100)
    assert launch.allocations == ((256 * MIB, 512 * MIB) if sm100 else (512 * MIB,))


def test_canonical_size_is_whole_steps_of_a_full_chunk_unless_capped() -> None:
    """As large as the budget allows. Finer steps count only where whole ones leave no row step at full width."""
    kinds = {"capped": 0, "whole": 0, "fine": 0}
    for launch, rows, columns, row_step, budget in launches():
        full_rows, step = next_multiple(rows, row_step), step_of(launch)
        whole, fine, least = full_rows * step, row_step * step, row_step * next_multiple(columns, step)
        if launch.elements == full_rows * next_multiple(columns, step):
            kinds["capped"] += 1
            continue
        coarse = launch.elements % whole == 0 and (launch.elements + whole) * live_bytes(launch) > budget
        kinds["whole" if coarse else "fine"] += 1
        if not coarse:
            assert launch.elements % fine == 0
            assert (launch.elements + fine) * live_bytes(launch) > budget
            assert launch.elements // whole * whole < least
        assert launch.elements >= least
    assert min(kinds.values()) > 50, kinds


def test_canonical_size_of_a_chunk_that_fits_at_full_width_is_what_it_takes() -> None:
    seen = 0
    for launch, rows, columns, row_step, budget in launches():
        whole = next_multiple(rows, row_step) * next_multiple(columns, step_of(launch))
        if whole * live_bytes(launch) <= budget:
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
    """Where that is whole steps of a full chunk, else less by a part of one."""
    exact = near = 0
    for launch, rows, columns, row_step, _ in launches(count=6000):
        full_rows, step = next_multiple(rows, row_step), step_of(launch)
        for keys in {1, columns // 3 + 1, columns}:
            if launch.fits(rows, keys):
                left = launch.elements - full_rows * next_multiple(launch.width(rows, keys), step)
                assert left == launch.elements % (full_rows * step)
                exact += not left
                near += left > 0
    assert exact > 1000
    assert near > 1


@pytest.mark.parametrize("policy", POLICIES)
def test_most_rows_of_a_launch_fit_and_no_more(policy: str) -> None:
    """At any width up to the longest; ``fixed_width`` scores one row step above its budget, too, as upstream does."""
    for launch, rows, columns, row_step, budget in launches(policy):
        for keys in {1, columns // 3 + 1, columns}:
            most = launch.max_rows(keys)
            above = policy == "fixed_width" and row_step * launch.stride(keys) > launch.elements
            assert launch.fits(most, keys) or (above and most == row_step), (launch, rows, keys, budget)
            assert not launch.fits(most + row_step, keys)


@pytest.mark.parametrize(
    ("rows", "columns", "heads", "budget_mb", "sm100"),
    [
        (8192, 1_310_720, 32, 23, False),
        (3072, 1_048_576, 0, 512, False),
        (8192, 1_310_720, 32, 30, True),
        (3072, 1_048_576, 0, 768, True),
    ],
    ids=["small-budget", "unknown-heads", "sm100-small-budget", "sm100-unknown-heads"],
)
def test_rounding_to_whole_chunks_leaves_room_for_one_row_step(
    rows: int, columns: int, heads: int, budget_mb: int, sm100: bool
) -> None:
    """4 rows take 20 MiB where whole steps of a chunk are 8 MiB each; 128 rows take 512 MiB, whole steps of 3 MiB.

    With the copy of SM100 they take 30 and 768 MiB, and whole steps 24 and 9 MiB.
    """
    launch = prefill_of("constant_bytes", budget_mb, rows, columns, heads, sm100=sm100)
    assert launch.fits(launch.row_step, columns)
    assert launch.live_bytes <= budget_mb * MIB
