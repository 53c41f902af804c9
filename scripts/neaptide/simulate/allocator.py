"""The caching allocator of one device: what each request, free and release does to blocks and segments.

Follows ``DeviceCachingAllocator`` of torch 2.11. A pool is named by a number, 0 the default one; the caller says which
pool a request goes to, as a stream that is captured decides on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from neaptide.simulate.blocks import Block, BlockPool, cut, merge
from neaptide.simulate.driver import Addresses, Driver
from neaptide.simulate.expandable import best_reach, grow
from neaptide.simulate.release import collect, release_all, release_enough
from neaptide.simulate.settings import SMALL_BYTES, Settings


@dataclass
class Pools:
    """The small and the large pool that belong together.

    Attributes:
        uses: graphs that are captured into it; without any its unused segments may be released.
        device_allocs: driver allocations not released yet; without any the private pool is gone.
    """

    small: BlockPool
    large: BlockPool
    uses: int = 1
    device_allocs: int = 0

    @property
    def empty(self) -> bool:
        """Whether neither pool has addresses, free or unmapped."""
        return not any(
            entries for pool in (self.small, self.large) for by in (pool.free, pool.unmapped) for entries in by.values()
        )

    def of(self, block_bytes: int) -> BlockPool:
        return self.small if block_bytes <= SMALL_BYTES else self.large


def new_pools(owner: int) -> Pools:
    return Pools(BlockPool(small=True, owner=owner), BlockPool(small=False, owner=owner))


@dataclass
class Allocator:
    """One device.

    Attributes:
        limit_bytes: most that may be reserved, as ``set_per_process_memory_fraction`` sets it; None without a limit.
        private: pools of captures, by id.
        captures: ids of the pools that captures go to at present.
        waiting: freed blocks that other streams still use, with the step they are done at.
        undefined: whether a private pool was forgotten that still has blocks. With expandable segments PyTorch counts
            requests that mapped memory against ranges it unmapped; where a range is unmapped in parts, the pool is
            deleted too early and its blocks point into freed memory.
    """

    settings: Settings
    driver: Driver
    limit_bytes: int | None = None
    allocated_bytes: int = 0
    default: Pools = field(default_factory=lambda: new_pools(0))
    private: dict[int, Pools] = field(default_factory=dict)
    captures: list[int] = field(default_factory=list)
    waiting: list[tuple[int, Block]] = field(default_factory=list)
    undefined: bool = False

    def alloc(self, size_bytes: int, stream: int = 0, pool: int = 0) -> Block | None:
        """A block of at least ``size_bytes``; None if the limit allows none, whatever is released."""
        size = self.settings.rounded(size_bytes)
        pools = self.default if pool == 0 else self.private.setdefault(pool, new_pools(pool))
        blocks = pools.of(size)
        block = self._cached(blocks, size, stream) or self._new(pools, size, stream)
        if block is None:
            return None
        if self.settings.splits(block.size, size, blocks.small):
            block = cut(block, size)
        block.allocated, block.requested_bytes = True, size_bytes
        self.allocated_bytes += block.size
        self._note("alloc", block)
        return block

    def free(self, block: Block, done_at: int | None = None) -> None:
        """Takes a block back; at step ``done_at`` if other streams use it until then (``record_stream``)."""
        block.allocated = False
        self.allocated_bytes -= block.size
        self._note("free_requested", block)
        if done_at is None:
            self._free_now(block)
        else:
            block.waiting = True
            self.waiting.append((done_at, block))

    def settle(self, step: int) -> None:
        """Frees the blocks whose other streams are done; PyTorch looks before each request, but not in a capture."""
        if self.waiting and not self.captures:
            done = [block for at, block in self.waiting if at <= step]
            self.waiting = [(at, block) for at, block in self.waiting if at > step]
            for block in done:
                self._free_now(block)

    def empty_cache(self) -> None:
        """Gives back what no block uses; while a capture runs, only that of pools whose graphs are all gone."""
        if not self.captures:
            for _, block in self.waiting:
                self._free_now(block)
            self.waiting.clear()
            for blocks in (self.default.large, self.default.small):
                release_all(self.driver, blocks)
        for pool, pools in [(p, held) for p, held in self.private.items() if held.uses == 0]:
            pools.device_allocs -= release_all(self.driver, pools.small) + release_all(self.driver, pools.large)
            if pools.device_allocs <= 0:
                self.undefined |= pools.device_allocs < 0 or not pools.empty
                del self.private[pool]

    def begin_capture(self, pool: int) -> None:
        """A graph is captured into ``pool`` from here on, and holds it until :meth:`release_pool`."""
        if pool in self.private:
            self.private[pool].uses += 1
        else:
            self.private[pool] = new_pools(pool)
        self.captures.append(pool)

    def end_capture(self, pool: int) -> None:
        self.captures.remove(pool)

    def release_pool(self, pool: int) -> None:
        """One graph of the pool is gone."""
        self.private[pool].uses -= 1

    def _cached(self, pool: BlockPool, size: int, stream: int) -> Block | None:
        """The best fit, out of its list."""
        if self._collects:
            pool.lookups += 1
        if self.settings.expandable:
            block = best_reach(pool, size, stream)
        else:
            entries, at = pool.at_least(size, stream)
            block = entries[at][2] if at < len(entries) else None
        if block is None or not self.settings.serves(block.size, size):
            return None
        pool.remove(block)
        return block

    def _new(self, pools: Pools, size: int, stream: int) -> Block | None:
        """Memory from the driver; at the limit again after oversize blocks, then all cached ones were released.

        The released blocks are not searched again: what is tried anew is the driver.
        """
        if self._collects and self.limit_bytes is not None:
            collect(self.driver, self.default.large, self.limit_bytes, self.settings)
        block = self._from_driver(pools, size, stream)
        if block is not None:
            return block
        released = release_enough(self.driver, pools.of(size), size, stream, self.settings)
        if released is not None:
            pools.device_allocs -= released
            block = self._from_driver(pools, size, stream)
        if block is None and not self.captures:
            self.empty_cache()
            block = self._from_driver(pools, size, stream)
        return block

    def _from_driver(self, pools: Pools, size: int, stream: int) -> Block | None:
        pool, asked = pools.of(size), self.settings.segment_bytes(size)
        if self.limit_bytes is not None and self.driver.reserved_bytes + asked > self.limit_bytes:
            return None
        pools.device_allocs += 1
        if self.settings.expandable:
            return grow(self.driver, pool, stream, size, self.settings.granule_bytes(pool.small))
        address = self.driver.take_segment(asked, stream, pool.owner)
        return Block(address, asked, stream, pool)

    def _free_now(self, block: Block) -> None:
        block.waiting = False
        self._note("free_completed", block)
        merge(block, block.prev)
        merge(block, block.next)
        block.pool.add(block)

    def _note(self, action: str, block: Block) -> None:
        self.driver.note(action, block.address, block.requested_bytes, block.stream, block.pool.owner)

    @property
    def _collects(self) -> bool:
        return self.limit_bytes is not None and self.settings.collect_above > 0


def new_allocator(
    settings: Settings, addresses: Addresses, total_bytes: int, limit_bytes: int | None = None
) -> Allocator:
    """An allocator of an empty device with ``total_bytes`` of memory."""
    return Allocator(settings, Driver(addresses, total_bytes), limit_bytes)
