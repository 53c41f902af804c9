"""The allocator's own history beside the operations, and what is written of both."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from recorder import UNIT, Device, Operation

SEGMENT_EVENTS = ("segment_alloc", "segment_free", "segment_map", "segment_unmap")


@dataclass
class Merged:
    """Operations with what the allocator was asked for beside them, and its segment events.

    Attributes:
        pointers: number of each stream, by its pointer.
        unforeseen: indices of the requests that were no operation; their ids are negative, they have no counters.
        segment_events: each with the number of allocations, frees and failures before it.
    """

    pointers: dict[int, int]
    operations: list[Operation] = field(default_factory=list)
    unforeseen: list[int] = field(default_factory=list)
    segment_events: list[list[Any]] = field(default_factory=list)
    requests: int = 0
    extra: dict[int, int] = field(default_factory=dict)

    def note(self, event: dict[str, Any]) -> bool:
        """Keeps a segment event; True for an event that answers a request."""
        if event["action"] in SEGMENT_EVENTS:
            address, stream = event["addr"] // UNIT, self.pointers[event["stream"]]
            self.segment_events.append([self.requests, event["action"], address, event["size"], stream])
        answers = event["action"] in ("alloc", "free_requested", "oom")
        self.requests += answers
        return answers

    def add_unforeseen(self, event: dict[str, Any]) -> None:
        self.unforeseen.append(len(self.operations))
        if event["action"] == "alloc":
            self.extra[event["addr"]] = key = -len(self.extra) - 1
            self.operations.append(["alloc", key, event["size"], self.pointers[event["stream"]], 0])
        else:
            self.operations.append(["free", self.extra.pop(event["addr"])])


def merged(device: Device) -> Merged:
    """The history beside the operations; what was asked for before the first of them comes first."""
    out = Merged({stream.cuda_stream: index for index, stream in enumerate(device.streams)})
    events, addresses, where = iter(device.history()), iter(device.addresses), {}
    for event in islice(events, device.setup_events):
        if out.note(event):
            out.add_unforeseen(event)
    for step, operation in enumerate(device.operations):
        awaited = {"alloc": "alloc", "free": "free_requested"}.get(operation[0], "")
        if operation[0] == "alloc" and step in device.failed:
            awaited = "oom"
        elif operation[0] == "alloc":
            where[operation[1]] = next(addresses) * UNIT
        for event in events if awaited else ():
            if not out.note(event):
                continue
            if event["action"] == awaited and event.get("addr") == where.get(operation[1]):
                break
            out.add_unforeseen(event)
        out.operations.append(operation)
    for event in events:
        if out.note(event):
            out.add_unforeseen(event)
    return out


def deltas(values: list[int]) -> list[int]:
    return [value - before for before, value in zip([0, *values], values, strict=False)]


def report(device: Device, name: str, settings: str) -> dict[str, Any]:
    """What is written for a configuration; bytes of ``allocated`` and addresses count units of 512."""
    reserved, allocated, segments, mallocs = (list(column) for column in zip(*device.counters, strict=True))
    torch, both = device.torch, merged(device)
    return {
        "schema_version": 1, "name": name, "allocator_settings": settings, "torch": torch.__version__,
        "device": torch.cuda.get_device_name(), "total_bytes": device.total_bytes, "unit_bytes": UNIT,
        "operations": both.operations, "unforeseen": both.unforeseen, "segment_events": both.segment_events,
        "failed": device.failed, "addresses": deltas(device.addresses),
        "reserved_bytes": deltas(reserved), "allocated_units": deltas([value // UNIT for value in allocated]),
        "segments": deltas(segments), "device_allocs": deltas(mallocs),
    }  # fmt: skip
