"""A pool of b12x channels as a participant of vLLM's captures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from families import HEADS, QUERY_DIM, ROWS, Family
from operations import gather
from worker import Context


class PoolParticipant:
    """One channel for eager work, and one for each capture; see ``CaptureParticipant`` in vLLM's overlay."""

    def __init__(self, context: Context, family: Family) -> None:
        self._pool = family.pool(context)
        self._pool.pool.prepare_channels(("eager",))
        self.operation = gather(context, ROWS, HEADS, QUERY_DIM, torch.bfloat16)
        self._captures, self._channel = 0, None
        self._saved: tuple[Any, int] | None = None

    def channels(self) -> int:
        return len(self._pool.pool._all_channels)

    @contextmanager
    def capture(self, stream: torch.cuda.Stream) -> Iterator[None]:
        # Ids are alike on the ranks, which capture the same number of times.
        self._captures += 1
        with self._pool.pool.capture(stream, channel_id=f"capture-{self._captures}") as channel:
            self._pool.ready(channel, [self.operation])
            self._channel = channel
            try:
                yield
            finally:
                self._channel = None

    def run(self) -> None:
        """The operation, on the channel of the capture that is open."""
        self._pool.run(self._channel, self.operation)

    def checkpoint(self) -> None:
        self._saved = self._pool.pool.checkpoint_channels(), self._captures

    def rollback(self) -> None:
        if self._saved is None:
            raise RuntimeError("rollback without a checkpoint")
        self._pool.forget()
        checkpoint, self._captures = self._saved
        self._pool.pool.rollback_channels(checkpoint)
