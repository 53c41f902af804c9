"""The plan of prefill launches: which rows each scores, and how many there are.

Runs the planner of the vLLM on the path, and upstream's own, on a CPU.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

MIB = 1 << 20
Chunk = tuple[slice, slice]


def sizes() -> Any:
    return importlib.import_module("vllm.model_executor.layers.sparse_indexer_logits")


def planner() -> Any:
    return importlib.import_module("vllm.model_executor.layers.sparse_indexer_plan")


def indexer() -> Any:
    return importlib.import_module("vllm.v1.attention.backends.mla.indexer")


def launch_of(
    rows: int, columns: int, budget: int = 512 * MIB, *, policy: str = "constant_bytes", sm100: bool = False
) -> Any:
    return sizes().prefill_launch(
        policy, budget, rows, columns, 32, sizes().logits_layout(sm100=sm100, fp32_copy=True)
    )  # fmt: skip


def allocated(launch: Any, rows: int, width: int) -> int:
    """Elements that DeepGEMM allocates for a launch of 32 heads."""
    step = 1024 // launch.layout.element_bytes
    return -(-rows // 4) * 4 * (-(-width // step) * step)


def live_bytes(sm100: bool) -> int:
    """Bytes alive of a logit: FP32, or BF16 with its FP32 copy."""
    return 6 if sm100 else 4


def check(chunks: list[Chunk], rows: Sequence[int], keys: Sequence[int], workspace: int, launch: Any) -> None:
    """Every row once and in order; the bounds; no request is left out of a launch that had room for it."""
    first = [sum(rows[:n]) for n in range(len(rows) + 1)]
    scored = [first[requests.start] + row for requests, where in chunks for row in range(where.start, where.stop)]
    assert scored == list(range(sum(rows)))
    for requests, where in chunks:
        packed, widest = sum(rows[requests]), max(keys[requests])
        alone = requests.stop - requests.start == 1
        assert alone or sum(keys[requests]) <= workspace
        assert alone or where == slice(0, packed)
        assert launch.fits(where.stop - where.start, widest)
        if widest:
            assert allocated(launch, where.stop - where.start, launch.width(where.stop - where.start, widest)) <= (
                launch.elements
            )
        if where.stop == packed and where.start == 0 and requests.stop < len(rows):
            more = slice(requests.start, requests.stop + 1)
            assert sum(keys[more]) > workspace or not launch.fits(sum(rows[more]), max(keys[more]))


@pytest.mark.parametrize("policy", ["constant_bytes", "fixed_width"])
@pytest.mark.parametrize("sm100", [False, True], ids=["sm90", "sm100"])
def test_random_requests(policy: str, sm100: bool) -> None:
    rng = random.Random(3)
    split = packed = 0
    for _ in range(300):
        columns, batched = rng.randint(1, 20_000), rng.randint(1, 600)
        # A budget of one row step at full width, and some full chunks besides.
        counted = live_bytes(sm100) if policy == "constant_bytes" else 4
        budget = (rng.choice([0, 1, 2, 8]) * batched * 2048 + 4 * 20_480) * counted
        launch = launch_of(batched, columns, budget, policy=policy, sm100=sm100)
        assert launch.elements * counted <= budget
        count = rng.randint(1, 12)
        rows = [rng.randint(1, max(1, batched // rng.randint(1, count))) for _ in range(count)]
        keys = [rng.choice([0, rng.randint(1, columns), rng.randint(1, 300)]) for _ in rows]
        keys = [min(n, columns) for n in keys]
        if policy == "fixed_width":
            keys = [max(n, 1) for n in keys]
        workspace = rng.choice([columns, 2 * columns, 40 * columns])
        chunks = planner().plan_chunks(rows, keys, keys, workspace, launch)
        check(chunks, rows, keys, workspace, launch)
        split += any(where.start for _, where in chunks)
        packed += any(requests.stop - requests.start > 1 for requests, _ in chunks)
    assert split > 20
    assert packed > 100


LADDERS = [(8192, 98_304), (4608, 184_320), (3072, 196_608), (3072, 522_240), (4608, 225_792, 4)]


def launches_of(ladder: tuple[int, ...], budget: int, *, sm100: bool) -> tuple[int, int]:
    """(launches, upstream's launches at 512 MiB) of a single request that grows by full chunks; checks each plan."""
    chunk, total, compress = (*ladder, 1)[:3]
    launch = launch_of(chunk, total // compress, budget, sm100=sm100)
    workspace, splitter = 40 * total, indexer().DeepseekV32IndexerMetadataBuilder._split_indexer_prefill_chunks
    planned = upstream = 0
    for context in range(chunk, total + 1, chunk):
        keys = context // compress
        chunks = planner().plan_chunks([chunk], [keys], [keys], workspace, launch)
        check(chunks, [chunk], [keys], workspace, launch)
        for _, where in chunks:
            rows = where.stop - where.start
            assert allocated(launch, rows, launch.width(rows, keys)) * live_bytes(sm100) <= budget
        planned += len(chunks)
        upstream += len(splitter(torch.tensor([keys]), torch.tensor([chunk]), workspace, 512 * MIB))
    assert upstream > 10
    return planned, upstream


each_ladder = pytest.mark.parametrize("ladder", LADDERS, ids=lambda ladder: "-".join(map(str, ladder)))


@each_ladder
def test_a_long_prefill_takes_no_more_launches_than_upstream(ladder: tuple[int, ...]) -> None:
    """At most 1 % more over all chunks, each within the budget."""
    planned, upstream = launches_of(ladder, 512 * MIB, sm100=False)
    assert planned <= upstream * 1.01


@each_ladder
def test_a_long_prefill_on_sm100_takes_half_as_many_again(ladder: tuple[int, ...]) -> None:
    """Upstream counts 4 of the 6 bytes that are alive of a logit, and so exceeds the budget by as much."""
    planned, upstream = launches_of(ladder, 512 * MIB, sm100=True)
    assert planned <= upstream * 1.52


@each_ladder
def test_sm100_with_the_bytes_that_upstream_holds_takes_as_many_launches(ladder: tuple[int, ...]) -> None:
    """512 MiB of FP32 as upstream counts are 768 MiB with the BF16 beside it.

    One launch more of 73 in a ladder: upstream scores 4,608 rows of 28,800 pools in one launch, which allocates 29,184
    columns and so 262,144 elements more than the budget has.
    """
    planned, upstream = launches_of(ladder, 768 * MIB, sm100=True)
    assert planned <= upstream * 1.015


def test_packed_requests_are_planned_by_the_widest() -> None:
    """8,000 rows of 4,000 keys are 131 MB; by the sum of their keys they would be 1 GB."""
    rows, keys = [1000] * 8, [4000] * 8
    chunks = planner().plan_chunks(rows, keys, keys, 10**6, launch_of(8192, 131_072))
    assert chunks == [(slice(0, 8), slice(0, 8000))]


def test_the_workspace_bounds_a_pack() -> None:
    rows, keys = [10] * 5, [4000] * 5
    chunks = planner().plan_chunks(rows, keys, keys, 9000, launch_of(8192, 131_072))
    assert [requests for requests, _ in chunks] == [slice(0, 2), slice(2, 4), slice(4, 5)]


def test_a_request_larger_than_the_workspace_stands_alone() -> None:
    chunks = planner().plan_chunks([10, 10], [9001, 10], [9001, 10], 9000, launch_of(8192, 131_072))
    assert chunks == [(slice(0, 1), slice(0, 10)), (slice(1, 2), slice(0, 10))]


@pytest.mark.parametrize(("rows", "keys"), [([5, 3], [0, 0]), ([5, 3], [0, 40]), ([5, 3], [40, 0])])
def test_requests_without_keys(rows: list[int], keys: list[int]) -> None:
    chunks = planner().plan_chunks(rows, keys, keys, 1000, launch_of(8192, 131_072))
    assert chunks == [(slice(0, 2), slice(0, 8))]


def test_nothing_to_plan() -> None:
    assert planner().plan_chunks([], [], [], 1000, launch_of(8192, 131_072)) == []


def test_fixed_width_launches_have_one_width() -> None:
    launch = launch_of(8192, 131_072, policy="fixed_width")
    seen = set()
    for keys in [8192, 50_000, 131_072]:
        for requests, where in planner().plan_chunks([8192], [keys], [keys], 10**7, launch):
            assert requests == slice(0, 1)
            seen.add((launch.width(where.stop - where.start, keys), where.stop - where.start))
    assert seen == {(131_072, 1024)}
