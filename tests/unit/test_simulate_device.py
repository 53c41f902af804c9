"""The simulator against recordings of a device (``tests/gpu/allocator_child``: H200, torch 2.11): every step equal.

Compared after each operation: reserved and allocated bytes, segments, driver allocations, the address of what was
allocated and whether memory ran out. Addresses of segments come from the recording, those inside them do not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from neaptide.simulate import allocator, blocks, expandable, release
from neaptide.simulate.replay import first_difference, run_trace
from neaptide.simulate.settings import MIB, Settings, round_up
from neaptide.simulate.traces import Trace, read_trace

DATA = Path(__file__).with_name("simulate_data")
NAMES = sorted(path.name.removesuffix(".json.xz") for path in DATA.glob("*.json.xz"))


@cache
def recorded(name: str) -> Trace:
    return read_trace(DATA / f"{name}.json.xz")


def test_there_is_a_recording_of_each_workload_and_setting() -> None:
    settings = ("default", "expandable")
    expected = {f"random-{name}" for name in (*settings, "max-split", "roundup")}
    assert set(NAMES) == expected | {f"{workload}-{name}" for workload in ("ladders", "graphs") for name in settings}
    assert sum(path.stat().st_size for path in DATA.iterdir()) < 1.5 * MIB


@pytest.mark.parametrize("name", NAMES)
def test_every_step_is_that_of_the_device(name: str) -> None:
    trace = recorded(name)
    run = run_trace(trace)
    assert first_difference(run) is None
    assert run.undefined_from is None
    assert trace.recorded is not None
    assert len(trace.recorded.after) >= len(trace.operations) - 3 >= 5000, "three requests precede the operations"
    assert len(trace.recorded.addresses) > 2500


def test_the_recordings_have_what_the_rules_are_about() -> None:
    kinds = {operation[0] for name in NAMES for operation in recorded(name).operations}
    assert kinds == {"alloc", "free", "empty_cache", "limit", "graph_begin", "graph_end", "graph_free"}
    failed = {name: len(said.failed) for name in NAMES if (said := recorded(name).recorded) and said.failed}
    assert failed.keys() == {name for name in NAMES if name.startswith("random-")}
    assert min(failed.values()) > 50


def everything(self: Settings, free_bytes: int, block_bytes: int, *_: Any) -> bool:
    return True


def best_fit(pool: blocks.BlockPool, size: int, stream: int) -> blocks.Block | None:
    entries, at = pool.at_least(size, stream)
    return entries[at][2] if at < len(entries) else None


def highest_first(self: blocks.BlockPool, size: int, stream: int) -> tuple[list[blocks.Entry], int]:
    """The highest address among blocks of the best size."""
    entries = self.free.get(stream, [])
    fits = [index for index, entry in enumerate(entries) if entry[0] >= size]
    return entries, max((i for i in fits if entries[i][0] == entries[fits[0]][0]), default=len(entries))


def only_unused(driver: Any, pool: blocks.BlockPool) -> int:
    """Releases segments only of the default pool."""
    return ALL_RELEASED(driver, pool) if pool.owner == 0 else 0


ALL_RELEASED = release.release_all
BROKEN: dict[str, tuple[str, Any, str, Callable[..., Any]]] = {
    "requests round to 1 KiB": ("random-default", Settings, "rounded", lambda self, size: round_up(max(size, 1), 1024)),
    "no divisions of powers of two": (
        "random-roundup", Settings, "rounded", lambda self, size: round_up(max(size, 1), 512)
    ),
    "no segment of 20 MiB": (
        "random-default", Settings, "segment_bytes",
        lambda self, size: 2 * MIB if size <= MIB else round_up(size, 2 * MIB),
    ),
    "large blocks are cut to 512 B": (
        "random-default", Settings, "splits", lambda self, free, size, small: free - size >= 512
    ),
    "oversize blocks are cut": (
        "random-max-split", Settings, "splits",
        lambda self, free, size, small: free - size >= 512 if small else free - size > MIB,
    ),
    "oversize blocks serve anything": ("random-max-split", Settings, "serves", everything),
    "no release of single oversize blocks": ("random-max-split", allocator, "release_enough", lambda *_: None),
    "neighbours stay apart": ("random-default", allocator, "merge", lambda *_: None),
    "the highest address of the best size": ("random-default", blocks.BlockPool, "at_least", highest_first),
    "best fit ignores what can be mapped": ("random-expandable", allocator, "best_reach", best_fit),
    "large pools map 2 MiB": ("random-expandable", Settings, "granule_bytes", lambda self, small: 2 * MIB),
    "unmapped gaps are not filled": ("random-expandable", expandable, "_room", lambda *_: None),
    "private pools are kept": ("graphs-default", allocator, "release_all", only_unused),
    "graphs keep their pool": ("graphs-default", allocator.Allocator, "release_pool", lambda self, pool: None),
}  # fmt: skip


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_is_seen(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, owner, attribute, wrong = BROKEN[rule]
    monkeypatch.setattr(owner, attribute, wrong)
    trace = recorded(name)
    if "oversize blocks" in rule and attribute != "release_enough":
        # Before the limit: parts of cut oversize blocks would be released there.
        trace = replace(trace, operations=trace.operations[:5000])
    assert first_difference(run_trace(trace)) is not None


def test_a_second_search_of_freed_blocks_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the limit the driver is asked again, but released and freed blocks are not searched again."""
    new = allocator.Allocator._new

    def searched_again(self: Any, pools: Any, size: int, stream: int) -> Any:
        return new(self, pools, size, stream) or self._cached(pools.of(size), size, stream)

    monkeypatch.setattr(allocator.Allocator, "_new", searched_again)
    run = run_trace(recorded("random-default"))
    assert first_difference(run) is None, "without waiting blocks a second search finds nothing that the first did not"
    run = run_trace(
        Trace("waiting", [["alloc", 1, 30 * MIB], ["free", 1, 9], ["limit", 40 * MIB], ["alloc", 2, 20 * MIB]])
    )
    assert run.failed == []
