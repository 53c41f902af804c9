"""A device without a GPU under a workspace manager: a caching allocator that counts what it reserves.

Storage is anonymous memory that nobody touches, so that a GiB of it costs nothing. It is free when its last view has
died, as on a device.
"""

from __future__ import annotations

import importlib
import itertools
import mmap
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

MIB = 1 << 20
SEGMENT_BYTES = 2 * MIB
SPLIT_BYTES = MIB


class _Pages(mmap.mmap):
    """Memory that can be referred to weakly."""


@dataclass(eq=False)
class Block:
    """A part of a segment; ``owner`` is the address of the storage in it, None if it is cached."""

    size: int
    owner: int | None = None


class OutOfMemory(RuntimeError):
    """The device holds less than was asked for, with its cache given back."""


@dataclass(eq=False)
class FakeDevice:
    """``workspace_device.DeviceMemory``'s interface, over segments that are cached and split as torch does it.

    A segment is a multiple of 2 MiB. A cached block serves a request if it is large enough, the smallest first; the
    rest stays in its segment if it is larger than 1 MiB. Only a segment with no storage in it goes back to the device.

    Attributes:
        total_bytes: size of the device; None for a device that cannot be asked for its free memory.
        in_capture: whether the current stream is being captured; allocation and release are errors then.
        allocations: sizes asked for so far, in order, without transient ones.
        transients: sizes of the transient ones.
        peak_reserved_bytes: largest ``reserved_bytes`` so far.
    """

    total_bytes: int | None = None
    in_capture: bool = False
    allocations: list[int] = field(default_factory=list)
    transients: list[int] = field(default_factory=list)
    peak_reserved_bytes: int = 0
    _segments: list[list[Block]] = field(default_factory=list)
    _sizes: dict[int, int] = field(default_factory=dict)

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(block.size for segment in self._segments for block in segment)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of storage that a view holds."""
        return sum(self._sizes.values())

    def holds(self, address: int) -> bool:
        """Whether ``address`` lies in storage that is alive; a captured graph with another address dangles."""
        return any(start <= address < start + size for start, size in self._sizes.items())

    def allocate(self, size: int) -> torch.Tensor:
        self.allocations.append(size)
        return self._storage(size)

    def allocate_transient(self, size: int) -> torch.Tensor:
        self.transients.append(size)
        return self._storage(size)

    def capturing(self) -> bool:
        return self.in_capture

    def free_bytes(self) -> int | None:
        return None if self.total_bytes is None else self.total_bytes - self.reserved_bytes

    def release_cached(self) -> None:
        self._outside_capture()
        self._segments = [s for s in self._segments if any(block.owner is not None for block in s)]

    def _outside_capture(self) -> None:
        if self.in_capture:
            raise RuntimeError("The allocator was called inside a stream capture.")

    def _storage(self, size: int) -> torch.Tensor:
        self._outside_capture()
        if size == 0:
            return torch.empty(0, dtype=torch.uint8)
        block = self._cached_block(size) or self._new_block(size)
        pages = _Pages(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        storage = torch.frombuffer(pages, dtype=torch.uint8)
        block.owner = storage.data_ptr()
        self._sizes[block.owner] = size
        weakref.finalize(pages, self._free, block).atexit = False
        return storage

    def _cached_block(self, size: int) -> Block | None:
        cached = [(b.size, s, i) for s in self._segments for i, b in enumerate(s) if b.owner is None and b.size >= size]
        if not cached:
            return None
        _, segment, index = min(cached, key=lambda found: found[0])
        self._split(segment, index, size)
        return segment[index]

    def _new_block(self, size: int) -> Block:
        segment = [Block(-(-size // SEGMENT_BYTES) * SEGMENT_BYTES)]
        if self.total_bytes is not None and self.reserved_bytes + segment[0].size > self.total_bytes:
            self.release_cached()
            if self.reserved_bytes + segment[0].size > self.total_bytes:
                raise OutOfMemory(f"{size} bytes wanted, {self.free_bytes()} free.")
        self._segments.append(segment)
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        self._split(segment, 0, size)
        return segment[0]

    @staticmethod
    def _split(segment: list[Block], index: int, size: int) -> None:
        rest = segment[index].size - size
        if rest > SPLIT_BYTES:
            segment[index].size = size
            segment.insert(index + 1, Block(rest))

    def _free(self, block: Block) -> None:
        assert block.owner is not None
        del self._sizes[block.owner]
        block.owner = None
        segment = next(s for s in self._segments if block in s)
        for left, right in reversed(list(itertools.pairwise(segment))):
            if left.owner is None and right.owner is None:
                left.size += right.size
                segment.remove(right)


class Rig:
    """A manager on a fake device, and the captures that it sees."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, total_bytes: int | None = None, **options: Any) -> None:
        self.module = importlib.import_module("vllm.v1.worker.workspace")
        self.device = FakeDevice(total_bytes)
        self.manager = self.module.WorkspaceManager(torch.device("cpu"), **options)
        self.manager._memory = self.device
        self.ubatch = 0
        self._graph = self._disposable = False
        monkeypatch.setattr(self.module, "dbo_current_ubatch_id", lambda: self.ubatch)
        monkeypatch.setattr(self.module, "in_graph_capture", lambda: self._graph)
        monkeypatch.setattr(self.module, "in_disposable_capture", lambda: self._disposable)

    def get(self, size: int, lane: int = 0) -> torch.Tensor:
        """One tensor of ``size`` bytes."""
        with self.module.use_workspace_lane(lane):
            (view,) = self.manager.get_simultaneous(((size,), torch.uint8))
        return view

    def slot(self, lane: int = 0, ubatch: int = 0) -> Any:
        """The report of one slot."""
        found = [s for s in self.manager.report().slots if (s.ubatch, s.lane) == (ubatch, lane)]
        assert len(found) == 1, (ubatch, lane)
        return found[0]

    @contextmanager
    def graph_capture(self, *, disposable: bool = False) -> Iterator[None]:
        """Where graphs are warmed up and captured, eager until :meth:`stream_capture`."""
        before = self._graph, self._disposable
        self._graph, self._disposable = True, disposable
        try:
            yield
        finally:
            self._graph, self._disposable = before

    @contextmanager
    def stream_capture(self, *, disposable: bool = False) -> Iterator[None]:
        """The capture itself, of a graph that lasts unless it is ``disposable``."""
        with self.graph_capture(disposable=disposable):
            self.device.in_capture = True
            try:
                yield
            finally:
                self.device.in_capture = False
