# SPDX-License-Identifier: Apache-2.0
"""Sizes of workspace requests: pure arithmetic, called by the manager, by its tests and by the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import torch

ALIGNMENT_BYTES = 256
# A request below the allocator's large-block size is never rounded up.
AMORTISED_FROM_BYTES = 2 << 20
# The share of free device memory that planning may take ahead of what was asked for.
AHEAD_SHARE = 4

Spec = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class WorkspaceLayout:
    """Where the tensors of one request lie in a slot.

    Attributes:
        offsets: first byte of each tensor, a multiple of 256.
        sizes: bytes of each tensor, unaligned.
        total_bytes: sum of the sizes, each rounded up to 256 bytes.
    """

    specs: tuple[Spec, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    total_bytes: int

    def views(self, storage: torch.Tensor) -> list[torch.Tensor]:
        """Views into ``storage`` (uint8, at least ``total_bytes`` long), one for each spec."""
        return [
            storage[offset : offset + size].view(dtype).reshape(shape)
            for (shape, dtype), offset, size in zip(self.specs, self.offsets, self.sizes, strict=True)
        ]


def workspace_layout(specs: Sequence[Spec]) -> WorkspaceLayout:
    """Tensors one after the other, each at a multiple of 256 bytes (``get_simultaneous``'s contract)."""
    sizes = tuple(prod(shape) * dtype.itemsize for shape, dtype in specs)
    aligned = [-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in sizes]
    offsets = tuple(accumulate(aligned[:-1], initial=0)) if sizes else ()
    return WorkspaceLayout(tuple(specs), offsets, sizes, sum(aligned))


def planned_bytes(current_bytes: int, required_bytes: int, free_bytes: int | None) -> int:
    """Bytes of a slot's provisional storage while the plan still grows.

    A slot that grows again takes up to twice what it had, so that a sequence of growing requests whose views are
    all kept holds at most twice the last storage. What it takes beyond the request stays within a quarter of the
    free device memory; where that is unknown (``None``) and for small slots the size is exact.
    """
    if current_bytes < AMORTISED_FROM_BYTES or free_bytes is None:
        return required_bytes
    ahead = max(2 * current_bytes - required_bytes, 0)
    room = max(free_bytes - required_bytes, 0) // AHEAD_SHARE
    return required_bytes + min(ahead, room)
