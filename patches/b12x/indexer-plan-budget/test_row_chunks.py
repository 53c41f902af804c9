"""Calls in chunks of rows give what each row's own top-k is; every chunk has its own rows of all that has rows.

They run upstream's whole call on a CPU, with torch's selections, from a scratch that is full of garbage.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from budget_plans import PAGE, ChunkCall, assert_topk, budget, calls, plans

TOKENS, ROWS, LAUNCH = 40_000, 96, 32


def row_chunks() -> Any:
    return plans.module("row_chunks")


def chunk_call(monkeypatch: pytest.MonkeyPatch, mode: str = "decode", **caps: Any) -> ChunkCall:
    return ChunkCall(monkeypatch, rows=ROWS, launch=LAUNCH, tokens=TOKENS, mode=mode, **caps)


def scores_of(rows: int, tokens: int = TOKENS, distinct: int = 1 << 23) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores, of which at most so many are distinct, and lengths from one key to all of them, not in order."""
    generator = torch.Generator().manual_seed(rows)
    scores = torch.randint(distinct, (rows, tokens), generator=generator).float()
    lengths = torch.linspace(1, tokens, rows).to(torch.int32)
    return scores, lengths[torch.randperm(rows, generator=generator)]


def parts_of(rows: int) -> list[tuple[int, int]]:
    return {
        33: [(0, 32), (32, 33)],
        64: [(0, 32), (32, 64)],
        80: [(0, 32), (32, 64), (64, 80)],
        96: [(0, 32), (32, 64), (64, 96)],
    }[rows]


@pytest.mark.parametrize("rows", [33, 64, 80, 96])
@pytest.mark.parametrize("mode", ["decode", "prefill"])
@pytest.mark.parametrize("wants_scores", [True, False])
def test_a_call_in_chunks_is_exact(monkeypatch: pytest.MonkeyPatch, mode: str, rows: int, wants_scores: bool) -> None:
    """Three supertiles of 16,384 tokens each time; keys of a prefill are gathered once for each chunk and supertile."""
    call = chunk_call(monkeypatch, mode)
    scores, lengths = scores_of(rows)
    indices, values = call.run(scores, lengths, wants_scores=wants_scores)
    assert (values is None) == (not wants_scores)
    assert_topk(scores, lengths, call.topk, indices, values)
    assert call.scored == [part for part in parts_of(rows) for _ in range(3)]
    assert call.plan.layout.route == ("paged_tiled" if mode == "decode" else "packed_contiguous")
    assert call.allocations.made == []


