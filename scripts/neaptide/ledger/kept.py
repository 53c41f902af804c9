"""What PyTorch's allocator keeps of a prefill's logits: the launches of both trees, in the simulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from neaptide.simulate.replay import run_trace
from neaptide.simulate.traces import TOTAL_BYTES, Operation, Trace

# A second layer asks for the sizes of the first again, and finds the blocks that it left; further ones add nothing.
LAYERS = 2


@dataclass(frozen=True)
class Logits:
    """Bytes that a prefill has of its logits; together they are what the allocator has reserved at its fullest.

    Attributes:
        launch_bytes: the largest launch.
        copy_bytes: its FP32 copy.
        previous_bytes: what is still held of the launch before it.
        kept_bytes: cached blocks beyond these, of other sizes.
        failed: launches that found no memory within the limit.
    """

    launch_bytes: int
    copy_bytes: int
    previous_bytes: int
    kept_bytes: int
    device_allocs: int
    failed: int


def prefill_logits(answer: Mapping[str, Any], limit_bytes: int | None) -> Logits:
    """Logits of the launches that ``vllm_child`` has found.

    Args:
        limit_bytes: most that the allocator can have for them; it releases cached blocks before it goes over it. None
            for no limit.
    """
    chunks, holds = answer["chunks"], bool(answer["holds_previous"])
    operations = ladder(chunks, answer["blocks"], holds_previous=holds)
    run = run_trace(Trace("prefill", operations, total_bytes=TOTAL_BYTES), limit_bytes=limit_bytes)
    fullest = max(after.reserved_bytes for after in run.after)
    launches = [launch for chunk in chunks for launch in chunk]
    launch, copy = max(logits for logits, _ in launches), max(copied for _, copied in launches)
    previous = (copy or launch) if holds and len(launches) * LAYERS > 1 else 0
    kept = fullest - launch - copy - previous
    return Logits(launch, copy, previous, kept, run.after[-1].device_allocs, len(run.failed))


def ladder(
    chunks: Sequence[Sequence[Sequence[int]]], blocks: Sequence[int], *, holds_previous: bool
) -> list[Operation]:
    """Allocations and frees of a prefill, in its order.

    BF16 logits end with their copy. A loop that lets go of nothing has a launch's logits until the next launch has its
    own.

    Args:
        chunks: logits and copy of each launch of each chunk, in bytes.
        blocks: what is taken and given back before each launch, so that blocks of these sizes are cached.
    """
    operations: list[Operation] = []
    held, key = 0, 0
    for chunk in chunks:
        for _ in range(LAYERS):
            for logits_bytes, copy_bytes in chunk:
                if held and not holds_previous:
                    operations.append(["free", held])
                    held = 0
                cached = range(key + 1, key + 1 + len(blocks))
                operations += [["alloc", own, size] for own, size in zip(cached, blocks, strict=True)]
                operations += [["free", own] for own in cached]
                key += len(blocks) + 1
                operations.append(["alloc", key, logits_bytes])
                if copy_bytes:
                    operations += [["alloc", key + 1, copy_bytes], ["free", key]]
                    key += 1
                if held:
                    operations.append(["free", held])
                held = key
    return operations
