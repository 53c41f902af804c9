# SPDX-License-Identifier: Apache-2.0
"""Whether b12x's PCIe collectives serve a group of ranks, and the one reason where they do not.

Every rank tells the others what it found, and all come to the same answer: a collective that some ranks make over
PCIe and others not never ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

AUTO, ON, OFF = "auto", "1", "0"
CAPABILITIES = ((12, 0), (12, 1))
WORLD_SIZES = (2, 4, 6, 8)


@dataclass(frozen=True)
class Found:
    """What a rank was told and what it sees.

    Attributes:
        asked: ``auto``, ``1`` or ``0``.
        architectures: ``any`` lifts the limit to :data:`CAPABILITIES`.
        serves: what would go over PCIe, with its sizes.
        obstacle: what forbids to ask further here: another platform, a device that does not answer; "" for nothing.
        device: ordinal of this rank's device in its process.
        physical: its number on the machine.
        capability: of it.
        peers: whether it can map every other device of the group; not asked yet, it is assumed.
        nvlink: whether every pair has it; not asked yet, none has.
        mig: whether the device is a part of one.
        ubatches: whether steps run as several at once.
        runtime: "" where b12x and its pools can be used, else why not.
    """

    asked: str
    architectures: str
    world_size: int
    serves: str = ""
    obstacle: str = ""
    device: int = -1
    physical: int = -1
    capability: tuple[int, int] = (0, 0)
    peers: bool = True
    nvlink: bool = False
    mig: bool = False
    ubatches: bool = False
    runtime: str = ""


def refusal(found: Found) -> str:
    """Why this rank cannot serve, or is not to; "" if it can and is."""
    if found.asked == OFF:
        return "switched off"
    if found.obstacle:
        return found.obstacle
    if found.world_size not in WORLD_SIZES:
        return f"{found.world_size} ranks, served are {', '.join(map(str, WORLD_SIZES))}"
    if found.architectures != "any" and found.capability not in CAPABILITIES:
        return f"compute capability {'.'.join(map(str, found.capability))}, served are 12.0 and 12.1"
    if found.mig:
        return "a MIG device, which has no peers"
    if not found.peers:
        return "no peer access between all devices"
    if found.ubatches:
        return "several micro-batches at once (DBO), which would share one channel"
    if found.asked == AUTO and (found.nvlink or found.world_size <= 2):
        return "not switched on, and not more than two GPUs without NVLink"
    return found.runtime


def agreed_refusal(everyones: Sequence[Found]) -> str:
    """One answer for all ranks: the first rank's reason that has one, named; "" if all serve."""
    sizes = {found.serves for found in everyones if not found.obstacle and found.asked != OFF}
    if len(sizes) > 1:
        return f"ranks were told different sizes: {'; '.join(sorted(sizes))}"
    reasons = [refusal(found) for found in everyones]
    rank = next((rank for rank, reason in enumerate(reasons) if reason), None)
    if rank is None:
        return ""
    return reasons[rank] if len(set(reasons)) == 1 else f"{reasons[rank]} (rank {rank} of the group)"


def worth_a_line(everyones: Sequence[Found]) -> bool:
    """Whether the refusal is said at start-up: someone asked, or the machine is one that it is made for."""
    return any(found.asked == ON or (found.asked == AUTO and _made_for(found)) for found in everyones)


def _made_for(found: Found) -> bool:
    return not found.obstacle and found.world_size > 2 and found.capability in CAPABILITIES and not found.nvlink
