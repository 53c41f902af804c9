"""Cached blocks that go back to the driver."""

from __future__ import annotations

from neaptide.simulate.blocks import Block, BlockPool
from neaptide.simulate.driver import Driver
from neaptide.simulate.expandable import shrink
from neaptide.simulate.settings import UNBOUNDED, Settings


def release_segment(driver: Driver, block: Block) -> None:
    """Gives back a free block that is all of its segment."""
    block.pool.remove(block)
    driver.give_segment(block.address, block.size, block.stream, block.pool.owner)


def release_all(driver: Driver, pool: BlockPool) -> int:
    """Gives back every segment without a block in use, and the unused granules of expandable ones.

    Returns:
        Releases that a private pool's count of driver allocations goes down by.
    """
    released = 0
    expandable = []
    for block in pool.blocks():
        if block.virtual is not None:
            expandable.append(block)
        elif block.whole:
            release_segment(driver, block)
            released += 1
    return released + sum(shrink(driver, block) for block in expandable)


def release_enough(driver: Driver, pool: BlockPool, size: int, stream: int, settings: Settings) -> int | None:
    """Gives back oversize blocks of one stream: one that is large enough, else the largest ones until they add up.

    Args:
        size: bytes of the block that is wanted.

    Returns:
        How many were given back; None if they are not enough (those that were given back stay so).
    """
    if settings.max_split_bytes == UNBOUNDED:
        return None
    wanted = max(size, settings.max_split_bytes)
    entries, at = pool.at_least(wanted, stream)
    if at < len(entries) and entries[at][2].virtual is None:
        release_segment(driver, entries[at][2])
        return 1
    total, count = 0, 0
    for _, _, block in reversed(entries[:at]):
        if total >= wanted or block.size < settings.max_split_bytes:
            break
        if block.virtual is None:
            total += block.size
            count += 1
            release_segment(driver, block)
    return count if total >= wanted else None


def collect(driver: Driver, pool: BlockPool, limit_bytes: int, settings: Settings) -> None:
    """Gives back cached segments older than their mean age until what is above the threshold is gone.

    An age counts the pool's look-ups since the block became free.
    """
    allowed = int(settings.collect_above * limit_bytes)
    target, reclaimed = driver.reserved_bytes - allowed, 0
    free = [block for block in pool.blocks() if block.whole]
    total_age, count = sum(pool.lookups - block.age_base for block in free), len(free)
    found = target > 0
    while found and reclaimed < target and count:
        threshold, found = total_age / count, False
        for block in [b for b in pool.blocks() if b.whole and b.virtual is None]:
            age = pool.lookups - block.age_base
            if age >= threshold:
                found = True
                reclaimed, total_age, count = reclaimed + block.size, total_age - age, count - 1
                release_segment(driver, block)
