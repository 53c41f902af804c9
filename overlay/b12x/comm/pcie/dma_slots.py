# SPDX-License-Identifier: Apache-2.0
"""Bytes of the PCIe DMA ring: one slot a step in the IPC slab, and the stage of compressed modes.

A ring of W ranks takes 2(W-1) steps, first reduce-scatter, then all-gather, and step k writes slot k of
a peer's slab. Upstream makes every slot as wide as a bf16 shard, and gives the stage W strides in every
compressed mode. Here a slot is as wide as what its step carries in the wire mode:

| modes                                          | reduce-scatter | all-gather | stage strides |
| ``""`` (bf16)                                  | full           | full       | 0             |
| ``ag``, ``i8``, ``mx``                         | full           | compressed | 1             |
| ``ring``, ``a2a``, and their ``i8_``, ``mx_``  | compressed     | compressed | W             |

Peers write into these slots, so everything here follows from mode, capacity and world size alone, and
:func:`agreed_layout` compares it across ranks before the slab is allocated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

FLAGS_BYTES = 256 * 128  # upstream's FLAG_SLOTS * FLAG_STRIDE
ALIGN_BYTES = 256  # upstream's SCRATCH_ALIGN
QUANT_BLOCK = 128  # upstream's FP8_QUANT_BLOCK: four bytes of scales for this many elements
PRIME_BYTES = 512  # what upstream's priming wants of a stage, since 1.5

GATHER_MODES = ("ag", "i8", "mx")
WHOLE_MODES = ("ring", "i8_ring", "mx_ring", "a2a", "i8_a2a", "mx_a2a")
MODES = ("", *GATHER_MODES, *WHOLE_MODES)


@dataclass(frozen=True)
class DmaLayout:
    """Where the steps of one ring lie. Two ranks may share a ring if their layouts are equal.

    Attributes:
        mode: wire mode as upstream normalises it, one of ``MODES``.
        max_bytes: largest input, in bytes.
        world_size: ranks of the ring.
        slot_bytes: width of the slot of each of the 2(W-1) steps.
        stage_stride: bytes between two chunks in the stage. 0 if all of them share one place: the
            all-gather modes stage one chunk a call, the one that the rank owns.
        stage_bytes: size of the local stage.
    """

    mode: str
    max_bytes: int
    world_size: int
    slot_bytes: tuple[int, ...]
    stage_stride: int
    stage_bytes: int

    def offset(self, step: int) -> int:
        """Bytes from the end of the flags to the slot of ``step``."""
        return sum(self.slot_bytes[:step])

    @property
    def slab_bytes(self) -> int:
        """Size of the slab that each rank exports: the flags, then the slots."""
        return FLAGS_BYTES + sum(self.slot_bytes)

    @property
    def narrowest_slot_bytes(self) -> int:
        """What every slot holds, whatever its step."""
        return min(self.slot_bytes)


def _align(size: int) -> int:
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES


def _widths(mode: str, max_bytes: int, world_size: int) -> tuple[int, int]:
    """Full and compressed width of a slot.

    A compressed shard of e elements takes e bytes of payload and four of scales for every 128 elements.
    However it is cut into pieces of whole blocks, each with its own scales, the pieces add up to the same.
    """
    if mode not in MODES:
        raise ValueError(f"DMA wire mode {mode!r}; wanted one of {MODES}")
    if max_bytes <= 0 or world_size < 2:
        raise ValueError(
            f"DMA ring of max_bytes={max_bytes} and {world_size} ranks; wanted a positive capacity and at least 2 ranks"
        )
    elements = max_bytes // 2 // world_size
    return _align(-(-max_bytes // world_size)), _align(elements + elements // QUANT_BLOCK * 4)


def dma_layout(mode: str, max_bytes: int, world_size: int) -> DmaLayout:
    """The ring of one wire mode.

    Args:
        mode: wire mode as upstream normalises it; ``""`` is bf16.
        max_bytes: largest input, in bytes.
        world_size: ranks of the ring.

    Raises:
        ValueError: for an unknown mode, a capacity that is not positive, or fewer than 2 ranks.
    """
    full, compressed = _widths(mode, max_bytes, world_size)
    hops = world_size - 1
    reduce, gather = compressed if mode in WHOLE_MODES else full, compressed if mode else full
    stride, stage = 0, 0
    if mode in WHOLE_MODES:
        stride, stage = compressed, world_size * compressed
    elif mode:
        stage = min(world_size * compressed, max(compressed, PRIME_BYTES))
    return DmaLayout(mode, max_bytes, world_size, (reduce,) * hops + (gather,) * hops, stride, stage)


def upstream_layout(mode: str, max_bytes: int, world_size: int) -> DmaLayout:
    """The same ring as upstream lays it out: every slot full, W strides of stage in a compressed mode."""
    full, compressed = _widths(mode, max_bytes, world_size)
    stride = compressed if mode else 0
    return DmaLayout(mode, max_bytes, world_size, (full,) * (2 * (world_size - 1)), stride, world_size * stride)


def fits(layout: DmaLayout, elements: int, itemsize: int, is_bf16: bool) -> bool:
    """Whether an input of at most ``max_bytes`` fits the slots that it would go through.

    A compressed mode sends bf16 shards of whole 128-element blocks compressed, and its slots hold these. It
    sends every other input at full width through the same slots, which may be narrower.

    Args:
        layout: the ring's.
        elements: of the whole input, a multiple of the world size.
        itemsize: bytes of an element.
        is_bf16: whether the input is bfloat16.

    Returns:
        A function of layout, shape and dtype only: the same on every rank that takes part in the call.
    """
    shard_elements = elements // layout.world_size
    if layout.mode and is_bf16 and shard_elements % QUANT_BLOCK == 0:
        return True
    return shard_elements * itemsize <= layout.narrowest_slot_bytes


def require_fits(layout: DmaLayout, elements: int, itemsize: int, is_bf16: bool) -> None:
    """Refuse what does not fit.

    Raises:
        ValueError: with the shard's and the slot's bytes, and what would be carried.
    """
    if not fits(layout, elements, itemsize, is_bf16):
        shard_bytes = elements // layout.world_size * itemsize
        raise ValueError(
            f"DMA input of {elements} elements goes uncompressed, in shards of {shard_bytes} bytes, through slots of "
            f"{layout.narrowest_slot_bytes} bytes (wire mode {layout.mode!r}, max_bytes {layout.max_bytes}); "
            f"wanted bfloat16 in shards of a multiple of {QUANT_BLOCK} elements, or smaller shards; "
            "use another all-reduce for it, or a ring without compression"
        )


def agreed_layout(
    exchange_group: ProcessGroup, *, mode: Callable[[], str], max_bytes: int | str, world_size: int
) -> DmaLayout:
    """The ring's layout, once every rank has the same one. Collective; allocates nothing.

    The mode may come from each rank's own environment, so peers could differ in it and would then write
    past each other's slots.

    Args:
        exchange_group: the group that will exchange the slab's handles.
        mode: gives this rank's normalised wire mode, or raises.
        max_bytes: this rank's capacity; what ``int`` takes.
        world_size: ranks of the group.

    Raises:
        RuntimeError: on every rank, if a rank's arguments are invalid or the layouts differ.
    """
    from . import pcie_oneshot

    owner = "PCIe DMA ring layout"
    layout: DmaLayout = pcie_oneshot._run_collective_preallocation_setup(
        owner=owner, exchange_group=exchange_group, setup=lambda: dma_layout(mode(), int(max_bytes), world_size)
    )
    pcie_oneshot._require_collective_contract(owner=owner, exchange_group=exchange_group, contract=layout)
    return layout
