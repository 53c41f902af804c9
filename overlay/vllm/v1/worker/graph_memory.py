# SPDX-License-Identifier: Apache-2.0
"""What CUDA graphs will take, from readings around a throwaway capture. Arithmetic only, without torch.

Measured on an H200 with vLLM 0.33.0: the driver keeps what it took for a graph when that graph is destroyed,
and the next capture uses it again, so only what destroying the throwaway graphs gives back will be taken again.
The eager warm-up before a capture leaves hundreds of MiB in the allocator's cache, which is no graph's.
Initialising the KV cache allocates builder and runner buffers beside it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

# The driver takes memory in steps of 2 MiB while a small graph needs about half of one: below this many captures the
# mean growth of a graph is mostly rounding.
MIN_SAMPLES = 8


@dataclass(frozen=True)
class Reading:
    """The device with an empty allocator cache: free bytes, and what torch has reserved and allocated."""

    free_bytes: int
    reserved_bytes: int
    allocated_bytes: int


@dataclass(frozen=True)
class Peaks:
    """The allocator's highest bytes since they were reset."""

    reserved_bytes: int
    allocated_bytes: int


def sampled(items: Sequence[T]) -> list[T]:
    """The graphs that a profile captures, of all in order: the largest first, then evenly spread to the smallest.

    All up to :data:`MIN_SAMPLES`, then a quarter of them. It follows from the number alone, so ranks agree.
    """
    total = len(items)
    count = min(total, max(MIN_SAMPLES, -(-total // 4)))
    if count == total:
        return list(items)
    return [items[index * (total - 1) // (count - 1)] for index in range(count)]


def sampled_by_kind(kinds: Sequence[Hashable]) -> list[int]:
    """Which graphs of one mode a profile captures, by index: of every kind :func:`sampled`, in the order of all.

    Graphs of one size come in kinds (with and without LoRA, of one ubatch or two), one beside the other, which cost
    differently.
    """
    return sorted(
        index for kind in set(kinds) for index in sampled([i for i, other in enumerate(kinds) if other == kind])
    )


@dataclass(frozen=True)
class GraphSeries:
    """Captures of one mode and kind into one pool, largest first.

    ``total`` graphs will be captured; ``growths`` has the device bytes that each sampled capture took by
    itself: torch's pool and the driver's memory, without its eager warm-up.
    """

    total: int
    growths: tuple[int, ...]

    @property
    def missing_bytes(self) -> int:
        """What the graphs that were not captured will take: the mean of the captures after the first, each.

        The first is left out, because it allocates the pool that the others share.
        """
        missing, later = self.total - len(self.growths), self.growths[1:]
        if missing <= 0 or not later:
            return 0
        return -(-missing * max(0, sum(later)) // len(later))


@dataclass(frozen=True)
class GraphProfile:
    """Readings around a throwaway capture, all in bytes, and the terms of the memory plan that follow from them.

    Read in this order: ``start``; ``cache_stands``, when the minimal KV cache of ``kv_cache_bytes`` stands;
    ``before`` the captures, after the kernels' warm-up; ``after`` them, with their ``peaks``; ``destroyed``,
    when the graphs are gone and the KV cache still stands; ``torn_down``; ``end``, after communicators were
    rolled back.

    ``standing_bytes + graph_bytes`` is ``start - after`` in free bytes, without the KV cache, plus what the
    graphs that were not captured will take: all that an engine with this KV cache would have more than it had
    at ``start``.
    """

    start: Reading
    cache_stands: Reading
    before: Reading
    after: Reading
    destroyed: Reading
    torn_down: Reading
    end: Reading
    peaks: Peaks
    kv_cache_bytes: int
    series: tuple[GraphSeries, ...]

    @property
    def rolled_back_bytes(self) -> int:
        """What a rollback of communicators gave back: the real capture takes it again."""
        return max(0, self.end.free_bytes - self.torn_down.free_bytes)

    @property
    def graph_bytes(self) -> int:
        """What the real capture will take: what the throwaway graphs gave back, and the graphs not captured."""
        given_back = self.destroyed.free_bytes - self.after.free_bytes + self.rolled_back_bytes
        return max(0, given_back) + sum(series.missing_bytes for series in self.series)

    @property
    def standing_bytes(self) -> int:
        """What stands beside the KV cache when no graph does: consumed, before the real capture or by it.

        Some of it stays from here on, the rest goes with the profile and is allocated again with the real KV cache.
        """
        taken = self.start.free_bytes - self.destroyed.free_bytes - self.kv_cache_bytes
        return max(0, taken - self.rolled_back_bytes)

    @property
    def builder_bytes(self) -> int:
        """The part of ``standing_bytes`` that came with the KV cache: attention builders and the runner's buffers."""
        taken = self.start.free_bytes - self.cache_stands.free_bytes - self.kv_cache_bytes
        return min(self.standing_bytes, max(0, taken))

    @property
    def residue_bytes(self) -> int:
        """The rest of ``standing_bytes``: what warm-up and captures leave (driver memory, modules, workspaces)."""
        return self.standing_bytes - self.builder_bytes

    @property
    def transient_bytes(self) -> int:
        """What the captures need for a while, over what they leave; the warm-up of the first is the usual peak.

        Of torch's allocated and reserved bytes the smaller: a graph's pool is allocated only while it is captured and
        stays reserved, and the allocator's cache is reserved though nobody needs it.
        """
        allocated = self.peaks.allocated_bytes - self.after.allocated_bytes
        reserved = self.peaks.reserved_bytes - self.after.reserved_bytes
        return max(0, min(allocated, reserved))
