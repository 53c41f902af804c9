"""A trace in the simulator, and how it compares with what a device recorded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from neaptide.errors import NeaptideError
from neaptide.simulate.allocator import Allocator, new_allocator
from neaptide.simulate.blocks import Block
from neaptide.simulate.driver import RecordedAddresses, RisingAddresses
from neaptide.simulate.initial import restore
from neaptide.simulate.settings import parse_settings
from neaptide.simulate.traces import Counters, Operation, Trace


@dataclass
class Run:
    """A trace that is run step by step.

    Attributes:
        settings: the value of ``PYTORCH_ALLOC_CONF`` it runs under.
        initial_bytes: reserved before the first operation.
        limited: whether the run has a limit of its own, which operations of the trace do not change.
        after: counters after each operation.
        failed: operations that found no memory under the limit.
        addresses: of each allocation, by the index of its operation.
        live: blocks that are held, by id.
        lost: ids that got no memory; to free one does nothing.
        graphs, capturing: the pool of each graph that lives, and of each capture that runs.
        undefined_from: the operation from which on PyTorch's own state is undefined (:class:`Allocator`); None so far.
    """

    trace: Trace
    allocator: Allocator
    settings: str = ""
    limited: bool = False
    initial_bytes: int = 0
    after: list[Counters] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    addresses: dict[int, int] = field(default_factory=dict)
    live: dict[int, Block] = field(default_factory=dict)
    undefined_from: int | None = None
    lost: set[int] = field(default_factory=set)
    graphs: dict[int, int] = field(default_factory=dict)
    capturing: dict[int, int] = field(default_factory=dict)

    def go(self) -> Run:
        """Runs all operations."""
        self.live.update(restore(self.allocator, self.trace.initial))
        self.initial_bytes = self.allocator.driver.reserved_bytes
        self.graphs.update({pool: pool for pool in self.allocator.private})
        for step, operation in enumerate(self.trace.operations):
            self.allocator.driver.step = step
            try:
                getattr(self, f"_{operation[0]}")(step, *operation[1:])
            except KeyError as error:
                raise self._unknown(step, operation) from error
            self.after.append(self._counters())
            if self.allocator.undefined and self.undefined_from is None:
                self.undefined_from = step
        return self

    def _unknown(self, step: int, operation: Operation) -> NeaptideError:
        return NeaptideError(
            f"operation {step} is {list(operation)}", wanted="an id that is live at that point, begun and ended once",
            todo="Correct the trace.", where=self.trace.name,
        )  # fmt: skip

    def _counters(self) -> Counters:
        driver = self.allocator.driver
        return Counters(driver.reserved_bytes, self.allocator.allocated_bytes, driver.segments, driver.device_allocs)

    def _alloc(self, step: int, key: int, size_bytes: int, stream: int = 0, pool: int = 0) -> None:
        if key in self.live:
            raise KeyError(key)
        self.allocator.settle(step)
        block = self.allocator.alloc(size_bytes, stream, pool)
        if block is None:
            self.failed.append(step)
            self.lost.add(key)
            return
        self.live[key] = block
        self.addresses[step] = block.address

    def _free(self, step: int, key: int, done_at: int | None = None) -> None:
        if key in self.lost:
            self.lost.remove(key)
            return
        self.allocator.free(self.live.pop(key), done_at)

    def _empty_cache(self, step: int) -> None:
        self.allocator.empty_cache()

    def _limit(self, step: int, limit_bytes: int) -> None:
        """A limit of the whole device is none; one that was given for the run stays."""
        if not self.limited:
            self.allocator.limit_bytes = limit_bytes if limit_bytes < self.trace.total_bytes else None

    def _graph_begin(self, step: int, graph: int, stream: int = 0, pool: int = 0) -> None:
        if graph in self.graphs or graph in self.capturing or not (pool or graph):
            raise KeyError(graph)
        self.capturing[graph] = pool or graph
        self.allocator.begin_capture(self.capturing[graph])

    def _graph_end(self, step: int, graph: int) -> None:
        self.graphs[graph] = self.capturing.pop(graph)
        self.allocator.end_capture(self.graphs[graph])

    def _graph_free(self, step: int, graph: int) -> None:
        self.allocator.release_pool(self.graphs.pop(graph))


@dataclass(frozen=True)
class Difference:
    """The first operation after which simulation and device disagree, and on what."""

    step: int
    what: str
    simulated: Any
    recorded: Any


def run_trace(
    trace: Trace, settings: str | None = None, limit_bytes: int | None = None, *, history: bool = False
) -> Run:
    """Runs a trace under its own settings, at the addresses it recorded, or under others, at rising addresses.

    Args:
        history: whether the driver keeps every event.
    """
    own = settings is None and limit_bytes is None and bool(trace.segment_events)
    addresses = RecordedAddresses(trace.segment_events) if own else RisingAddresses()
    text = trace.settings if settings is None else settings
    allocator = new_allocator(parse_settings(text), addresses, trace.total_bytes, limit_bytes)
    allocator.driver.history = [] if history else None
    return Run(trace, allocator, text, limited=limit_bytes is not None).go()


def first_difference(run: Run) -> Difference | None:
    """Where a run leaves its recording; None if it is equal at every step that has one, and is defined."""
    recorded = run.trace.recorded
    if recorded is None:
        return None
    failed = set(run.failed)
    for step, simulated in enumerate(run.after[: run.undefined_from]):
        said = recorded.after.get(step, simulated)
        if (step in failed) != (step in recorded.failed):
            return Difference(step, "out of memory", step in failed, step in recorded.failed)
        for what in ("reserved_bytes", "allocated_bytes", "segments", "device_allocs"):
            if getattr(simulated, what) != getattr(said, what):
                return Difference(step, what, getattr(simulated, what), getattr(said, what))
        at = run.addresses.get(step)
        if at is not None and recorded.addresses.get(step, at) != at:
            return Difference(step, "address", at, recorded.addresses[step])
    return None
