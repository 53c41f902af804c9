# SPDX-License-Identifier: Apache-2.0
"""What the slots of the workspace hold and who asked for it, as plain data: for the log and for the ledger."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from types import CodeType, FrameType
from typing import Any

MIB = 1 << 20


@dataclass(frozen=True)
class CallSite:
    """The line of code that asked for workspace, and the lane that it ran in."""

    code: CodeType
    line: int
    lane: int

    @classmethod
    def of(cls, frame: FrameType, lane: int) -> CallSite:
        return cls(frame.f_code, frame.f_lineno, lane)

    def __str__(self) -> str:
        return f"{os.path.basename(self.code.co_filename)}:{self.line}:{self.code.co_name}"


@dataclass
class SlotAccount:
    """The book of one slot: largest request of each call site, what captured graphs hold, what went past the lock.

    Attributes:
        consumers: largest request of each call site, bytes.
        retained_by: call sites whose views a captured graph holds.
        growths: times that the storage grew after it was committed.
        overflows: requests served beside the slot after the lock, by call site: how many, and the largest in bytes.
    """

    ubatch: int
    lane: int
    consumers: dict[CallSite, int] = field(default_factory=dict)
    retained_by: set[CallSite] = field(default_factory=set)
    growths: int = 0
    overflows: dict[CallSite, tuple[int, int]] = field(default_factory=dict)

    @property
    def high_water_bytes(self) -> int:
        return max(self.consumers.values(), default=0)

    def note(self, site: CallSite, required_bytes: int) -> None:
        if required_bytes > self.consumers.get(site, -1):
            self.consumers[site] = required_bytes

    def note_overflow(self, site: CallSite, required_bytes: int) -> bool:
        """Count it; True the first time that this call site went over."""
        count, largest = self.overflows.get(site, (0, 0))
        self.overflows[site] = (count + 1, max(largest, required_bytes))
        return count == 0

    def report(self, committed_bytes: int, persistent_bytes: int) -> SlotReport:
        ranked = sorted(self.consumers.items(), key=lambda item: (-item[1], str(item[0])))
        return SlotReport(
            ubatch=self.ubatch,
            lane=self.lane,
            committed_bytes=committed_bytes,
            high_water_bytes=self.high_water_bytes,
            second_consumer_bytes=ranked[1][1] if len(ranked) > 1 else 0,
            persistent_bytes=persistent_bytes,
            consumers=tuple(Consumer(str(site), site.lane, size) for site, size in ranked),
            retained_by=tuple(sorted({str(site) for site in self.retained_by})),
            growths=self.growths,
            overflow_count=sum(count for count, _ in self.overflows.values()),
            overflow_peak_bytes=max((size for _, size in self.overflows.values()), default=0),
        )


@dataclass(frozen=True)
class Consumer:
    """A call site (``file:line:function``), the lane it ran in, and its largest request in bytes."""

    site: str
    lane: int
    max_bytes: int


@dataclass(frozen=True)
class SlotReport:
    """One slot; sizes in bytes. ``persistent_bytes`` counts persistent resources that are tensors."""

    ubatch: int
    lane: int
    committed_bytes: int
    high_water_bytes: int
    second_consumer_bytes: int
    persistent_bytes: int
    consumers: tuple[Consumer, ...]
    retained_by: tuple[str, ...]
    growths: int
    overflow_count: int
    overflow_peak_bytes: int

    def line(self) -> str:
        largest = self.consumers[0].site if self.consumers else "none"
        text = (
            f"ubatch {self.ubatch} lane {self.lane}: {self.committed_bytes / MIB:.2f} MiB "
            f"(largest consumer {largest}, second {self.second_consumer_bytes / MIB:.2f} MiB)"
        )
        if self.overflow_count:
            text += f", {self.overflow_count} requests over it, up to {self.overflow_peak_bytes / MIB:.2f} MiB"
        return text


@dataclass(frozen=True)
class WorkspaceReport:
    """All slots of a manager."""

    locked: bool
    slots: tuple[SlotReport, ...]

    @property
    def committed_bytes(self) -> int:
        return sum(slot.committed_bytes for slot in self.slots)

    @property
    def persistent_bytes(self) -> int:
        return sum(slot.persistent_bytes for slot in self.slots)

    def as_dict(self) -> dict[str, Any]:
        """For JSON; sizes in bytes."""
        return asdict(self) | {"committed_bytes": self.committed_bytes, "persistent_bytes": self.persistent_bytes}

    def line(self) -> str:
        """One line, for the KV-cache summary."""
        used = [slot.line() for slot in self.slots if slot.committed_bytes]
        held = f"Workspace: {self.committed_bytes / MIB:.2f} MiB committed"
        if self.persistent_bytes:
            held += f", {self.persistent_bytes / MIB:.2f} MiB persistent"
        return f"{held}; {'; '.join(used)}" if used else held
