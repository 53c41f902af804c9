# SPDX-License-Identifier: Apache-2.0
"""Reads the device's memory at the steps of a throwaway graph capture.

A worker opens :func:`measuring` around ``profile_cudagraph_memory``; the runners call the functions below at
their steps. Without an open measurement these do nothing and hand back upstream's values, so a runner behaves
as upstream when it is profiled by anybody else or on a machine without CUDA.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any, Protocol, TypeVar

import torch
from vllm.utils.mem_utils import MemorySnapshot
from vllm.v1.worker.graph_memory import GraphProfile, GraphSeries, Peaks, Reading, sampled_by_kind

T = TypeVar("T")

# Of a graph's descriptor, in either runner: what else than its size decides what it takes.
KIND = ("num_active_loras", "has_lora", "num_ubatches", "uniform", "uniform_token_count")


class MemoryReader(Protocol):
    """What a meter asks of a device."""

    def reading(self, *, collect: bool = True) -> Reading: ...

    def peaks(self) -> Peaks: ...

    def reset_peaks(self) -> None: ...


class AcceleratorMemory:
    """The current accelerator. A reading waits for it and empties the allocator's cache, so it is never taken
    in a capture. Free bytes are those of the memory profile, which knows integrated GPUs; other processes on the device
    are in them.
    """

    def reading(self, *, collect: bool = True) -> Reading:
        """The device now; ``collect`` frees tensors in reference cycles first."""
        empty_allocator_cache(collect=collect)
        now = MemorySnapshot()
        return Reading(now.free_memory, reserved_bytes=now.torch_memory, allocated_bytes=now.torch_allocated)

    def peaks(self) -> Peaks:
        """The allocator's peaks since :meth:`reset_peaks`."""
        return Peaks(
            reserved_bytes=torch.accelerator.max_memory_reserved(),
            allocated_bytes=torch.accelerator.max_memory_allocated(),
        )

    def reset_peaks(self) -> None:
        """Let the peaks start from what is reserved and allocated now."""
        torch.accelerator.reset_peak_memory_stats()


def empty_allocator_cache(*, collect: bool = True) -> None:
    """Give back what is only cached, the residue of warm-ups; nothing to do on a machine without an accelerator."""
    if not torch.accelerator.is_available():
        return
    torch.accelerator.synchronize()
    if collect:
        gc.collect()
    torch.accelerator.empty_cache()


class Stage(Enum):
    """The steps of a profile, in order."""

    START = auto()
    CACHE_STANDS = auto()
    BEFORE = auto()
    AFTER = auto()
    DESTROYED = auto()
    TORN_DOWN = auto()
    END = auto()


class CaptureMeter:
    """The readings of one profile.

    Args:
        memory: the device to read.
        warm_up: what to run once while the minimal KV cache stands, before anything is captured; None for nothing.
    """

    def __init__(self, memory: MemoryReader, warm_up: Callable[[], None] | None = None) -> None:
        self._memory = memory
        self._warm_up = warm_up
        self._readings: dict[Stage, Reading] = {}
        self._peaks = Peaks(0, 0)
        self._kv_cache_bytes = 0
        self._totals: list[int] = []
        self._growths: list[list[int]] = []
        self._to_come: list[int] = []
        self._free_before = 0

    def mark(self, stage: Stage) -> None:
        """Read the device at a step."""
        self._readings[stage] = self._memory.reading()

    def reached(self, stage: Stage) -> bool:
        """Whether the device was read at a step."""
        return stage in self._readings

    def cache_stands(self, kv_cache_bytes: int) -> None:
        """The minimal KV cache stands: read, warm up, read again, and watch for peaks from here on."""
        self._kv_cache_bytes = kv_cache_bytes
        self.mark(Stage.CACHE_STANDS)
        if self._warm_up is not None:
            self._warm_up()
        self.mark(Stage.BEFORE)
        self._memory.reset_peaks()

    def open_series(self, kinds: Sequence[Hashable], chosen: Sequence[int]) -> None:
        """Graphs of one mode follow: the ``chosen`` ones, by index, of all that will be captured in the end."""
        numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds), len(self._totals))}
        self._totals.extend(list(kinds).count(kind) for kind in numbers)
        self._growths.extend([] for _ in numbers)
        self._to_come = [numbers[kinds[index]] for index in chosen]

    def before_capture(self) -> None:
        """The warm-up of a graph is over and its capture comes next."""
        self._free_before = self._memory.reading(collect=False).free_bytes

    def after_capture(self) -> None:
        """A graph was captured."""
        growth = self._free_before - self._memory.reading(collect=False).free_bytes
        self._growths[self._to_come.pop(0)].append(growth)

    def captures_done(self) -> None:
        """Every graph of the profile is captured."""
        self._peaks = self._memory.peaks()
        self.mark(Stage.AFTER)

    def profile(self) -> GraphProfile:
        """What was read, at the end. A step that did not come reads as the one before: nothing was captured."""
        self.mark(Stage.END)
        readings: dict[Stage, Reading] = {}
        last = self._readings[Stage.START]
        for stage in Stage:
            last = readings[stage] = self._readings.get(stage, last)
        torn_down = self._readings.get(Stage.TORN_DOWN, readings[Stage.END])
        return GraphProfile(
            start=readings[Stage.START],
            cache_stands=readings[Stage.CACHE_STANDS],
            before=readings[Stage.BEFORE],
            after=readings[Stage.AFTER],
            destroyed=readings[Stage.DESTROYED],
            torn_down=torn_down,
            end=readings[Stage.END],
            peaks=self._peaks,
            kv_cache_bytes=self._kv_cache_bytes,
            series=tuple(
                GraphSeries(total, tuple(growths)) for total, growths in zip(self._totals, self._growths, strict=True)
            ),
        )


