"""Traces: operations for the simulator, and what a device said after each, where it was recorded.

A trace file is JSON, also compressed as ``.json.xz``: ``operations`` is a list of

- ``["alloc", id, bytes, stream, pool]`` (stream and pool may be left out: 0, the default ones),
- ``["free", id]``, or ``["free", id, step]`` if other streams use the block until operation ``step``,
- ``["empty_cache"]``, ``["limit", bytes]``,
- ``["graph_begin", graph, stream, pool]`` (pool left out: the graph's own number), ``["graph_end", graph]``,
  ``["graph_free", graph]``.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from neaptide.errors import NeaptideError
from neaptide.simulate.driver import SegmentEvent
from neaptide.simulate.initial import HeldSegment
from neaptide.simulate.settings import GIB

Operation = Sequence[Any]
TOTAL_BYTES = 80 * GIB
# Arguments after the name that an operation may have: least and most of them.
ARGUMENTS = {
    "alloc": (2, 4), "free": (1, 2), "empty_cache": (0, 0), "limit": (1, 1), "graph_begin": (1, 3),
    "graph_end": (1, 1), "graph_free": (1, 1),
}  # fmt: skip


@dataclass(frozen=True)
class Counters:
    """What the allocator says after an operation."""

    reserved_bytes: int
    allocated_bytes: int
    segments: int
    device_allocs: int


@dataclass(frozen=True)
class Recorded:
    """What a device said.

    Attributes:
        after: counters after an operation, by its index.
        addresses: of each allocation that succeeded, by the index of its operation; empty if not recorded.
        failed: operations that ran out of memory.
    """

    after: Mapping[int, Counters]
    addresses: Mapping[int, int]
    failed: frozenset[int]


@dataclass(frozen=True)
class Trace:
    """Operations, the settings they ran under, where their segments lay, and what was held before the first."""

    name: str
    operations: Sequence[Operation]
    settings: str = ""
    total_bytes: int = TOTAL_BYTES
    segment_events: Sequence[SegmentEvent] = ()
    recorded: Recorded | None = None
    initial: Sequence[HeldSegment] = ()


def checked(operations: Iterable[Any], where: str) -> list[Operation]:
    """The operations, if each is one.

    Raises:
        NeaptideError: one that is not; the message names it.
    """
    out: list[Operation] = []
    for step, operation in enumerate(operations):
        known = ARGUMENTS.get(operation[0]) if isinstance(operation, list) and operation else None
        if known is None or not known[0] < len(operation) <= known[1] + 1 or not _possible(operation):
            raise NeaptideError(
                f"operation {step} is {json.dumps(operation)[:80]}",
                wanted=f"one of {', '.join(ARGUMENTS)} with whole numbers from 0 to 2^63 - 1",
                todo="See docs/simulate.md for the form of a trace.", where=where,
            )  # fmt: skip
        out.append(operation)
    return out


def _possible(operation: Sequence[Any]) -> bool:
    """Whether all is whole numbers; ids are any, and sizes, streams, pools and steps what a 64-bit counter holds."""
    action, *values = operation
    if not all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        return False
    counts = values if action == "limit" else values[1:]
    return all(0 <= value < 1 << 63 for value in counts)


def read_trace(path: Path) -> Trace:
    """A trace from ``.json`` or ``.json.xz``."""
    raw = path.read_bytes()
    try:
        data = json.loads(lzma.decompress(raw) if path.suffix == ".xz" else raw)
        if not isinstance(data, dict):
            raise TypeError(f"a {type(data).__name__}")
        return _trace(data, path)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, lzma.LZMAError) as error:
        raise NeaptideError(
            f"not readable ({type(error).__name__}: {error})", wanted="a trace of operations",
            todo="See docs/simulate.md for the form of a trace.", where=str(path),
        ) from error  # fmt: skip


def _trace(data: Mapping[str, Any], path: Path) -> Trace:
    unit = int(data.get("unit_bytes", 1))
    operations = checked(data["operations"], str(path))
    return Trace(
        name=str(data.get("name", path.name)),
        operations=operations,
        settings=str(data.get("allocator_settings", "")),
        total_bytes=int(data.get("total_bytes", TOTAL_BYTES)),
        segment_events=[
            SegmentEvent(action, address * unit, size, stream)
            for _, action, address, size, stream in data.get("segment_events", ())
        ],
        recorded=_recorded(data, operations, unit) if "reserved_bytes" in data else None,
    )


def _recorded(data: Mapping[str, Any], operations: Sequence[Operation], unit: int) -> Recorded:
    """Counters are deltas over the operations that were asked for; ``unforeseen`` ones have none."""
    unforeseen, failed = set(data.get("unforeseen", ())), set(data.get("failed", ()))
    foreseen = [step for step in range(len(operations)) if step not in unforeseen]
    columns = [accumulate(data[name]) for name in ("reserved_bytes", "allocated_units", "segments", "device_allocs")]
    rows = zip(*columns, strict=True)
    after = {
        step: Counters(reserved, allocated * unit, segments, device_allocs)
        for step, (reserved, allocated, segments, device_allocs) in zip(foreseen, rows, strict=True)
    }
    allocs = [s for number, s in enumerate(foreseen) if operations[s][0] == "alloc" and number not in failed]
    addresses = (address * unit for address in accumulate(data.get("addresses", ())))
    return Recorded(after, dict(zip(allocs, addresses, strict=False)), frozenset(foreseen[number] for number in failed))
