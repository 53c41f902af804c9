"""How a decode step is cut into row tiles, and what a tile holds in memory."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from indexer_standins import overlay, run
from indexer_steps import Shape, make_step, row_bytes
from vllm_modules import load

TIERS = (4, 8, 32, 64)


def settings(count: int = 3000) -> list[tuple[int, int, int, int]]:
    """(units, most, step, unit_rows), at sizes around the tiers and far above them."""
    draw = random.Random(7)
    found = []
    for _ in range(count):
        step, units = draw.choice((1, 2)), draw.randint(1, draw.choice((12, 80, 1600)))
        found.append(
            (units, step * draw.randint(1, max(1, units)), step, 1 if step == 2 else draw.choice((1, 2, 4, 6)))
        )
    return found


def tier(rows: int) -> int:
    return sum(rows > bound for bound in TIERS)


def test_tiles_cover_all_units_in_order() -> None:
    """Only the last tile repeats units, all of them of the tile before it."""
    decode = overlay("decode")
    for case in settings():
        units, most, step, _ = case
        ranges = decode.tiles(*case)
        starts, stops = zip(*ranges, strict=True)
        assert starts[0] == 0, case
        assert stops[-1] == units, case
        assert all(start < stop <= start + most for start, stop in ranges), case
        assert all(start % step == 0 for start in starts), case
        assert starts[1:-1] == stops[:-2], case
        if len(ranges) > 1:
            assert starts[-2] < starts[-1] <= stops[-2], case


def test_tiles_are_as_few_as_the_limit_allows() -> None:
    for case in settings():
        assert len(overlay("decode").tiles(*case)) == -(-case[0] // case[1]), case


def test_a_tile_ranks_as_the_whole_step_where_the_limit_allows() -> None:
    """The persistent top-k takes another algorithm at each tier of its row count."""
    crossed = 0
    for case in settings():
        units, most, step, unit_rows = case
        wanted = tier(units * unit_rows)
        # An odd number of units has an odd last tile, one row shorter.
        possible = tier((most - (step - 1) * (units % step)) * unit_rows) >= wanted
        found = {tier((stop - start) * unit_rows) for start, stop in overlay("decode").tiles(*case)}
        assert not possible or found == {wanted}, case
        crossed += not possible
    assert 0 < crossed < 3000


def test_decode_tiles_fit_the_budget() -> None:
    decode, sizes, draw = overlay("decode"), overlay("logits"), random.Random(3)
    for _ in range(500):
        sm100, copy = draw.choice(((False, False), (True, False), (True, True)))
        units, columns, next_n = draw.randint(1, 300), draw.randint(1, 9000), 1 if sm100 else draw.choice((1, 2, 4))
        one = next_n * row_bytes(columns, sm100=sm100, copy=copy)
        budget = one * 2 * draw.randint(1, 200) + draw.randrange(one)
        layout = sizes.logits_layout(sm100=sm100, fp32_copy=copy)
        ranges = decode.decode_tiles("constant_bytes", budget, units, next_n, columns, sm100, layout)
        assert max(stop - start for start, stop in ranges) * one <= budget
        assert (len(ranges) == 1) == (units * one <= budget)
        assert all(start % 2 == 0 for start, _ in ranges) or not sm100


def test_an_odd_varlen_step_that_fits_is_one_tile() -> None:
    """Tiles of the varlen form are whole pairs of rows: 37 of 1,024 BF16 columns with their FP32 copy, and no 38th."""
    layout = overlay("logits").logits_layout(sm100=True, fp32_copy=True)
    decode_tiles, budget = overlay("decode").decode_tiles, 37 * 1024 * 6
    assert overlay("logits").decode_logits_bytes(37, 700, layout) == budget
    assert decode_tiles("constant_bytes", budget, 37, 1, 700, True, layout) == ((0, 37),)
    assert len(decode_tiles("constant_bytes", budget - 1, 37, 1, 700, True, layout)) == 2


@pytest.mark.parametrize("policy", ["fixed_width", "upstream"])
def test_other_policies_score_the_step_at_once(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where the budget does not hold one row."""
    _, device = run(make_step(Shape()), monkeypatch, budget=1, policy=policy)
    assert [call.units for call in device.calls] == [37]
    assert device.schedules == []


def test_other_platforms_score_the_step_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = overlay("decode")
    monkeypatch.setattr(decode, "current_platform", SimpleNamespace(is_cuda=lambda: False))
    assert decode.step_tiles(torch.empty(9, 4, 2, 8), 1 << 40, varlen=False, fp32=True) == ((0, 9),)