_open: CaptureMeter | None = None


@contextmanager
def measuring(meter: CaptureMeter) -> Iterator[CaptureMeter]:
    """Let ``meter`` read at the steps of the profile within; it has read the start."""
    global _open
    meter.mark(Stage.START)
    _open, outer = meter, _open
    try:
        yield meter
    finally:
        _open = outer


def kv_cache_stands(runner: Any) -> None:
    """The runner has its minimal KV cache, and is not yet capturing."""
    if _open is not None:
        _open.cache_stands(storage_bytes(runner.kv_caches))


def graphs_to_profile(graphs: Sequence[T], upstream_count: int) -> Sequence[T]:
    """Which graphs of one mode to capture, largest first: :func:`sampled_by_kind`, or as many as upstream takes."""
    if _open is None:
        return graphs[:upstream_count]
    kinds = [tuple(getattr(graph, name, None) for name in KIND) for graph in graphs]
    chosen = sampled_by_kind(kinds)
    _open.open_series(kinds, chosen)
    return [graphs[index] for index in chosen]


def before_capture(*, profiled: bool = True) -> None:
    """Outside stream capture, between the warm-up of a graph and its capture."""
    if _open is not None and profiled:
        _open.before_capture()


def after_capture(*, profiled: bool = True) -> None:
    """Outside stream capture, when a graph was captured."""
    if _open is not None and profiled:
        _open.after_capture()


def captures_done() -> None:
    """All captures of a runner are done. Empties the allocator's cache, in the real capture, too: upstream
    reads next."""
    if _open is not None:
        _open.captures_done()
    else:
        empty_allocator_cache()


def graphs_destroyed(runner: Any = None) -> None:
    """The throwaway graphs are gone and the KV cache still stands.

    Args:
        runner: of the V2 kind, which still has its managers; they go first.
    """
    if _open is None or not _open.reached(Stage.AFTER):
        return
    if runner is not None:
        if runner.cudagraph_manager is not None:
            runner.cudagraph_manager.graphs.clear()
        runner.cudagraph_manager = None
        if runner.model_state.supports_mm_inputs:
            runner.model_state.encoder_runner.clear()
    _open.mark(Stage.DESTROYED)


def profile_torn_down() -> None:
    """The minimal KV cache is gone; communicators are not yet rolled back."""
    if _open is not None:
        _open.mark(Stage.TORN_DOWN)


def estimated(upstream_bytes: int) -> int:
    """The estimate so far, for a runner that logs it: the meter's, or upstream's."""
    return upstream_bytes if _open is None else _open.profile().graph_bytes


def storage_bytes(caches: Iterable[Any]) -> int:
    """Bytes of the storages behind tensors, or lists of them; one that layers share counts once."""
    storages: dict[int, int] = {}
    pending = list(caches)
    while pending:
        cache = pending.pop()
        if isinstance(cache, torch.Tensor):
            storage = cache.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif cache is not None:
            pending.extend(cache)
    return sum(storages.values())
