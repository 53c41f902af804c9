"""A trace from a pickle of ``torch.cuda.memory._snapshot()``, without torch.

The history has no ``empty_cache``: one is put in wherever segments went back to the driver. What was in use before the
history began is taken from the segments at its end, undone event by event.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from neaptide.errors import NeaptideError
from neaptide.simulate.driver import SegmentEvent
from neaptide.simulate.earlier import state_before
from neaptide.simulate.traces import TOTAL_BYTES, Operation, Recorded, Trace

GIVEN_BACK = ("segment_free", "segment_unmap")
NEVER = 1 << 62
Event = Mapping[str, Any]


class _Plain(pickle.Unpickler):
    """Reads dictionaries, lists, numbers and strings; a snapshot has nothing else."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"{module}.{name} is in it")


def load_snapshot(path: Path) -> dict[str, Any]:
    """The dictionary of a snapshot.

    Raises:
        NeaptideError: no pickle of plain values, or no snapshot.
    """
    try:
        data = _Plain(io.BytesIO(path.read_bytes())).load()
        if not isinstance(data, dict) or not {"segments", "device_traces"} <= data.keys():
            raise pickle.UnpicklingError("it has no segments and device_traces")
        return data
    except (pickle.UnpicklingError, EOFError, ValueError, IndexError, KeyError, AttributeError) as error:
        raise NeaptideError(
            f"not readable ({type(error).__name__}: {error})", wanted="a pickle of torch.cuda.memory._snapshot()",
            todo="Write one with torch.cuda.memory._dump_snapshot().", where=str(path),
        ) from error  # fmt: skip


@dataclass
class Numbers:
    """Small numbers for streams and pools, in the order they are met; 0 for the default ones."""

    of: dict[Any, int] = field(default_factory=lambda: {0: 0, (0, 0): 0})

    def __call__(self, value: Any) -> int:
        key = tuple(value) if isinstance(value, list) else value
        return self.of.setdefault(key, max(self.of.values()) + 1)


@dataclass
class Reading:
    """Operations from the history of one device."""

    streams: Numbers
    pool_of: Mapping[int, int]
    live: dict[int, int]
    operations: list[Operation] = field(default_factory=list)
    segment_events: list[SegmentEvent] = field(default_factory=list)
    addresses: dict[int, int] = field(default_factory=dict)
    waiting: dict[int, int] = field(default_factory=dict)
    pools: dict[int, int] = field(default_factory=dict)
    releasing: bool = False
    next_key: int = 1

    def read(self, events: Sequence[Event]) -> None:
        for index, event in enumerate(events):
            action = event["action"]
            if action.startswith("segment_"):
                address, size, stream = event["addr"], event["size"], self.streams(event["stream"])
                self.segment_events.append(SegmentEvent(action, address, size, stream))
            if action in GIVEN_BACK:
                self._released(self.pool_of[index])
            elif action in ("alloc", "free_requested", "segment_alloc", "segment_map"):
                self.releasing = False
            if action == "alloc":
                self._alloc(event, self.pool_of[index])
            elif action == "free_requested" and event["addr"] in self.live:
                self.waiting[event["addr"]] = len(self.operations)
                self.operations.append(["free", self.live.pop(event["addr"]), NEVER])
            elif action == "free_completed" and event["addr"] in self.waiting:
                self._completed(self.waiting.pop(event["addr"]))

    def _alloc(self, event: Event, pool: int) -> None:
        if pool and pool not in self.pools:
            self.pools[pool] = 1
            self.operations += [["graph_begin", pool, 0, pool], ["graph_end", pool]]
        self.addresses[len(self.operations)] = event["addr"]
        self.live[event["addr"]] = self.next_key
        self.operations.append(["alloc", self.next_key, event["size"], self.streams(event["stream"]), pool])
        self.next_key += 1

    def _completed(self, step: int) -> None:
        """Frees at once if nothing came between, else before the next request."""
        free, now = self.operations[step], len(self.operations)
        self.operations[step] = [*free[:2], now] if now > step + 1 else list(free[:2])

    def _released(self, pool: int) -> None:
        """One release for segments that went back together; a private pool's go once its graphs are gone."""
        if pool and self.pools.get(pool):
            self.pools[pool] = 0
            where = len(self.operations) - self.releasing
            self.operations.insert(where, ["graph_free", pool])
        if not self.releasing:
            self.operations.append(["empty_cache"])
        self.releasing = True


def read_snapshot(path: Path, device: int | None = None, total_bytes: int = TOTAL_BYTES) -> Trace:
    """The history of one device, by default of the first that has one.

    Raises:
        NeaptideError: no history; the message says how to record one.
    """
    data = load_snapshot(path)
    traces = data["device_traces"]
    index = next((i for i, trace in enumerate(traces) if trace), 0) if device is None else device
    if index >= len(traces) or not traces[index]:
        raise NeaptideError(
            f"no history of device {index}", wanted="device_traces with entries",
            todo="Call torch.cuda.memory._record_memory_history(context=None) before the run.", where=str(path),
        )  # fmt: skip
    return _trace(path, data, index, total_bytes)


def _trace(path: Path, data: Mapping[str, Any], device: int, total_bytes: int) -> Trace:
    streams, pools = Numbers(), Numbers()
    events: list[Event] = data["device_traces"][device]
    segments = [s for s in data["segments"] if s.get("device", device) == device]
    owner = {s["address"]: s for s in segments}
    pool_of = {i: pools(_pool(event, owner)) for i, event in enumerate(events)}
    settings = data.get("allocator_settings", {})
    text = str(settings.get("PYTORCH_CUDA_ALLOC_CONF") or settings.get("PYTORCH_ALLOC_CONF") or "")
    held = state_before(events, segments, streams, pools, text, total_bytes)
    keys = {block.address: block.key for segment in held for block in segment.blocks}
    reading = Reading(streams, pool_of, keys, pools={segment.pool: 1 for segment in held})
    reading.read(events)
    return Trace(
        path.name, reading.operations, text, total_bytes, reading.segment_events,
        Recorded({}, reading.addresses, frozenset()), held,
    )  # fmt: skip


def _pool(event: Event, segments: Mapping[int, Mapping[str, Any]]) -> Any:
    """The pool that an entry names; before torch had that, the one of the segment that is still there."""
    if "pool_id" in event:
        return event["pool_id"]
    address = event.get("addr", 0)
    for begin, segment in segments.items():
        if begin <= address < begin + segment["total_size"]:
            return segment.get("segment_pool_id", (0, 0))
    return (0, 0)
