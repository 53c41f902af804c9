# SPDX-License-Identifier: Apache-2.0
"""Which sizes go over PCIe: from the switches alone, and so alike on all ranks once the switches are."""

from __future__ import annotations

from dataclasses import dataclass

KIB, MIB = 1 << 10, 1 << 20
UPSTREAM, ONESHOT, RING = "upstream", "oneshot", "ring"
# Of oneshot sizes: with the residual add and the RMSNorm behind the sum.
FUSED = "fused"


@dataclass(frozen=True)
class Limits:
    """Payloads in bytes.

    Attributes:
        oneshot_bytes: the largest of the oneshot all-reduce.
        ring_from_bytes: the smallest of the DMA ring; 0 for no ring.
        ring_bytes: its largest, which decides its slab.
    """

    oneshot_bytes: int
    ring_from_bytes: int = 0
    ring_bytes: int = 0

    def __post_init__(self) -> None:
        if self.ring_from_bytes and not self.oneshot_bytes < self.ring_from_bytes <= self.ring_bytes:
            raise ValueError(
                f"a DMA ring from {self.ring_from_bytes:,} to {self.ring_bytes:,} bytes beside a oneshot of up to "
                f"{self.oneshot_bytes:,}, wanted them in order; raise VLLM_NEAPTIDE_PCIE_RING_KB or its ..._RING_MB"
            )

    def route(self, nbytes: int) -> str:
        """What serves a payload, if it takes its shape: :data:`ONESHOT`, :data:`RING` or :data:`UPSTREAM`."""
        if 0 < nbytes <= self.oneshot_bytes:
            return ONESHOT
        return RING if self.ring_from_bytes and self.ring_from_bytes <= nbytes <= self.ring_bytes else UPSTREAM

    def __str__(self) -> str:
        ring = (
            f"the DMA ring from {self.ring_from_bytes / KIB:,.0f} KiB to {self.ring_bytes / MIB:,.0f} MiB, "
            if self.ring_from_bytes
            else ""
        )
        return f"oneshot up to {self.oneshot_bytes / KIB:,.0f} KiB, {ring}vLLM's own for the rest"
