"""Blocks of a segment, and the free ones of a pool in the order that best fit looks at them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class VirtualRange:
    """Addresses that an expandable segment reserves; ``granule_bytes`` are mapped at a time."""

    address: int
    size_bytes: int
    granule_bytes: int


class Block:
    """Neighbouring addresses of one segment that are handed out, free or unmapped together.

    Attributes:
        requested_bytes: what the holder asked for.
        waiting: freed by its holder, but other streams may still use it.
        mapped: False for the part of an expandable segment that has no memory.
        age_base: the pool's look-ups when the block became free.
    """

    __slots__ = (
        "address", "age_base", "allocated", "mapped", "next", "pool", "prev", "requested_bytes", "size", "stream",
        "virtual", "waiting",
    )  # fmt: skip

    def __init__(
        self, address: int, size: int, stream: int, pool: BlockPool, virtual: VirtualRange | None = None
    ) -> None:
        self.address, self.size, self.stream, self.pool, self.virtual = address, size, stream, pool, virtual
        self.requested_bytes = self.age_base = 0
        self.allocated = self.waiting = False
        self.mapped = True
        self.prev: Block | None = None
        self.next: Block | None = None

    @property
    def whole(self) -> bool:
        """Whether the block is all of its segment."""
        return self.prev is None and self.next is None

    @property
    def unused(self) -> bool:
        return not self.allocated and not self.waiting

    @property
    def reach(self) -> int:
        """Bytes it has once the unmapped block behind it is mapped."""
        behind = self.next
        return self.size + (behind.size if behind is not None and not behind.mapped else 0)

    def part(self, address: int, size: int) -> Block:
        """A new block of the same segment, not linked yet."""
        return Block(address, size, self.stream, self.pool, self.virtual)

    def link(self, before: Block | None, after: Block | None) -> None:
        self.prev, self.next = before, after
        if before is not None:
            before.next = self
        if after is not None:
            after.prev = self


Entry = tuple[int, int, Block]


class BlockPool:
    """Free blocks by stream, ordered by size and then address; unmapped ones by address.

    Attributes:
        owner: id of the private pool; 0 for the default one.
        lookups: searches so far, counted where garbage collection needs ages.
    """

    def __init__(self, small: bool, owner: int = 0) -> None:
        self.small, self.owner, self.lookups = small, owner, 0
        self.free: dict[int, list[Entry]] = {}
        self.unmapped: dict[int, list[tuple[int, Block]]] = {}

    def add(self, block: Block) -> None:
        block.age_base = self.lookups
        insort(self.free.setdefault(block.stream, []), (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        entries = self.free[block.stream]
        del entries[bisect_left(entries, (block.size, block.address))]

    def add_unmapped(self, block: Block) -> None:
        insort(self.unmapped.setdefault(block.stream, []), (block.address, block))

    def remove_unmapped(self, block: Block) -> None:
        entries = self.unmapped[block.stream]
        del entries[bisect_left(entries, (block.address,))]

    def at_least(self, size: int, stream: int) -> tuple[list[Entry], int]:
        """The stream's free blocks, and the index of the smallest that has ``size``."""
        entries = self.free.get(stream, [])
        return entries, bisect_left(entries, (size,))

    def blocks(self) -> Iterator[Block]:
        """Free blocks, by stream and size; a copy, so that they may be released meanwhile."""
        for stream in sorted(self.free):
            yield from [block for _, _, block in self.free[stream]]


def cut(block: Block, size: int) -> Block:
    """The first ``size`` bytes of a block that is in no pool's list; the rest becomes free."""
    head = block.part(block.address, size)
    before = block.prev
    block.address += size
    block.size -= size
    head.link(before, block)
    block.pool.add(block)
    return head


def merge(block: Block, other: Block | None) -> None:
    """Takes a neighbour into ``block`` if both are unused and both mapped or both unmapped; ``block`` is in no list."""
    if other is None or not other.unused or other.mapped != block.mapped:
        return
    (other.pool.remove if other.mapped else other.pool.remove_unmapped)(other)
    if other is block.prev:
        block.address = other.address
        block.link(other.prev, block.next)
    else:
        block.link(block.prev, other.next)
    block.size += other.size
