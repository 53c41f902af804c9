"""Expandable segments: one range of addresses per pool and stream, memory mapped where it is needed.

A range has granules of 2 MiB (small pool) or ``large_segment_bytes``; only whole granules are mapped and unmapped.
"""

from __future__ import annotations

from neaptide.simulate.blocks import Block, BlockPool, VirtualRange, merge
from neaptide.simulate.driver import Driver
from neaptide.simulate.settings import round_up


def grow(driver: Driver, pool: BlockPool, stream: int, size: int, granule: int) -> Block:
    """A free block of at least ``size`` bytes, in no list: the lowest addresses with room, mapped as far as needed."""
    block = _room(pool, stream, size) or _new_range(driver, pool, stream, granule)
    if not block.mapped:
        _map(driver, block, min(block.size, size))
    while block.size < size:
        behind = block.next
        assert behind is not None
        # Mapping merges the free block in front of it.
        _map(driver, behind, min(behind.size, size - block.size))
        block = behind
    pool.remove(block)
    return block


def _room(pool: BlockPool, stream: int, size: int) -> Block | None:
    """The first of neighbouring unmapped and free blocks that have ``size`` bytes together."""
    for _, unmapped in pool.unmapped.get(stream, []):
        before = unmapped.prev
        first = before if before is not None and before.unused else unmapped
        room, block = 0, first
        at: Block | None = block
        while room < size and at is not None and at.unused:
            room += at.size
            at = at.next
        if room >= size:
            return first
    return None


def _new_range(driver: Driver, pool: BlockPool, stream: int, granule: int) -> Block:
    """Addresses for 1 1/8 of the device's memory, none of it mapped."""
    size = round_up(driver.total_bytes + driver.total_bytes // 8, granule)
    address = driver.take_range(size, stream)
    block = Block(address, size, stream, pool, VirtualRange(address, size, granule))
    block.mapped = False
    pool.add_unmapped(block)
    return block


def _map(driver: Driver, block: Block, size: int) -> None:
    """Gives an unmapped block memory for ``size`` bytes, in whole granules; it becomes a free one."""
    pool, virtual = block.pool, block.virtual
    assert virtual is not None
    pool.remove_unmapped(block)
    mapped = round_up(block.address + size - virtual.address, virtual.granule_bytes) + virtual.address - block.address
    address = block.address
    block.mapped = True
    if mapped < block.size:
        rest = block.part(address + mapped, block.size - mapped)
        rest.mapped = False
        rest.link(block, block.next)
        block.size = mapped
        pool.add_unmapped(rest)
    merge(block, block.prev)
    merge(block, block.next)
    pool.add(block)
    driver.map(address, mapped, block.stream, pool.owner)


def shrink(driver: Driver, block: Block) -> bool:
    """Unmaps the whole granules of a free block; True if there were any. An empty range is given up."""
    pool, virtual = block.pool, block.virtual
    assert virtual is not None
    granule, base = virtual.granule_bytes, virtual.address
    begin = base + round_up(block.address - base, granule)
    end = base + (block.address + block.size - base) // granule * granule
    if begin < end:
        pool.remove(block)
        _keep(block, block.address, begin - block.address, ahead=True)
        _keep(block, end, block.address + block.size - end, ahead=False)
        block.address, block.size, block.mapped = begin, end - begin, False
        merge(block, block.prev)
        merge(block, block.next)
        pool.add_unmapped(block)
        driver.unmap(begin, end - begin, block.stream, pool.owner)
    if block.whole and not block.mapped:
        pool.remove_unmapped(block)
        driver.ranges.remove(range(base, base + virtual.size_bytes))
    return begin < end


def _keep(block: Block, address: int, size: int, *, ahead: bool) -> None:
    """Makes what lies outside of the whole granules a free block of its own."""
    if size:
        kept = block.part(address, size)
        kept.link(*((block.prev, block) if ahead else (block, block.next)))
        block.pool.add(kept)


def best_reach(pool: BlockPool, size: int, stream: int) -> Block | None:
    """Best fit by what a block can grow to: the first of the large enough ones whose successor has no less."""
    entries, at = pool.at_least(size, stream)
    if at == len(entries):
        return None
    while at + 1 < len(entries) and entries[at + 1][2].reach < entries[at][2].reach:
        at += 1
    return entries[at][2]
