"""The arithmetic of the estimate against a scripted device: estimate, real capture, and the sum of the plan."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest
from graph_machine import MIB, Machine
from vllm.v1.worker.graph_memory import GraphProfile, GraphSeries, Peaks, Reading, sampled, sampled_by_kind
from vllm.v1.worker.graph_meter import CaptureMeter, Stage

KV, BUILDERS = 24 * MIB, 94 * MIB


@dataclass(frozen=True)
class Engine:
    """Sizes in tokens, largest first; what one token of a graph and of its warm-up costs."""

    sizes: tuple[int, ...]
    pool_a_token: int = 96 * 1024
    transient_a_token: int = 512 * 1024
    first_transient: int = 0
    modules: int = 20 * MIB
    channels: int = 0

    def capture(self, machine: Machine, sizes: list[int], meter: CaptureMeter | None = None) -> None:
        machine.allocate("cublas", 32 * MIB)
        if self.channels:
            machine.allocate("channels", self.channels)
        for index, size in enumerate(sizes):
            transient = max(size * self.transient_a_token, self.first_transient * (index == 0))
            machine.warm_up(transient, self.modules * (index == 0 and meter is not None))
            if meter:
                meter.before_capture()
            machine.capture(size * self.pool_a_token)
            if meter:
                meter.after_capture()


def profile(engine: Engine, machine: Machine) -> GraphProfile:
    meter = CaptureMeter(machine, warm_up=lambda: machine.allocate("tuned", 16 * MIB))
    meter.mark(Stage.START)
    machine.allocate("kv", KV)
    machine.allocate("builders", BUILDERS)
    meter.cache_stands(KV)
    chosen = sampled_by_kind([None] * len(engine.sizes))
    meter.open_series([None] * len(engine.sizes), chosen)
    engine.capture(machine, [engine.sizes[index] for index in chosen], meter)
    meter.captures_done()
    machine.destroy_graphs()
    meter.mark(Stage.DESTROYED)
    machine.release("kv", "builders")
    meter.mark(Stage.TORN_DOWN)
    machine.release("channels")
    return meter.profile()


@pytest.mark.parametrize(
    "engine",
    [
        Engine(tuple(range(512, 0, -8))),
        Engine(tuple(range(64, 0, -1)), pool_a_token=1024, transient_a_token=1024),
        Engine((512, 256, 128, 64), pool_a_token=4 * MIB),
        Engine(tuple(range(512, 0, -8)), first_transient=1 << 30),
        Engine((256,), first_transient=3 << 30),
        Engine(tuple(range(128, 0, -8)), channels=9 * MIB),
    ],
    ids=["64-sizes", "64-tiny", "large-pool", "transient-first", "one-graph", "channels"],
)
def test_the_estimate_is_what_the_real_capture_takes_and_the_plan_adds_up(engine: Engine) -> None:
    machine = Machine()
    machine.allocate("weights", 1 << 30)
    start = machine.reading().free_bytes
    measured = profile(engine, machine)

    real_kv = 50 << 30
    machine.allocate("kv", real_kv)
    machine.allocate("builders", BUILDERS)
    before = machine.reading().free_bytes
    machine.reset_peaks()
    engine.capture(machine, list(engine.sizes))
    after = machine.reading().free_bytes

    actual = before - after
    # The driver's step is as much as a sample of small graphs can be off, for each graph that was not captured.
    samples = len(sampled(engine.sizes))
    slack = 2 * MIB + 2 * MIB * (len(engine.sizes) - samples) // max(1, samples - 1)
    assert slack <= 9 * MIB
    assert abs(measured.graph_bytes - actual) <= slack
    planned = measured.standing_bytes + measured.graph_bytes + real_kv
    assert abs(planned - (start - after)) <= slack
    # The captures fit: a transient is counted once, as headroom.
    assert start - planned - measured.transient_bytes <= machine.total - machine.peak_taken + slack
    assert measured.transient_bytes <= max(engine.first_transient, engine.sizes[0] * engine.transient_a_token)
    assert measured.builder_bytes == BUILDERS
    # The workspace of the capture stream, what warm-up tuned, modules, and the driver memory of the sampled graphs.
    assert measured.residue_bytes >= 48 * MIB + engine.modules


def test_upstream_samples_charge_residue_or_subtract_it() -> None:
    """What the meter leaves out: free memory before a capture still lacks what its warm-up cached."""
    machine = Machine()
    machine.warm_up(600 * MIB)
    before = machine.free
    machine.capture(64 * MIB)
    assert before - machine.free < 0
    machine.warm_up(600 * MIB)
    meter = CaptureMeter(machine)
    meter.mark(Stage.START)
    meter.open_series([None], [0])
    meter.before_capture()
    machine.capture(128 * MIB)
    meter.after_capture()
    assert 64 * MIB <= meter.profile().series[0].growths[0] <= 66 * MIB


@pytest.mark.parametrize("kinds", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("sizes", [3, 11, 19, 35, 51, 83])
def test_kinds_of_graphs_are_sampled_each_by_itself(sizes: int, kinds: int) -> None:
    """With and without LoRA, say, one beside the other at every size; the later kinds cost more."""
    of = [index % kinds for index in range(sizes * kinds)]
    chosen = sampled_by_kind(of)
    assert chosen == sorted(set(chosen))
    assert [[of[i] for i in chosen].count(kind) for kind in range(kinds)] == [len(sampled(range(sizes)))] * kinds
    machine = Machine()
    meter = CaptureMeter(machine)
    meter.mark(Stage.START)
    meter.open_series(of, chosen)
    for index in chosen:
        meter.before_capture()
        machine.allocate(f"graph {index}", (1 + 4 * of[index]) * MIB)
        meter.after_capture()
    missing = sum(1 + 4 * of[index] for index in range(len(of)) if index not in chosen)
    assert sum(series.missing_bytes for series in meter.profile().series) == missing * MIB


@pytest.mark.parametrize("total", [0, 1, 2, 7, 8, 9, 16, 31, 32, 33, 64, 200])
def test_samples_are_spread_from_the_largest_to_the_smallest(total: int) -> None:
    sizes = list(range(total, 0, -1))
    chosen = sampled(sizes)
    assert chosen == sorted(set(chosen), reverse=True)
    assert len(chosen) == min(total, max(8, (total + 3) // 4))
    if total:
        assert (chosen[0], chosen[-1]) == (sizes[0], sizes[-1])
    gaps = [a - b for a, b in itertools.pairwise(chosen)]
    assert not gaps or max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize(
    ("total", "growths", "missing"),
    [
        (64, (500, 3, 3, 3), 60 * 3),
        (10, (500, -40, -2), 0),
        (3, (9, 9, 9), 0),
        (1, (500,), 0),
        (0, (), 0),
        (5, (), 0),
        (6, (0, 1, 0, 0), 1),
    ],
)
def test_missing_graphs_cost_what_later_captures_did_and_never_less_than_nothing(
    total: int, growths: tuple[int, ...], missing: int
) -> None:
    assert GraphSeries(total, growths).missing_bytes == missing


def test_nothing_is_ever_negative_and_nothing_is_charged_twice() -> None:
    rng = random.Random(6)
    for _ in range(2000):
        readings = [Reading(*(rng.randrange(1 << 30) for _ in range(3))) for _ in range(7)]
        peaks = Peaks(rng.randrange(1 << 30), rng.randrange(1 << 30))
        growths = tuple(rng.randrange(-99, 99) for _ in range(rng.randrange(5)))
        measured = GraphProfile(*readings, peaks, rng.randrange(1 << 30), (GraphSeries(rng.randrange(9), growths),))
        parts = (
            measured.graph_bytes,
            measured.standing_bytes,
            measured.builder_bytes,
            measured.residue_bytes,
            measured.transient_bytes,
        )
        assert min(parts) >= 0
        assert measured.builder_bytes + measured.residue_bytes == measured.standing_bytes
        taken = measured.start.free_bytes - measured.after.free_bytes - measured.kv_cache_bytes
        missing = measured.series[0].missing_bytes
        assert measured.graph_bytes + measured.standing_bytes >= taken + missing


def test_without_a_capture_only_what_stands_is_charged() -> None:
    machine = Machine()
    meter = CaptureMeter(machine)
    meter.mark(Stage.START)
    machine.allocate("kv", KV)
    machine.allocate("builders", BUILDERS)
    meter.cache_stands(KV)
    machine.release("kv", "builders")
    meter.mark(Stage.TORN_DOWN)
    measured = meter.profile()
    assert (measured.graph_bytes, measured.standing_bytes, measured.transient_bytes) == (0, BUILDERS, 0)


def test_a_profile_that_ends_at_once_charges_nothing() -> None:
    machine = Machine()
    meter = CaptureMeter(machine)
    meter.mark(Stage.START)
    measured = meter.profile()
    assert (measured.graph_bytes, measured.standing_bytes, measured.transient_bytes) == (0, 0, 0)
