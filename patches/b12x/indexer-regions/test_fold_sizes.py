"""The fold needs what upstream's needs, and gets what was reserved. Runs on the b12x on the path, on a CPU."""

from __future__ import annotations

import os
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from indexer_plans import (
    BUDGET,
    PAGE,
    SUPERTILES,
    SWITCH,
    TOPK,
    VARIABLES,
    WIDTH,
    WIDTHS,
    bound,
    calls,
    fold_of,
    inner_plan,
    module,
    plan,
    upstream_fold,
    upstream_plan,
)

MIB = 1 << 20
PLENTY = 1 << 60


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def shape(rows: int, width: int = WIDTH, supertile: int = 512, topk: int = TOPK, page: int = PAGE) -> Any:
    return module("fold_sizes").FoldShape(rows, topk, width, page, supertile)


def within(call: Any, reserved: int = PLENTY, *, allowed: bool = True, physical: bool = False) -> Any:
    return module("fold_sizes").fold_within(call, reserved, allowed=allowed, physical=physical)


def test_bytes_of_a_decode_over_524288_tokens() -> None:
    assert shape(48).nbytes() == 25_166_016
    assert shape(48).slice_counts() == (2,) * 16


def test_slices_and_bytes_are_upstream_s() -> None:
    seen = set()
    for rows, width, supertile in calls(500):
        call, theirs = shape(rows, width, supertile), upstream_fold(rows, width, supertile)
        ours = within(call)
        assert (ours.slices, ours.total_slices) == (theirs.slices, theirs.total_slices), call
        assert ours.candidate_nbytes == theirs.candidate_nbytes == call.nbytes(), call
        assert call.slice_counts() == tuple(count for count, _ in theirs.slices), call
        seen.add(max(call.slice_counts(), default=0))
    assert {0, 1, 2} <= seen


