"""Sizes of workspace requests: where tensors lie in a slot, and how far a plan grows ahead."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator
from math import prod
from typing import Any

import pytest
import torch

MIB = 1 << 20
DTYPES = (torch.uint8, torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.int64)
PLENTY = 1 << 50


def layout() -> Any:
    return importlib.import_module("vllm.v1.worker.workspace_layout")


def random_specs(count: int) -> Iterator[tuple[tuple[tuple[int, ...], torch.dtype], ...]]:
    draw = random.Random(6)
    for _ in range(count):
        yield tuple(
            (tuple(draw.randrange(0, 19) for _ in range(draw.randrange(1, 4))), draw.choice(DTYPES))
            for _ in range(draw.randrange(1, 7))
        )


def test_tensors_lie_one_after_the_other_at_multiples_of_256() -> None:
    """Each starts at the first multiple of 256 that the one before leaves free."""
    for specs in random_specs(500):
        plan = layout().workspace_layout(specs)
        assert plan.sizes == tuple(prod(shape) * dtype.itemsize for shape, dtype in specs)
        assert plan.offsets[0] == 0
        ends = [*plan.offsets[1:], plan.total_bytes]
        for offset, size, end in zip(plan.offsets, plan.sizes, ends, strict=True):
            assert end % 256 == 0
            assert 0 <= end - offset - size < 256


@pytest.mark.parametrize("size", [1, 255, 256, 257, 511, 512, 4096, 4097, (1 << 31) + 1, (1 << 33) - 1])
def test_one_tensor_takes_its_size_rounded_up(size: int) -> None:
    total = layout().workspace_layout((((size,), torch.uint8),)).total_bytes
    assert total in range(size, size + 256)
    assert total % 256 == 0


def test_views_have_shape_and_dtype_and_do_not_overlap() -> None:
    for specs in random_specs(200):
        plan = layout().workspace_layout(specs)
        storage = torch.zeros(plan.total_bytes, dtype=torch.uint8)
        views = plan.views(storage)
        assert [(tuple(v.shape), v.dtype) for v in views] == [(shape, dtype) for shape, dtype in specs]
        for view in views:
            view.view(torch.uint8).add_(1)
        # A byte of two views would be 2, and a byte that no view covers 0.
        assert int(storage.sum()) == sum(plan.sizes)
        for offset, size in zip(plan.offsets, plan.sizes, strict=True):
            assert bool((storage[offset : offset + size] == 1).all())


def test_views_fit_storage_that_is_larger() -> None:
    specs = (((3,), torch.int64), ((5, 2), torch.float32))
    plan = layout().workspace_layout(specs)
    storage = torch.zeros(plan.total_bytes + 777, dtype=torch.uint8)
    first, second = plan.views(storage)
    assert first.data_ptr() == storage.data_ptr()
    assert second.data_ptr() == storage.data_ptr() + 256


def growth_cases() -> Iterator[tuple[int, int]]:
    """What a slot has and what is wanted, which is more."""
    draw = random.Random(6)
    for _ in range(3000):
        current = 256 * draw.randrange(0, draw.choice([8, 8192, 1 << 22]))
        yield current, current + 256 * draw.randrange(1, draw.choice([2, 8192, 1 << 22]))


@pytest.mark.parametrize("free", [0, 1, 256, MIB, 100 * MIB, 10_000 * MIB, PLENTY, None])
def test_growth_ahead_is_bounded(free: int | None) -> None:
    """By the request, twice what the slot had, and a quarter of the device's free memory."""
    for current, wanted in growth_cases():
        planned = layout().planned_bytes(current, wanted, free)
        assert wanted <= planned <= max(wanted, 2 * current)
        assert planned - wanted <= (0 if free is None else free // 4)


def test_growth_is_exact_for_small_slots_and_for_the_first_request() -> None:
    for current, wanted in growth_cases():
        if wanted < 2 * MIB:
            assert layout().planned_bytes(current, wanted, PLENTY) == wanted
        assert layout().planned_bytes(0, wanted, PLENTY) == wanted


def test_a_large_slot_that_grows_again_doubles() -> None:
    for current in (2 * MIB, 64 * MIB, 700 * MIB):
        assert layout().planned_bytes(current, current + 256, PLENTY) == 2 * current
        assert layout().planned_bytes(current, 3 * current, PLENTY) == 3 * current


@pytest.mark.parametrize("steps", [2, 16, 300])
def test_storage_of_a_growing_sequence_sums_to_less_than_twice_its_last(steps: int) -> None:
    """With every view kept, the storage before the last is no larger in sum than the last itself."""
    draw = random.Random(steps)
    for _ in range(200):
        held, wanted = [0], 2 * MIB
        for _ in range(steps):
            wanted += 256 * draw.randrange(1, draw.choice([2, 4096, wanted // 1024]))
            if held[-1] < wanted < PLENTY // 1024:
                held.append(layout().planned_bytes(held[-1], wanted, PLENTY))
        assert sum(held) < 2 * held[-1]
