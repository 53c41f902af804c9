"""What a device held before the first operation of a trace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from neaptide.simulate.allocator import Allocator, new_pools
from neaptide.simulate.blocks import Block, BlockPool, VirtualRange
from neaptide.simulate.settings import round_up


@dataclass(frozen=True)
class HeldBlock:
    """A block in use; ``key`` is the id that frees it."""

    key: int
    address: int
    size_bytes: int
    requested_bytes: int


@dataclass(frozen=True)
class HeldSegment:
    """A segment, or a mapped range of an expandable one, with the blocks in use by address.

    Attributes:
        base: where the virtual range of an expandable segment begins; None for a segment of cudaMalloc.
    """

    address: int
    size_bytes: int
    stream: int
    pool: int
    small: bool
    base: int | None
    blocks: Sequence[HeldBlock]

    @property
    def end(self) -> int:
        return self.address + self.size_bytes


def restore(allocator: Allocator, segments: Iterable[HeldSegment]) -> dict[int, Block]:
    """Puts segments into an empty allocator; the blocks in use, by id. Counts no driver calls."""
    live: dict[int, Block] = {}
    ordered = sorted(segments, key=lambda s: (s.stream, s.pool, s.small, s.base or s.address, s.address))
    for (stream, pool, small, begin), held in groupby(
        ordered, key=lambda s: (s.stream, s.pool, s.small, s.base or s.address)
    ):
        chain = list(held)
        pools = allocator.default if pool == 0 else allocator.private.setdefault(pool, new_pools(pool))
        pools.device_allocs += len(chain)
        allocator.driver.reserved_bytes += sum(segment.size_bytes for segment in chain)
        end, virtual = chain[-1].end, None
        if chain[0].base is None:
            allocator.driver.segments += 1
        else:
            granule, total = allocator.settings.granule_bytes(small), allocator.driver.total_bytes
            end = begin + round_up(total + total // 8, granule)
            virtual = VirtualRange(begin, end - begin, granule)
            allocator.driver.ranges.append(range(begin, end))
        blocks = Chain(stream, pools.small if small else pools.large, virtual, begin)
        for until, in_use, mapped in [*_pieces(chain), (end, None, False)]:
            block = blocks.up_to(until, mapped=mapped)
            if block is not None:
                _place(allocator, block, in_use, live)
    return live


@dataclass
class Chain:
    """Linked blocks of one address range, made in order; ``at`` is where the next one begins."""

    stream: int
    pool: BlockPool
    virtual: VirtualRange | None
    at: int
    last: Block | None = None

    def up_to(self, address: int, *, mapped: bool) -> Block | None:
        """The block before ``address``; None if there is nothing between."""
        if address == self.at:
            return None
        block = Block(self.at, address - self.at, self.stream, self.pool, self.virtual)
        block.mapped = mapped
        block.link(self.last, None)
        self.last, self.at = block, address
        return block


def _pieces(segments: Iterable[HeldSegment]) -> Iterator[tuple[int, HeldBlock | None, bool]]:
    """Ends of blocks, what is in use up to there, and whether it is mapped: unmapped gaps, free and used blocks."""
    for segment in segments:
        yield segment.address, None, False
        for held in segment.blocks:
            yield held.address, None, True
            yield held.address + held.size_bytes, held, True
        yield segment.end, None, True


def _place(allocator: Allocator, block: Block, held: HeldBlock | None, live: dict[int, Block]) -> None:
    if held is not None:
        block.allocated, block.requested_bytes = True, held.requested_bytes
        allocator.allocated_bytes += block.size
        live[held.key] = block
    elif block.mapped:
        block.pool.add(block)
    else:
        block.pool.add_unmapped(block)
