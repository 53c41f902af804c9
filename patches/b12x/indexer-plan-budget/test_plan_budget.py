"""A plan comes within its budget by the fewest steps, in their order, and says each; without one it is as it was."""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from budget_plans import MIB, budget, choice_of, plans

KIB = 1024


def module() -> Any:
    return plans.module("plan_budget")


@pytest.mark.parametrize("name", ["plan_bytes", "arena_bytes", "least_chunk_rows"])
@pytest.mark.parametrize("value", [-1, -32, 1.0, 32.0, "32", None, True, False, [32], torch.tensor(32)])
def test_wrong_kinds_are_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"plan_budget\.{name} is .*, wanted an integer of 0 or more"):
        module().Budget(**{"plan_bytes": 1 << 30, name: value})


@pytest.mark.parametrize("rows", [1, 31, 33, 1000])
def test_the_smallest_launch_is_a_multiple_of_32(rows: int) -> None:
    with pytest.raises(ValueError, match=rf"least_chunk_rows is {rows}, wanted a multiple of 32"):
        budget(1 << 30, 0, rows)


@pytest.mark.parametrize("given", [(0, 1, 0), (0, 0, 32), (0, 1, 32)])
def test_what_needs_plan_bytes(given: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="no plan_bytes, wanted them with arena_bytes and least_chunk_rows"):
        budget(*given)


def test_the_bound_is_the_larger() -> None:
    bounds = [budget(*given).bound for given in ((), (5,), (5, 3), (5, 5), (5, 9), (5, 9, 64))]
    assert bounds == [0, 5, 5, 5, 9, 9]
    assert budget() == module().Budget() == budget(0, 0, 0)