@pytest.mark.parametrize("mode", ["decode", "prefill"])
def test_ties_at_the_cut(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    call = chunk_call(monkeypatch, mode)
    scores, lengths = scores_of(ROWS, distinct=3)
    indices, values = call.run(scores, lengths)
    assert_topk(scores, lengths, call.topk, indices, values)


def test_launches_of_1024_rows_unless_smaller_ones_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """And weights with a dimension of one behind the heads."""
    call = ChunkCall(monkeypatch, rows=2048, launch=1024, tokens=300, mode="prefill", least=0)
    scores, lengths = scores_of(1500, 300)
    weights = torch.arange(1500.0).view(-1, 1, 1).repeat(1, call.plan.inner.caps.num_q_heads, 1)
    indices, _ = call.run(scores, lengths, wants_scores=False, weights=weights)
    assert_topk(scores, lengths, call.topk, indices)
    assert call.scored == [(0, 1024), (1024, 1500)]


def test_chunks_of_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """One supertile each, from the scratch that the last chunk left."""
    call = chunk_call(monkeypatch)
    scores, lengths = scores_of(ROWS, 1000)
    indices, values = call.run(scores, lengths)
    assert_topk(scores, lengths, call.topk, indices, values)
    assert call.scored == parts_of(ROWS)


def test_physical_slots_are_of_each_row_s_own_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    call = chunk_call(monkeypatch, output_physical_slots=True)
    scores, lengths = scores_of(ROWS)
    slots, values = call.run(scores, lengths)
    width = call.pages.shape[1]
    assert set((slots[5][slots[5] >= 0] // PAGE // width).tolist()) == {5}
    rows = torch.arange(ROWS, dtype=torch.int32)[:, None]
    indices = torch.where(slots < 0, slots, slots - rows * width * PAGE)
    assert_topk(scores, lengths, call.topk, indices, values)
    assert call.allocations.made == []


@pytest.mark.parametrize("mode", ["decode", "prefill"])
@pytest.mark.parametrize("rows", [1, LAUNCH])
def test_a_call_within_a_launch_is_one_call(monkeypatch: pytest.MonkeyPatch, mode: str, rows: int) -> None:
    call = chunk_call(monkeypatch, mode)
    scores, lengths = scores_of(rows, 1000)
    assert not isinstance(call.bind(lengths, 1000), row_chunks().RowChunks)
    indices, values = call.run(scores, lengths)
    assert_topk(scores, lengths, call.topk, indices, values)
    assert call.scored == [(0, rows)]


def test_a_plan_within_its_budget_has_no_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    call = calls.Call(
        monkeypatch, rows=ROWS, tokens=TOKENS, topk=24, mode="decode", route="paged_tiled", plan_budget=budget(1 << 30)
    )
    scores, lengths = scores_of(ROWS)
    indices, values = call.run(scores, lengths)
    assert_topk(scores, lengths, 24, indices, values)
    kinds = [kind for kind, _, _ in call.launches]
    assert kinds == ["fold", "fold", "finish"]


def test_what_a_binding_of_chunks_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """One scratch for all; what else there is, is the first chunk's."""
    call = chunk_call(monkeypatch)
    active = torch.tensor([TOKENS], dtype=torch.int32)
    binding = call.bind(scores_of(80, 64)[1], TOKENS, active_width=active)
    assert isinstance(binding, row_chunks().RowChunks)
    assert [(start, stop) for start, stop, _ in binding.parts] == parts_of(80)
    assert {part.scratch.shared_scratch.data_ptr() for _, _, part in binding.parts} == {call.storage.data_ptr()}
    assert all(part.active_width is active for _, _, part in binding.parts)
    for name in ("route", "supertile_k", "scratch", "output_physical_slots"):
        assert getattr(binding, name) is getattr(binding.parts[0][2], name)
    assert binding.supertile_k == 16384
    for name in ("no_such_attribute", "__no_such__"):
        with pytest.raises(AttributeError):
            getattr(binding, name)


def test_more_rows_than_planned_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    call = chunk_call(monkeypatch)
    with pytest.raises(ValueError, match=r"97 rows, wanted 96 or fewer; plan with more max_q_rows"):
        call.bind(scores_of(97, 64)[1], 64)


def test_schedule_metadata_is_of_a_whole_call(monkeypatch: pytest.MonkeyPatch) -> None:
    call = chunk_call(monkeypatch)
    schedule = torch.zeros(3, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="schedule_metadata with launches of 32 rows"):
        call.bind(scores_of(33, 64)[1], 64, schedule_metadata=schedule)
    assert call.bind(scores_of(32, 64)[1], 64, schedule_metadata=schedule).schedule_metadata is schedule


def test_a_call_in_chunks_brings_its_indices(monkeypatch: pytest.MonkeyPatch) -> None:
    call = chunk_call(monkeypatch)
    with pytest.raises(ValueError, match=r"80 rows in launches of 32 without out_indices; pass out_indices"):
        call.run(*scores_of(80, 1000), out_indices=None)
    assert call.scored == []


@pytest.mark.parametrize("rows", [64, 79, 81, 96])
@pytest.mark.parametrize("name", ["q_fp8", "weights", "out_indices", "out_scores"])
def test_operands_of_other_rows_are_refused(monkeypatch: pytest.MonkeyPatch, name: str, rows: int) -> None:
    """Before anything is launched."""
    call = chunk_call(monkeypatch)
    other = {
        **call.operands(rows),
        "out_indices": torch.zeros(rows, call.topk, dtype=torch.int32),
        "out_scores": torch.zeros(rows, call.topk),
    }[name]
    scores, lengths = scores_of(80, 1000)
    with pytest.raises(ValueError, match=rf"{name} has {rows} rows, wanted 80"):
        call.run(scores, lengths, **{name: other})
    assert call.scored == []


@pytest.mark.parametrize("rows", [64, 79, 81, 96])
def test_lengths_of_other_rows_are_refused(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """As without a budget."""
    call = chunk_call(monkeypatch)
    with pytest.raises(ValueError, match="rows"):
        call.bind(scores_of(rows, 64)[1], 64, table=call.table(80, 64))


def test_chunk_bounds_have_every_row_once() -> None:
    bounds = row_chunks().chunk_bounds
    assert bounds(80, 32) == tuple(parts_of(80))
    for rows in range(1, 140):
        for launch in (1, 32, 64, 96):
            parts = bounds(rows, launch)
            assert [row for part in parts for row in range(*part)] == list(range(rows))
            assert {stop - start for start, stop in parts[:-1]} <= {launch}


def test_launches_of_a_call() -> None:
    """None for one launch, and for caps without a budget, of any number of rows."""
    launches, choice = row_chunks().launches_of, plans.module("plan_budget").Choice(96, 32, 16384, False, 1)
    for caps in (SimpleNamespace(), SimpleNamespace(choice=None)):
        assert launches(caps, 5000) == ()
    caps = SimpleNamespace(choice=choice)
    assert [launches(caps, rows) for rows in (1, 32)] == [(), ()]
    assert [list(launches(caps, rows)) for rows in (33, 96)] == [parts_of(33), parts_of(96)]
    with pytest.raises(ValueError, match="a call of 97 rows, wanted 96"):
        launches(caps, 97)


def test_calls_in_chunks_give_what_one_launch_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    scores, lengths = scores_of(ROWS)
    whole = calls.Call(monkeypatch, rows=ROWS, tokens=TOKENS, topk=24, mode="decode", route="paged_tiled")
    wanted = whole.run(scores, lengths)[1]
    found = chunk_call(monkeypatch).run(scores, lengths)[1]
    assert wanted is not None
    assert found is not None
    assert torch.equal(found.sort().values, wanted.sort().values)