@pytest.mark.parametrize("which", ["shared", "kpool"])
@pytest.mark.parametrize("sm100", [False, True])
def test_a_step_of_one_tile_is_left_to_the_op(which: str, sm100: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its one call takes the builder's schedule, and none is made."""
    step = make_step(Shape(units=37, varlen=sm100))
    found, device = run(step, monkeypatch, budget=37 * row_bytes(700, sm100=sm100), which=which, sm100=sm100)
    whole, _ = run(step, monkeypatch, budget=1, policy="upstream", which=which, sm100=sm100)
    assert [call.schedule for call in device.calls] == [step.decode.schedule_metadata]
    assert device.schedules == []
    assert torch.equal(found, whole)


@pytest.mark.parametrize("which", ["shared", "kpool"])
@pytest.mark.parametrize("shape", [Shape(), Shape(units=21, next_n=2), Shape(varlen=True)])
def test_each_tile_has_its_own_schedule(which: str, shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    step = make_step(shape)
    _, device = run(step, monkeypatch, budget=6 * shape.next_n * row_bytes(700), which=which)
    assert len(device.calls) == len(device.schedules) > 1
    for call, (lens, page, compute_units, _, made) in zip(device.calls, device.schedules, strict=True):
        assert call.schedule is made
        assert torch.equal(lens, step.decode.seq_lens[call.start : call.start + call.units])
        assert (page, compute_units) == (step.kv_cache.shape[1], 132)


@pytest.mark.parametrize("which", ["shared", "kpool"])
@pytest.mark.parametrize("sm100", [False, True])
@pytest.mark.parametrize("units", [2, 6, 10])
def test_a_tile_is_all_that_is_alive(which: str, sm100: bool, units: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits of a tile, and their FP32 copy, are dead when the next tile is scored."""
    budget = units * row_bytes(700, sm100=sm100)
    _, device = run(make_step(Shape(varlen=sm100)), monkeypatch, budget=budget, which=which, sm100=sm100)
    assert len(device.calls) > 1
    assert not any(call.earlier_alive for call in device.calls)
    assert all(0 < call.bytes <= budget for call in device.calls)


def test_a_tile_dies_before_the_next_where_ranks_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    step = make_step(Shape())
    step.decode.global_seq_lens = step.decode.seq_lens * 2
    _, device = run(step, monkeypatch, budget=6 * row_bytes(700), dcp_world_size=2)
    assert len(device.calls) > 1
    assert not any(call.earlier_alive for call in device.calls)


@pytest.mark.parametrize(
    ("rows", "backend", "resolved"),
    [
        (129, "auto", "persistent"),
        (65, "auto", "persistent"),
        (64, "auto", "cooperative"),
        (64, "cooperative", "cooperative"),
        (64, "persistent", "persistent"),
    ],
)
def test_the_backend_is_that_of_the_whole_step(
    rows: int, backend: str, resolved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tile of at most 64 rows of a longer step would be cooperative by itself."""
    step = make_step(Shape(units=rows))
    budget = 30 * row_bytes(700)
    _, device = run(step, monkeypatch, budget=budget, backend=backend, k=512)
    _, whole = run(step, monkeypatch, budget=budget, policy="upstream", backend=backend, k=512)
    assert len(device.ranked) > 1
    assert {ranked[0] for ranked in device.ranked} == {whole.ranked[0][0]} == {resolved}
    assert {ranked[3] for ranked in device.ranked} == {whole.ranked[0][3]}


def test_129_rows_in_tiles_of_65(monkeypatch: pytest.MonkeyPatch) -> None:
    step = make_step(Shape(units=129))
    _, device = run(step, monkeypatch, budget=65 * row_bytes(700), backend="auto", k=512)
    assert [(call.start, call.units) for call in device.calls] == [(0, 65), (64, 65)]
    assert [ranked[0] for ranked in device.ranked] == ["persistent"] * 2


def test_a_backend_that_refuses_the_step_refuses_its_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for policy in ("constant_bytes", "upstream"):
        with pytest.raises(RuntimeError, match="num_rows must be <= 64, got 129"):
            run(
                make_step(Shape(units=129)), monkeypatch, budget=30 * row_bytes(700), policy=policy,
                backend="cooperative", k=512,
            )  # fmt: skip


@pytest.mark.parametrize(("shape", "rows"), [(Shape(next_n=4, units=5), 4), (Shape(varlen=True), 2)])
def test_a_budget_below_the_smallest_tile_is_refused(shape: Shape, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    step, needed = make_step(shape), rows * row_bytes(700)
    with pytest.raises(ValueError, match=f"{needed - 1} bytes, but {rows} decode rows of 700 columns take {needed}"):
        run(step, monkeypatch, budget=needed - 1)
    run(step, monkeypatch, budget=needed)


def test_the_switches_are_read_from_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of 100,000 columns take 800,768 bytes of the budget's MiB, three do not fit."""
    decode, envs = overlay("decode"), load("vllm.envs")
    monkeypatch.setattr(decode, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    monkeypatch.setattr(decode, "mqa_logits_use_mx_scales", lambda: False)
    monkeypatch.setitem(vars(envs), "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB", 1)
    q = torch.empty(5, 1, 2, 8)
    for policy, count in (("constant_bytes", 3), ("fixed_width", 1), ("upstream", 1)):
        monkeypatch.setitem(vars(envs), "VLLM_NEAPTIDE_INDEXER_LOGITS_POLICY", policy)
        assert len(decode.step_tiles(q, 100_000, varlen=False, fp32=True)) == count
