"""What PyTorch's allocator keeps of a prefill's logits: the launches of both trees, in the simulator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from neaptide.simulate.ladders import operations_of
from neaptide.simulate.replay import run_trace
from neaptide.simulate.traces import TOTAL_BYTES, Trace

# A second layer asks for the sizes of the first again, and finds the blocks that it left; further ones add nothing.
LAYERS = 2


@dataclass(frozen=True)
class Logits:
    """Bytes that a prefill has of its logits; together they are what the allocator has reserved at its fullest.

    Attributes:
        launch_bytes: the launch of that moment.
        copy_bytes: its FP32 copy.
        previous_bytes: what is still held of the launch before it.
        kept_bytes: cached blocks beyond these, of other sizes.
        failed: launches that found no memory within the limit; an engine ends at the first.
        wanted_bytes: the most that one of these asked for.
    """

    launch_bytes: int
    copy_bytes: int
    previous_bytes: int
    kept_bytes: int
    device_allocs: int
    failed: int
    wanted_bytes: int


@dataclass
class Live:
    """Bytes that are held at a step, by the launch they are of and what they are to it.

    Attributes:
        blocks: how many blocks each launch has cached before it.
        held: bytes by launch and part: its blocks, its logits, its copy.
    """

    blocks: int
    held: dict[tuple[int, int], int] = field(default_factory=dict)

    def of(self, key: int) -> tuple[int, int]:
        """Launch and part of an id, as ``operations_of`` gives them."""
        return divmod(key - 1, self.blocks + 2)

    def parts(self, launch: int) -> tuple[int, int, int]:
        """Logits and copy of a launch, and what is held of earlier ones."""
        previous = sum(size for (other, _), size in self.held.items() if other != launch)
        return self.held.get((launch, self.blocks), 0), self.held.get((launch, self.blocks + 1), 0), previous


def prefill_logits(answer: Mapping[str, Any], limit_bytes: int | None) -> Logits:
    """Logits of the launches that ``vllm_child`` has found.

    Args:
        limit_bytes: most that the allocator can have for them; it releases cached blocks before it goes over it. None
            for no limit.
    """
    blocks = answer["blocks"]
    made = operations_of(answer["chunks"], LAYERS, blocks, holds_previous=bool(answer["holds_previous"]))
    operations = [operation for chunk in made for operation in chunk]
    run = run_trace(Trace("prefill", operations, total_bytes=TOTAL_BYTES), limit_bytes=limit_bytes)
    live, failed = Live(len(blocks)), set(run.failed)
    # Of the fullest steps the one at which the least is cached.
    fullest, parts = (0, 0), (0, 0, 0)
    for step, (action, key, *size) in enumerate(operations):
        if action == "alloc" and step not in failed:
            live.held[live.of(key)] = size[0]
        elif action == "free":
            live.held.pop(live.of(key), None)
        now = live.parts(live.of(key)[0])
        if (run.after[step].reserved_bytes, sum(now)) > fullest:
            fullest, parts = (run.after[step].reserved_bytes, sum(now)), now
    kept = fullest[0] - fullest[1]
    assert kept >= 0, f"{fullest[1]} bytes of logits are held in {fullest[0]} reserved ones"
    without = {live.of(operations[step][1])[0] for step in failed}
    wanted = max((operations[step][2] for step in failed), default=0)
    return Logits(*parts, kept, run.after[-1].device_allocs, len(without), wanted)