class Size:
    """Bytes of a plan: some for each row, by its supertile and for the fold. Keeps what it was asked."""

    def __init__(self, fixed: int = 0, tile: int = 1, fold: int = 0) -> None:
        self.fixed, self.tile, self.fold, self.asked = fixed, tile, fold, []

    def __call__(self, rows: int, supertile: int, fold: bool) -> int:
        self.asked.append((rows, supertile, fold))
        return self.fixed + rows * (supertile * self.tile // KIB + fold * self.fold)


def chosen(bound: int, size: Callable[..., int], rows: int = 4096, supertile: int = 32768, **given: int) -> Any:
    arena, named, least = given.get("arena", 0), given.get("named", 0), given.get("least", 1024)
    return module().chosen(budget(bound, arena, named), rows=rows, supertile=supertile, size=size, least=least)


def steps(choice: Any) -> tuple[int, int, bool, int]:
    return choice.rows, choice.supertile, choice.fold, choice.nbytes


# A whole plan of 4,096 rows takes 172,032 bytes, without its fold 131,072, with small supertiles 65,536.
@pytest.mark.parametrize(
    ("bound", "wanted", "reasons"),
    [
        (1 << 20, (4096, 32768, True, 172_032), ()),
        (172_032, (4096, 32768, True, 172_032), ()),
        (172_031, (4096, 32768, False, 131_072), ("fold.*carry.*172,032 B -> 131,072 B",)),
        (131_072, (4096, 32768, False, 131_072), ("fold",)),
        (131_071, (4096, 16384, False, 65_536), ("fold", "16,384 tokens.*131,072 B -> 65,536 B")),
        (65_536, (4096, 16384, False, 65_536), ("fold", "16,384 tokens")),
        (65_535, (2048, 16384, False, 32_768), ("fold", "16,384", "2 launches of 2,048 rows: 65,536 B -> 32,768 B")),
        (32_767, (1376, 16384, False, 22_016), ("fold", "16,384", "3 launches of 1,376 rows: 65,536 B -> 22,016 B")),
        (16_384, (1024, 16384, False, 16_384), ("fold", "16,384", "4 launches of 1,024 rows: 65,536 B -> 16,384 B")),
    ],
)
def test_the_order_of_the_steps(bound: int, wanted: tuple[Any, ...], reasons: tuple[str, ...]) -> None:
    size = Size(fold=10)
    choice = chosen(bound, size)
    assert steps(choice) == wanted
    assert choice.call_rows == 4096
    assert len(choice.reasons) == len(reasons)
    assert all(re.search(pattern, said) for pattern, said in zip(reasons, choice.reasons, strict=True))
    assert size.asked[0] == (4096, 32768, True)
    assert len(size.asked) == 1 + min(len(reasons), 2) + max(0, -(-4096 // choice.rows) - 1)


@pytest.mark.parametrize("supertile", [8192, 16384])
def test_a_step_that_saves_nothing_is_not_taken(supertile: int) -> None:
    """Supertiles that are small already, and a plan without a fold."""
    choice = chosen(16_384, Size(), supertile=supertile)
    assert choice.supertile == supertile
    (reason,) = choice.reasons
    assert "launches" in reason


def test_nothing_is_saved_below_the_arena() -> None:
    for arena, wanted in ((172_032, 172_032), (172_031, 131_072), (70_000, 65_536), (10_000, 16_384)):
        assert chosen(16_384, Size(fold=10), arena=arena).nbytes == wanted


def test_a_named_smallest_launch_takes_the_place_of_the_least() -> None:
    with pytest.raises(module().BudgetTooSmall):
        chosen(10_000, Size(fold=10))
    assert chosen(10_000, Size(fold=10), named=32).rows == 608
    with pytest.raises(module().BudgetTooSmall):
        chosen(16_384, Size(fold=10), named=2048)


@pytest.mark.parametrize(("rows", "launch"), [(4096, 1024), (1024, 1024), (500, 500), (1, 1)])
def test_a_budget_that_is_too_small(rows: int, launch: int) -> None:
    with pytest.raises(module().BudgetTooSmall) as raised:
        chosen(10, Size(fold=10), rows=rows)
    assert isinstance(raised.value, ValueError)
    for said in (f"plan of {rows:,} rows", f"{launch * 16:,} B in launches of {launch:,} rows", "wanted 10 B or less"):
        assert said in str(raised.value)


def cases(count: int, seed: int) -> Any:
    """Rows, least, bound and size by chance; a few bounds are too small."""
    draw = Random(seed)
    for _ in range(count):
        rows, least = draw.randint(1, 5000), 32 * draw.choice((1, 2, 7, 32))
        size = Size(draw.randint(0, 3000), draw.choice((0, 1, 3)), draw.choice((0, 5, 100)))
        supertile = draw.choice((8192, 16384, 32768))
        yield rows, least, draw.randint(1, 2 * size(rows, supertile, True) + 1), supertile, size


def test_every_choice_is_within_its_bound_with_the_fewest_launches() -> None:
    counts = {0: 0, 1: 0, 2: 0, 3: 0}
    for rows, least, bound, supertile, size in cases(4000, seed=1):
        try:
            choice = chosen(bound, size, rows, supertile, least=least)
        except module().BudgetTooSmall:
            continue
        counts[len(choice.reasons)] += 1
        assert choice.nbytes == size(choice.rows, choice.supertile, choice.fold) <= bound
        said = [[int(one.replace(",", "")) for one in re.findall(r"([\d,]+) B", why)] for why in choice.reasons]
        chain = [size(rows, supertile, True), *(after for _, after in said)]
        assert [before for before, _ in said] == chain[:-1]
        assert all(nbytes > bound for nbytes in chain[:-1])
        assert chain[-1] == choice.nbytes
        parts = plans.module("row_chunks").chunk_bounds(rows, choice.rows)
        assert [row for part in parts for row in range(*part)] == list(range(rows))
        if len(parts) > 1:
            assert choice.rows % 32 == 0
            assert choice.rows >= min(least, rows)
            assert (choice.rows - 32) * len(parts) < rows or choice.rows == min(least, rows)
            assert f"{len(parts)} launches of {choice.rows:,} rows" in choice.reasons[-1]
            for fewer in range(1, len(parts)):
                even = -(-rows // (32 * fewer)) * 32
                assert size(even, choice.supertile, False) > bound
    assert min(counts.values()) > 20, counts


def test_what_is_too_small_takes_more_than_was_wanted() -> None:
    for rows, least, bound, supertile, size in [(1056, 1024, 1024, 1024, Size()), *cases(4000, seed=2)]:
        try:
            chosen(bound, size, rows, supertile, least=least)
            continue
        except module().BudgetTooSmall as error:
            said = str(error)
        takes, wanted = (int(one.replace(",", "")) for one in re.findall(r"([\d,]+) B", said))
        assert takes > wanted == bound, said


def test_a_prefill_of_3072_rows_under_192_mib() -> None:
    planned = plans.plan(3072, mode="prefill", plan_budget=budget(192 * MIB))
    prepared, choice = plans.prepared_plans(), choice_of(planned)
    saved = 354_496_512 if prepared else 379_662_336
    assert planned.layout.nbytes == choice.nbytes == plans.plan(3072, mode="prefill").layout.nbytes - saved
    assert planned.layout.nbytes <= 180 * MIB
    assert (choice.call_rows, choice.rows, choice.supertile) == (3072, 1536, 16384)
    assert planned.layout.supertile_tokens == 16384
    assert planned.scratch_specs()[0].shape == (planned.layout.nbytes,)
    assert "2 launches of 1,536 rows" in choice.reasons[-1]
    assert set(choice.reasons) <= set(planned.layout.memory.notes)


@pytest.mark.parametrize("rows", [1024, 2000, 2049, 3072, 4096, 8192])
@pytest.mark.parametrize("plan_bytes", [128 * MIB, 192 * MIB, 400 * MIB])
def test_prefills_keep_the_scorer_s_tile(rows: int, plan_bytes: int) -> None:
    planned = plans.plan(rows, mode="prefill", plan_budget=budget(plan_bytes))
    assert planned.layout.nbytes == choice_of(planned).nbytes <= plan_bytes
    assert choice_of(planned).rows >= 1024
    assert planned.layout.prefill_block_k == plans.plan(rows, mode="prefill").layout.prefill_block_k


def test_a_decode_gives_up_the_fold_first() -> None:
    whole = plans.plan(64).layout
    planned = plans.plan(64, plan_budget=budget(whole.nbytes - 1))
    choice = choice_of(planned)
    assert steps(choice)[:3] == (64, 32768, False)
    (reason,) = choice.reasons
    assert f"{whole.nbytes:,} B -> {planned.layout.nbytes:,} B" in reason
    without = {item.region.name: item.region.nbytes for item in planned.layout.memory.placed}
    assert without["fold"] == 0
    assert without["candidate_values"] == 2 * 64 * plans.TOPK * 4
    smaller = plans.plan(64, plan_budget=budget(planned.layout.nbytes - 1))
    assert steps(choice_of(smaller))[:3] == (64, 16384, False)
    with pytest.raises(module().BudgetTooSmall, match="a plan of 64 rows"):
        plans.plan(64, plan_budget=budget(smaller.layout.nbytes - 1))
    assert choice_of(plans.plan(64, plan_budget=budget(smaller.layout.nbytes - 1, 0, 32))).rows == 32


@pytest.mark.parametrize("mode", ["decode", "prefill"])
@pytest.mark.parametrize("rows", [1, 16, 64, 300])
@pytest.mark.parametrize("more", [{}, {"supertile_k": 4096}, {"topk": 512}])
def test_a_plan_without_a_budget_or_within_it_is_as_it_was(mode: str, rows: int, more: dict[str, int]) -> None:
    plain = plans.plan(rows, 1500, mode, **more)
    empty = plans.plan(rows, 1500, mode, plan_budget=budget(), **more)
    fits = plans.plan(rows, 1500, mode, plan_budget=budget(plain.layout.nbytes), **more)
    arena = plans.plan(rows, 1500, mode, plan_budget=budget(1, plain.layout.nbytes), **more)
    assert plain.layout == empty.layout == fits.layout == arena.layout
    assert (plain.inner.caps, choice_of(empty)) == (empty.inner.caps, None)
    assert choice_of(fits).reasons == choice_of(arena).reasons == ()


@pytest.mark.parametrize("mode", ["decode", "prefill"])
def test_a_budget_for_msa_is_refused(mode: str) -> None:
    msa = {"score_mode": "msa", "num_idx_heads": 4, "topk": 16}
    assert plans.plan(64, 1024, mode, plan_budget=budget(), **msa).layout == plans.plan(64, 1024, mode, **msa).layout
    for make in (plans.plan, plans.inner_plan):
        with pytest.raises(ValueError, match=r"plan_budget .*'msa', .*leave the budget out"):
            make(64, 1024, mode, plan_budget=budget(1 << 30), **msa)


def test_a_budget_for_a_contiguous_source_is_refused() -> None:
    caps = plans.module("scratch").B12XIndexerScratchCaps
    given = {"device": "cpu", "source_layout": "contiguous", "num_q_heads": 32, "topk": 2048, "max_q_rows": 64}
    assert caps(**given, max_k_rows=4096, plan_budget=budget()) == caps(**given, max_k_rows=4096)
    with pytest.raises(ValueError, match=r"plan_budget .*'contiguous'.*leave the budget out"):
        caps(**given, max_k_rows=4096, plan_budget=budget(1 << 30))