@pytest.mark.parametrize("page", [16, 32, 128, 256])
@pytest.mark.parametrize("topk", [1, 512])
def test_other_pages_and_topk(page: int, topk: int) -> None:
    draw = Random(page)
    for tokens in [*(width * PAGE for width in WIDTHS), *(draw.randint(1, 4 * MIB) for _ in range(20))]:
        width, supertile = -(-tokens // page), 32_768 // page
        ours, theirs = within(shape(7, width, supertile, topk, page)), upstream_fold(7, width, supertile, topk, page)
        assert (ours.slices, ours.candidate_nbytes) == (theirs.slices, theirs.candidate_nbytes), tokens


def test_a_fold_has_the_fields_of_upstream_s_plan() -> None:
    assert vars(module("fold_sizes").Fold()).keys() == vars(module("paged")._TwoLevelFoldPlan()).keys()
    assert within(shape(1, 511)).slices == module("paged")._TwoLevelFoldPlan().slices == ()


def test_narrower_calls_can_need_more() -> None:
    """Why each call asks: 62 slices over 1,015,872 tokens, 32 over 1,048,576."""
    narrow, wide = shape(20, 1_015_872 // PAGE), shape(20, 1_048_576 // PAGE)
    assert sum(wide.slice_counts()) == 32 < sum(narrow.slice_counts())
    assert narrow.nbytes() > wide.nbytes()
    scratch = SimpleNamespace(memory=plan(20, wide.width).layout.memory)
    assert fold_of(scratch, 20, wide.width).slices
    assert not fold_of(scratch, 20, narrow.width).slices
    assert fold_of(scratch, 10, narrow.width).slices


@pytest.mark.parametrize("name", ["rows", "topk", "width", "page_size", "supertile_pages"])
@pytest.mark.parametrize("value", [0, -1])
def test_no_shape_of_nothing(name: str, value: int) -> None:
    sizes = {"rows": 1, "topk": 1, "width": 1, "page_size": 1, "supertile_pages": 1} | {name: value}
    with pytest.raises(ValueError, match=f"a fold of {name} {value}, wanted 1 or more"):
        module("fold_sizes").FoldShape(**sizes)


def test_a_fold_takes_all_that_was_reserved_and_not_a_byte_more() -> None:
    for rows, width, supertile in calls(50, seed=1):
        call = shape(rows, width, supertile)
        need = call.nbytes()
        if not need:
            assert not within(call).slices
            continue
        exact, short = within(call, need), within(call, need - 1)
        assert exact.slices
        assert exact.total_slices == sum(count for count, _ in exact.slices)
        assert exact.budget_nbytes == exact.candidate_nbytes == need
        assert (short.slices, short.total_slices) == ((), 0)
        assert str(need) in short.reason
        assert str(need - 1) in short.reason


def test_why_a_call_carries() -> None:
    assert "physical" in within(shape(8), physical=True).reason
    assert "below two slices" in within(shape(8, 511)).reason
    assert within(shape(8, 512)).slices == ((2, 0),)
    assert "off" in within(shape(8), allowed=False).reason
    for fold in (within(shape(8), physical=True), within(shape(8), allowed=False), within(shape(8), 0)):
        assert (fold.slices, fold.total_slices) == ((), 0)


@pytest.mark.parametrize(
    ("mode", "decode", "physical", "spare", "reserved"),
    [
        ("auto", True, False, 0, True), ("auto", True, False, -1, False), ("auto", False, False, 0, False),
        ("on", True, False, -1, True), ("on", False, False, 0, True), ("on", False, False, -1, True),
        ("off", True, False, 0, False), ("off", False, False, 0, False),
        ("auto", True, True, 0, False), ("on", True, True, 0, False), ("on", False, True, 0, False),
    ],
)  # fmt: skip
def test_who_reserves(mode: str, decode: bool, physical: bool, spare: int, reserved: bool) -> None:
    sizes, call = module("fold_sizes"), shape(48)
    policy = sizes.FoldPolicy(mode, call.nbytes() + spare)
    wanted, why = sizes.reserved_for(call, policy, decode=decode, physical=physical)
    assert wanted == (call.nbytes() if reserved else 0)
    assert bool(why) == (not reserved)
    assert sizes.reserved_for(shape(48, 511), policy, decode=decode, physical=physical)[0] == 0


@pytest.mark.parametrize(
    "switch", [None, "auto", " AUTO ", "0", "false", "Off", "no", "1", "TRUE", "on", "yes", "", "2", "maybe", "o n"]
)
@pytest.mark.parametrize("budget", [None, "0", "256", " 7 ", "+3", "1_0", "-1", "", "1.5", "x"])
def test_policy_is_upstream_s(monkeypatch: pytest.MonkeyPatch, switch: str | None, budget: str | None) -> None:
    """The same values, and a refusal where upstream refuses; from the environment or from a mapping."""
    sizes = module("fold_sizes")
    given = {name: value for name, value in ((SWITCH, switch), (BUDGET, budget)) if value is not None}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    try:
        wanted = module("paged")._read_two_level_fold_policy()
    except ValueError:
        with pytest.raises(ValueError, match=SWITCH):
            sizes.fold_policy()
        with pytest.raises(ValueError, match=SWITCH):
            sizes.fold_policy(given)
        with pytest.raises(ValueError, match=SWITCH):
            plan(48)
        return
    assert sizes.fold_policy() == sizes.fold_policy(given) == sizes.FoldPolicy(*wanted)


def random_plans(count: int) -> Any:
    """Policy, the caps' own words, and the plan's memory."""
    draw = Random(2)
    for index in range(count):
        mode = draw.choice(("decode", "decode", "prefill"))
        rows = draw.choice((draw.randint(1, 96), draw.randint(1, 4096)))
        width = draw.choice((draw.choice(WIDTHS), draw.randint(1, 65_536)))
        policy = draw.choice(("auto", "auto", "on", "off"))
        more = {"route": "paged_tiled"} if mode == "decode" and index % 2 else {}
        supertile = draw.choice((0, *SUPERTILES))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(SWITCH, policy)
            patch.setenv(BUDGET, str(draw.choice((0, 16, 256, 4096))))
            planned = plan(rows, width, mode, supertile_k=supertile * PAGE, **more)
        yield policy, rows, width, planned, draw


def test_no_call_folds_beyond_what_its_plan_reserved() -> None:
    folded = carried = 0
    for policy, rows, width, planned, draw in random_plans(250):
        memory = planned.layout.memory
        scratch, own = SimpleNamespace(memory=memory), planned.layout.supertile_tokens // PAGE
        assert 0 <= memory.fold_offset <= memory.fold_offset + memory.fold_bytes <= planned.layout.nbytes
        for index in range(12):
            few, narrow = (rows, width) if not index else (draw.randint(1, rows), draw.randint(1, width))
            supertile, physical = draw.choice((own, own, *SUPERTILES)), index > 9
            fold = fold_of(scratch, few, narrow, supertile, physical)
            need = upstream_fold(few, narrow, supertile).candidate_nbytes
            assert memory.fold_limit <= memory.fold_bytes
            fits = 0 < need <= memory.fold_limit and policy != "off" and not physical
            assert bool(fold.slices) == fits, (policy, rows, width, few, narrow, supertile, fold)
            folded, carried = folded + fits, carried + (not fits)
    assert folded > 300
    assert carried > 300


def test_what_is_reserved_holds_the_planned_call() -> None:
    for policy, rows, width, planned, _ in random_plans(150):
        layout = planned.layout
        supertile = layout.supertile_tokens // PAGE
        wanted = next(item.region.nbytes for item in layout.memory.placed if item.region.name == "fold")
        if layout.route == "paged_fused":
            assert layout.memory.fold_bytes == 0
        elif policy == "on":
            assert wanted == shape(rows, width, supertile).nbytes()
        if wanted:
            assert policy != "off"
            assert fold_of(SimpleNamespace(memory=layout.memory), rows, width, supertile).slices


def test_a_prefill_folds_in_the_bytes_of_its_carry() -> None:
    """100,663,296 bytes of carry hold the candidates of 191 rows over 524,288 tokens."""
    scratch = SimpleNamespace(memory=plan(3072, mode="prefill").layout.memory)
    assert scratch.memory.fold_bytes == 100_663_296
    assert fold_of(scratch, 191).slices
    assert not fold_of(scratch, 192).slices


def test_no_fold_takes_more_than_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even of bytes that the carry has anyway: a budget of nothing is no fold, as upstream has it."""
    monkeypatch.setenv(BUDGET, "0")
    assert not fold_of(SimpleNamespace(memory=plan(3072, mode="prefill").layout.memory), 8).slices
    monkeypatch.setenv(BUDGET, "16")
    memory = plan(3072, mode="prefill").layout.memory
    assert (memory.fold_limit, memory.fold_bytes) == (16 << 20, 100_663_296)
    assert fold_of(SimpleNamespace(memory=memory), 31).slices
    assert not fold_of(SimpleNamespace(memory=memory), 32).slices


@pytest.mark.parametrize(("before", "after"), [("on", "off"), ("off", "on"), ("auto", "off"), ("off", "what")])
def test_the_policy_is_that_of_the_plan(monkeypatch: pytest.MonkeyPatch, before: str, after: str) -> None:
    monkeypatch.setenv(SWITCH, before)
    scratch = bound(plan(48))
    asked = [(48, WIDTH), (7, 4000), (48, 511), (1, 513)]
    first = [fold_of(scratch, *call) for call in asked]
    assert any(fold.slices for fold in first) == (before != "off")
    monkeypatch.setenv(SWITCH, after)
    monkeypatch.setenv(BUDGET, "0" if after != "what" else "-3")
    assert [fold_of(scratch, *call) for call in asked] == first


def test_the_budget_is_that_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BUDGET, "24")
    assert not fold_of(bound(plan(48)), 48).slices, "it needs 25,166,016 bytes"
    monkeypatch.setenv(BUDGET, "25")
    assert fold_of(bound(plan(48)), 48).slices


def test_a_plan_reads_nothing_when_it_binds_or_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = plan(48)
    monkeypatch.setenv(SWITCH, "what")
    scratch = bound(planned)
    assert fold_of(scratch, 48).slices
    assert os.environ[SWITCH] == "what"


@pytest.mark.parametrize("rows", [1, 48, 4096])
def test_a_scratch_without_memory_never_folds(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setenv(SWITCH, "on")
    upstream = bound(upstream_plan(48))
    for scratch in (upstream, SimpleNamespace(), SimpleNamespace(memory=None)):
        fold = fold_of(scratch, rows)
        assert (fold.slices, fold.total_slices, fold.budget_nbytes) == ((), 0, 0)
        assert module("paged_views").fold_buffers(scratch, fold, rows=rows, topk=TOPK) == (None, None, None)


def test_physical_output_reaches_the_plan_and_reserves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "on")
    logical, physical = plan(48), plan(48, output_physical_slots=True)
    monkeypatch.setenv(SWITCH, "off")
    assert physical.layout.nbytes == plan(48).layout.nbytes < logical.layout.nbytes
    assert not fold_of(bound(physical), 48, physical=True).slices
    assert not fold_of(bound(logical), 48, physical=True).slices


@pytest.mark.parametrize(("rows", "width"), [(3, WIDTH), (2, WIDTH), (1, 12_000), (3, 512), (3, 777)])
def test_candidates_lie_in_the_slab(rows: int, width: int) -> None:
    """They are written to the last byte, and nothing beside the slab changes."""
    views, planned = module("paged_views"), inner_plan(3, 12_000, route="paged_tiled")
    storage = torch.full((planned.layout.nbytes,), 0xA5, dtype=torch.uint8)
    scratch, memory = bound(planned, storage), planned.layout.memory
    before, fold = storage.clone(), fold_of(bound(planned, storage), rows, width)
    values, indices, lengths = views.fold_buffers(scratch, fold, rows=rows, topk=TOPK)
    count = rows * fold.total_slices
    assert count == rows * sum(module("fold_sizes").FoldShape(rows, TOPK, width, PAGE, 512).slice_counts())
    for tensor, dims, dtype in (
        (values, (count, TOPK), torch.float32), (indices, (count, TOPK), torch.int32), (lengths, (rows,), torch.int32)
    ):  # fmt: skip
        assert (tuple(tensor.shape), tensor.dtype, tensor.is_contiguous()) == (dims, dtype, True)
    assert lengths.tolist() == [fold.total_slices * TOPK] * rows
    spans = sorted((tensor.data_ptr() - storage.data_ptr(), tensor.nbytes) for tensor in (values, indices, lengths))
    ends = [start + nbytes for start, nbytes in spans]
    assert spans[0][0] >= memory.fold_offset
    assert ends[-1] <= memory.fold_offset + memory.fold_bytes
    assert all(end <= start for end, (start, _) in zip(ends[:-1], spans[1:], strict=True)), "disjoint"
    assert sum(nbytes for _, nbytes in spans) == fold.candidate_nbytes
    values.fill_(float("nan")), indices.fill_(-1)
    assert lengths.tolist() == [fold.total_slices * TOPK] * rows
    assert bool((indices == -1).all())
    outside = torch.ones(len(storage), dtype=torch.bool)
    outside[memory.fold_offset : memory.fold_offset + memory.fold_bytes] = False
    assert torch.equal(storage[outside], before[outside])


def test_no_candidates_without_a_fold() -> None:
    planned = inner_plan(3, route="paged_tiled")
    storage = torch.full((planned.layout.nbytes,), 0xA5, dtype=torch.uint8)
    scratch = bound(planned, storage)
    before, fold = storage.clone(), fold_of(scratch, 3, 511)
    assert module("paged_views").fold_buffers(scratch, fold, rows=3, topk=TOPK) == (None, None, None)
    assert torch.equal(storage, before)
