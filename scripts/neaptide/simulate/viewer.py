"""A run as a pickle that PyTorch's memory viewer opens: the structure of ``torch.cuda.memory._snapshot()``."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from neaptide.disk import write_bytes
from neaptide.simulate.blocks import Block
from neaptide.simulate.driver import Entry
from neaptide.simulate.replay import Run


def snapshot(run: Run) -> dict[str, Any]:
    """Segments at the end of a run and its history; the frame of an entry names its operation."""
    return {
        "segments": sorted(_segments(run), key=lambda segment: int(segment["address"])),
        "device_traces": [[_entry(run, entry) for entry in run.allocator.driver.history or ()]],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": run.settings},
        "external_annotations": [],
    }


def write_snapshot(run: Run, path: Path) -> None:
    write_bytes(path, pickle.dumps(snapshot(run)))


def _entry(run: Run, entry: Entry) -> dict[str, Any]:
    return {
        "action": entry.action, "addr": entry.address, "size": entry.size_bytes, "stream": entry.stream,
        "time_us": entry.step, "frames": _frames(run, entry.step), "pool_id": _pool_id(entry.pool),
    }  # fmt: skip


def _frames(run: Run, step: int) -> list[dict[str, Any]]:
    return [{"filename": run.trace.name, "line": step, "name": str(run.trace.operations[step][0])}]


def _pool_id(pool: int) -> tuple[int, int]:
    return (0, pool) if pool else (0, 0)


def _segments(run: Run) -> Iterator[dict[str, Any]]:
    for head in _heads(run):
        mapped: list[Block] = []
        block: Block | None = head
        while block is not None:
            if block.mapped:
                mapped.append(block)
            elif mapped:
                yield _segment(mapped)
                mapped = []
            block = block.next
        if mapped:
            yield _segment(mapped)


def _heads(run: Run) -> list[Block]:
    """The first block of each chain of neighbours."""
    allocator = run.allocator
    blocks = [*run.live.values(), *(block for _, block in allocator.waiting)]
    for pools in (allocator.default, *allocator.private.values()):
        blocks += [*pools.small.blocks(), *pools.large.blocks()]
    heads: dict[int, Block] = {}
    for block in blocks:
        while block.prev is not None:
            block = block.prev
        heads[id(block)] = block
    return list(heads.values())


def _segment(blocks: list[Block]) -> dict[str, Any]:
    first = blocks[0]
    active = [block for block in blocks if not block.unused]
    return {
        "device": 0, "address": first.address, "total_size": sum(block.size for block in blocks),
        "stream": first.stream, "segment_type": "small" if first.pool.small else "large",
        "segment_pool_id": _pool_id(first.pool.owner), "is_expandable": first.virtual is not None, "frames": [],
        "allocated_size": sum(block.size for block in blocks if block.allocated),
        "active_size": sum(block.size for block in active),
        "requested_size": sum(block.requested_bytes for block in active),
        "blocks": [_block(block) for block in blocks],
    }  # fmt: skip


def _block(block: Block) -> dict[str, Any]:
    state = "active_allocated" if block.allocated else "active_awaiting_free" if block.waiting else "inactive"
    requested = block.requested_bytes if state != "inactive" else 0
    return {
        "address": block.address, "size": block.size, "requested_size": requested, "state": state, "frames": []
    }  # fmt: skip
