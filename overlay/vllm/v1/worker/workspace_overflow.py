# SPDX-License-Identifier: Apache-2.0
"""Requests that a slot cannot hold: what is served beside it, and what is said where nothing is."""

from __future__ import annotations

import weakref

import torch
from vllm.v1.worker.workspace_device import DeviceMemory
from vllm.v1.worker.workspace_report import MIB, CallSite, SlotAccount


class WorkspaceGrowthRefused(RuntimeError):
    """Storage that a captured graph holds would have to move."""


class Overflow:
    """Allocations beside locked slots, which die with their views.

    Attributes:
        limit_bytes: most that they may hold at once; 0 for none.
        held_bytes: what they hold now.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0

    def has_room(self, required_bytes: int) -> bool:
        """Whether a request is within the limit."""
        return self.held_bytes + required_bytes <= self.limit_bytes

    def allocate(self, memory: DeviceMemory, required_bytes: int) -> torch.Tensor:
        """``required_bytes`` that count as held until their last view dies."""
        transient = memory.allocate_transient(required_bytes)
        self.held_bytes += required_bytes
        weakref.finalize(transient.untyped_storage(), self._gone, required_bytes).atexit = False
        return transient

    def _gone(self, size_bytes: int) -> None:
        self.held_bytes -= size_bytes

    def refusal(self, current_bytes: int, required_bytes: int, site: CallSite, *, locked: bool, capturing: bool) -> str:
        """Why a request is not served; begins as upstream's assertion does where the workspace is locked."""
        text = (
            f"Workspace is {'locked' if locked else 'held by a stream capture'} but allocation from '{site}' requires "
            f"{required_bytes / MIB:.2f} MB, current size is {current_bytes / MIB:.2f} MB. "
        )
        if capturing:
            return text + "Workspace growth is not allowed inside a capture: its warm-up must ask for as much."
        text += "Workspace growth is not allowed after locking."
        if self.limit_bytes:
            text += (
                f" Overflow is served up to {self.limit_bytes / MIB:.0f} MB, of which {self.held_bytes / MIB:.2f} MB "
                "are held: raise VLLM_NEAPTIDE_WORKSPACE_OVERFLOW_MB for more."
            )
        return text


def refuse_if_retained(account: SlotAccount, current_bytes: int, required_bytes: int, site: CallSite) -> None:
    """Nothing where no lasting graph holds the slot.

    Raises:
        WorkspaceGrowthRefused: one does; both callers are named.
    """
    if not account.retained_by:
        return
    holders = ", ".join(sorted({f"'{holder}'" for holder in account.retained_by}))
    raise WorkspaceGrowthRefused(
        f"Workspace growth refused: '{site}' requires {required_bytes / MIB:.2f} MB of ubatch {account.ubatch} lane "
        f"{account.lane}, whose {current_bytes / MIB:.2f} MB a captured CUDA graph holds through {holders}; "
        "moving it would leave that graph a dangling address. The size must be known before the first lasting "
        "capture: ask for it in the profiling run or in a warm-up. With --kv-cache-memory-bytes no capture is "
        "profiled, which would have shown it."
    )
