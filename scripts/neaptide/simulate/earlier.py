"""What was reserved and in use before a recorded history, found by undoing it from its end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from neaptide.simulate.initial import HeldBlock, HeldSegment
from neaptide.simulate.settings import MIB, SMALL_SEGMENT_BYTES, Settings, parse_settings

PAGE_BYTES = MIB
Home = tuple[int, int, bool]


@dataclass
class Range:
    """Where a virtual range begins, and whether it is of a small pool."""

    base: int
    small: bool = False


class Number(Protocol):
    def __call__(self, value: Any) -> int: ...


@dataclass
class Past:
    """The state at a point of the history, going backwards.

    Attributes:
        used: size (0 if unknown) and requested bytes of each block in use, by address.
        segments: size and home (stream, pool, small) of each segment of cudaMalloc, by address.
        pages: home of each mapped MiB of expandable segments.
        ranges: virtual ranges of expandable segments.
    """

    settings: Settings
    streams: Number
    pools: Number
    used: dict[int, tuple[int, int]] = field(default_factory=dict)
    segments: dict[int, tuple[int, Home]] = field(default_factory=dict)
    pages: dict[int, Home] = field(default_factory=dict)
    ranges: dict[tuple[int, int], list[Range]] = field(default_factory=dict)

    def hold(self, segment: Mapping[str, Any]) -> None:
        """A segment of the snapshot, with its blocks."""
        pool = self.pools(segment.get("segment_pool_id", (0, 0)))
        home = (self.streams(segment["stream"]), pool, segment.get("segment_type", "large") == "small")
        begin, size, at = segment["address"], segment["total_size"], segment["address"]
        if segment.get("is_expandable"):
            self.pages.update((page, home) for page in range(begin // PAGE_BYTES, (begin + size) // PAGE_BYTES))
        else:
            self.segments[begin] = (size, home)
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                self.used[at] = (block["size"], block.get("requested_size", block["size"]))
            at += block["size"]

    def undo(self, event: Mapping[str, Any]) -> None:
        action, at, size = event["action"], event.get("addr", 0), event["size"]
        if action == "alloc":
            self.used.pop(at, None)
        elif action == "free_completed":
            self.used[at] = (0, size)
        elif action == "segment_alloc":
            self.segments.pop(at, None)
        elif action == "segment_free":
            self.segments[at] = (size, self._home(event, size == SMALL_SEGMENT_BYTES))
        elif action in ("segment_map", "segment_unmap"):
            stream, pool, _ = self._home(event, False)
            home = (stream, pool, self._range(at, stream, pool).small)
            for page in range(at // PAGE_BYTES, (at + size) // PAGE_BYTES):
                if action == "segment_map":
                    self.pages.pop(page, None)
                else:
                    self.pages[page] = home

    def _home(self, event: Mapping[str, Any], small: bool) -> Home:
        return (self.streams(event["stream"]), self.pools(event.get("pool_id", (0, 0))), small)

    def held(self) -> Iterator[HeldSegment]:
        """Segments with their blocks; those in use have negative ids."""
        used = sorted(self.used)
        for begin, size, home, expandable in [
            *((at, size, home, False) for at, (size, home) in self.segments.items()),
            *((begin, size, home, True) for begin, size, home in runs(self.pages)),
        ]:
            inside = [at for at in used if begin <= at < begin + size]
            blocks = self._blocks(inside, begin + size, home[2])
            base = self._range(begin, *home[:2]).base if expandable else None
            yield HeldSegment(begin, size, *home, base, blocks)

    def find_ranges(self, events: Iterable[Mapping[str, Any]], apart_bytes: int) -> None:
        """Finds virtual ranges: mappings of one stream and pool that lie ``apart_bytes`` apart are of two.

        Its granules tell the pool: one of large blocks maps multiples of ``large_segment_bytes`` only.
        """
        points: dict[tuple[int, int], list[tuple[int, bool]]] = {}
        for begin, _, (stream, pool, small) in runs(self.pages):
            points.setdefault((stream, pool), []).append((begin, small))
        for event in events:
            if event["action"] in ("segment_map", "segment_unmap"):
                stream, pool, small = self._home(event, event["size"] % self.settings.large_segment_bytes != 0)
                points.setdefault((stream, pool), []).append((event["addr"], small))
        for key, seen in points.items():
            found: list[Range] = []
            last = 0
            for at, small in sorted(seen):
                if not found or at - last > apart_bytes:
                    found.append(Range(at))
                found[-1].small |= small
                last = at
            self.ranges[key] = found

    def _range(self, at: int, stream: int, pool: int) -> Range:
        return next(found for found in reversed(self.ranges[stream, pool]) if found.base <= at)

    def _blocks(self, addresses: Sequence[int], end: int, small: bool) -> list[HeldBlock]:
        """Blocks of one segment. One that was freed since has what its request rounds to, or all up to the next one."""
        out = []
        for at, following in zip(addresses, [*addresses[1:], end], strict=False):
            size, requested = self.used[at]
            rounded = self.settings.rounded(requested)
            if size == 0:
                cut = self.settings.splits(following - at, rounded, small)
                size = rounded if cut else following - at
            out.append(HeldBlock(-1 - at, at, size, requested))
        return out


def runs(pages: Mapping[int, Home]) -> Iterator[tuple[int, int, Home]]:
    """Neighbouring pages of one home: address, bytes, home."""
    begin = last = None
    for page in sorted(pages):
        if begin is None or last is None or page != last + 1 or pages[page] != pages[begin]:
            if begin is not None and last is not None:
                yield begin * PAGE_BYTES, (last + 1 - begin) * PAGE_BYTES, pages[begin]
            begin = page
        last = page
    if begin is not None and last is not None:
        yield begin * PAGE_BYTES, (last + 1 - begin) * PAGE_BYTES, pages[begin]


def state_before(
    events: Sequence[Mapping[str, Any]], segments: Iterable[Mapping[str, Any]], streams: Number, pools: Number,
    settings: str, total_bytes: int,
) -> list[HeldSegment]:  # fmt: skip
    """Segments and blocks before the first of ``events``, given those after the last."""
    past = Past(parse_settings(settings), streams, pools)
    for segment in segments:
        past.hold(segment)
    past.find_ranges(events, total_bytes // 2)
    for event in reversed(events):
        past.undo(event)
    return list(past.held())
