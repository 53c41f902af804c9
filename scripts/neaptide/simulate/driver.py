"""What is taken from the driver: segments and mapped ranges, their addresses, and how often it was called."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from neaptide.simulate.settings import SEGMENT_STEP_BYTES, round_up

FIRST_ADDRESS = 0x7F00_0000_0000


@dataclass(frozen=True)
class SegmentEvent:
    """``segment_alloc``, ``segment_free``, ``segment_map`` or ``segment_unmap``, as PyTorch's history has them."""

    action: str
    address: int
    size_bytes: int
    stream: int


class Addresses(Protocol):
    """Where new memory lies. Best fit takes the lowest address among blocks of one size."""

    def segment(self, size_bytes: int, stream: int) -> int: ...
    def virtual_range(self, size_bytes: int, stream: int, taken: Sequence[range]) -> int: ...
    def mapped(self, address: int, size_bytes: int, stream: int) -> None: ...


class RisingAddresses:
    """Each segment above all earlier ones, as a driver that reuses nothing would place it."""

    def __init__(self) -> None:
        self.next = FIRST_ADDRESS

    def segment(self, size_bytes: int, stream: int) -> int:
        address = self.next
        self.next += round_up(size_bytes, SEGMENT_STEP_BYTES)
        return address

    def virtual_range(self, size_bytes: int, stream: int, taken: Sequence[range]) -> int:
        return self.segment(size_bytes, stream)

    def mapped(self, address: int, size_bytes: int, stream: int) -> None:
        """Nothing to follow."""


class RecordedAddresses:
    """The addresses of a recording, as long as it asked for the same; rising ones from then on.

    Attributes:
        left: whether the simulation has asked for something else than the recording has.
    """

    def __init__(self, events: Iterable[SegmentEvent]) -> None:
        taken = [event for event in events if event.action in ("segment_alloc", "segment_map")]
        self.events = deque(taken)
        self.left = False
        self.rising = RisingAddresses()
        self.rising.next = max([self.rising.next, *(round_up(e.address + e.size_bytes, 1 << 40) for e in taken)])

    def segment(self, size_bytes: int, stream: int) -> int:
        event = self._taken(SegmentEvent("segment_alloc", 0, size_bytes, stream))
        return self.rising.segment(size_bytes, stream) if event is None else event.address

    def virtual_range(self, size_bytes: int, stream: int, taken: Sequence[range]) -> int:
        """Where the recording maps next, which is the beginning of a new range."""
        following = self.events[0] if self.events and not self.left else None
        if following is not None and (following.action, following.stream) == ("segment_map", stream):
            if not any(following.address in addresses for addresses in taken):
                return following.address
        self.left = True
        return self.rising.virtual_range(size_bytes, stream, taken)

    def mapped(self, address: int, size_bytes: int, stream: int) -> None:
        self._taken(SegmentEvent("segment_map", address, size_bytes, stream))

    def _taken(self, asked: SegmentEvent) -> SegmentEvent | None:
        if self.left:
            return None
        event = self.events.popleft() if self.events else None
        same = event is not None and (event.action, event.size_bytes, event.stream) == (
            asked.action, asked.size_bytes, asked.stream
        )  # fmt: skip
        if event is not None and same and asked.address in (0, event.address):
            return event
        self.left = True
        return None


@dataclass(frozen=True)
class Entry:
    """One entry of the allocator's history; ``step`` is the operation it belongs to."""

    step: int
    action: str
    address: int
    size_bytes: int
    stream: int
    pool: int


class Driver:
    """Counts what is reserved.

    Attributes:
        segments: those of cudaMalloc; PyTorch counts no expandable ones.
        device_allocs: cudaMallocs and mappings so far.
        ranges: addresses that expandable segments reserve.
        history: every event; None unless one is wanted.
        step: the operation at hand.
    """

    def __init__(self, addresses: Addresses, total_bytes: int) -> None:
        self.addresses, self.total_bytes = addresses, total_bytes
        self.reserved_bytes = self.segments = self.device_allocs = self.step = 0
        self.ranges: list[range] = []
        self.history: list[Entry] | None = None

    def take_range(self, size_bytes: int, stream: int) -> int:
        """The first of that many addresses for an expandable segment."""
        address = self.addresses.virtual_range(size_bytes, stream, self.ranges)
        self.ranges.append(range(address, address + size_bytes))
        return address

    def take_segment(self, size_bytes: int, stream: int, pool: int) -> int:
        """The address of a new segment."""
        address = self.addresses.segment(size_bytes, stream)
        self.segments += 1
        self._took("segment_alloc", address, size_bytes, stream, pool)
        return address

    def give_segment(self, address: int, size_bytes: int, stream: int, pool: int) -> None:
        self.segments -= 1
        self._gave("segment_free", address, size_bytes, stream, pool)

    def map(self, address: int, size_bytes: int, stream: int, pool: int) -> None:
        self.addresses.mapped(address, size_bytes, stream)
        self._took("segment_map", address, size_bytes, stream, pool)

    def unmap(self, address: int, size_bytes: int, stream: int, pool: int) -> None:
        self._gave("segment_unmap", address, size_bytes, stream, pool)

    def note(self, action: str, address: int, size_bytes: int, stream: int, pool: int) -> None:
        """Adds to the history, if one is kept."""
        if self.history is not None:
            self.history.append(Entry(self.step, action, address, size_bytes, stream, pool))

    def _took(self, action: str, address: int, size_bytes: int, stream: int, pool: int) -> None:
        self.reserved_bytes += size_bytes
        self.device_allocs += 1
        self.note(action, address, size_bytes, stream, pool)

    def _gave(self, action: str, address: int, size_bytes: int, stream: int, pool: int) -> None:
        self.reserved_bytes -= size_bytes
        self.note(action, address, size_bytes, stream, pool)
