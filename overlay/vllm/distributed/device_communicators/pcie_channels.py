# SPDX-License-Identifier: Apache-2.0
"""A b12x pool as a group of vLLM uses it: one channel for eager work and all graphs, and plans made ahead of captures.

b12x wants a prepared plan for each kind of call on a channel. One is made at the first eager call of its kind, which
vLLM's warm-up makes before it captures; a capture of a call that was never made eagerly is vLLM's own. All of
this follows from the calls alone, which are the same on all ranks.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch.distributed import ProcessGroup
from vllm.distributed.capture_scopes import capture_name, in_disposable_capture, register_capture_participant
from vllm.logger import init_logger
from vllm.utils.torch_utils import current_stream

logger = init_logger(__name__)

EAGER = "eager"
# Graphs that are never in flight together share a channel. A worker enqueues eager work, the segments of PIECEWISE
# graphs and the FULL graphs of target and draft on one stream, in one order on all ranks; micro-batches are refused.
REPLAY_GROUP = "model"
_requests = itertools.count()


def packed(tensor: torch.Tensor) -> torch.Tensor:
    """The elements one behind the other, with the strides that say so; copied only where they are not.

    Torch takes a tensor of one row as contiguous whatever the stride of its rows; b12x compares every stride.
    """
    return tensor.contiguous().view(-1).view(tensor.shape)


@lru_cache(maxsize=1)
def _session(device: torch.device) -> Any:
    """One for all plans of a process: when a session has prepared, it drops kernels that none of its plans has."""
    from b12x.preparation import PreparationSession, detect_device

    return PreparationSession(device=detect_device(device), autotune=False, compile_workers=0)


def prepared_plan(runtime: Any, surface: str, call: dict[str, Any], bind: Callable[[Any], object] | None = None) -> Any:
    """A plan of calls like this one on a live channel, its kernels compiled; nothing is launched, no peer waited for.

    Args:
        surface: b12x's name of the operation.
        bind: called with the state of the plan, where the operation has something to bind.
    """
    from b12x.comm.pcie import plan, query_from_runtime
    from b12x.preparation import PreparedCall

    made = plan(query_from_runtime(runtime, surface=surface, call=call), runtime=runtime)

    def prepare(state: Any) -> Any:
        if bind is not None:
            bind(state)
        return PreparedCall(run=lambda: None)

    request = made.request(name=f"vllm-pcie-{next(_requests)}", prepare_call=prepare)
    _session(torch.device(runtime.device)).prepare((request,), autotune=False)
    return made


class PooledChannel:
    """The one channel of a pool, a participant of every capture; see ``CaptureParticipant``.

    Args:
        pool: of b12x with neaptide's channel pool, distributed, without channels.
        group: the ranks that share it; of any backend.
    """

    def __init__(self, pool: Any, group: ProcessGroup, device: torch.device) -> None:
        self.pool, self.group, self.device = pool, group, device
        pool.prepare_channels((EAGER,), replay_group=REPLAY_GROUP)
        self.channel = pool._logical_channels[EAGER]
        self._thread = threading.get_ident()
        # The first to ask vLLM gives the process a stream of its own; PyNccl's warm-up, where it has a library.
        current_stream()
        self._stream = torch.cuda.current_stream(device).cuda_stream
        self._capturing_on: list[int] = []
        self._names: dict[str, int] = {}
        self._plans: dict[object, Any] = {}
        self._settled = False
        self._saved: tuple[Any, dict[str, int]] | None = None

    def join_captures(self) -> None:
        """Take part in every later capture; once all ranks have their channel."""
        register_capture_participant(self, self.group)

    def here(self) -> bool:
        """Whether the current stream is the channel's: the capture's within one, else the one that it was made on.

        What runs beside it, on a stream of its own, would not be ordered with the channel's work.
        """
        if threading.get_ident() != self._thread:
            logger.warning_once("PCIe collectives: calls of a second thread are vLLM's own.")
            return False
        current = torch.cuda.current_stream(self.device).cuda_stream
        if self._capturing_on:
            return current == self._capturing_on[-1]
        if current != self._stream:
            logger.warning_once("PCIe collectives: calls on a second stream are vLLM's own.")
        return current == self._stream

    def plan_of(
        self, surface: str, kind: object, call: dict[str, Any], bind: Callable[[Any], object] | None = None
    ) -> Any | None:
        """The plan of a kind of call; None for one that was not made before its capture, or by the end of captures.

        Then the engine serves: nothing is compiled while requests wait, where it could fail on one rank alone.
        """
        key = (surface, kind)
        found = self._plans.get(key)
        if found is None and not self._settled and not torch.cuda.is_current_stream_capturing():
            found = self._plans[key] = prepared_plan(self.channel, surface, call, bind)
        return found

    @contextmanager
    def capture(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """Warm-up and captures on ``stream`` use the channel, under an id of this capture; collective."""
        name = capture_name()
        self._names[name] = count = self._names.get(name, 0) + 1
        with self.pool.capture(stream, channel_id=f"{name}/{count}", replay_group=REPLAY_GROUP):
            self._capturing_on.append(stream.cuda_stream)
            try:
                yield
            finally:
                self._capturing_on.pop()
        if not in_disposable_capture():
            self._settled = True

    def checkpoint(self) -> None:
        self._saved = self.pool.checkpoint_channels(), dict(self._names)

    def rollback(self) -> None:
        if self._saved is None:
            raise RuntimeError("a rollback of PCIe channels without a checkpoint")
        saved, self._names = self._saved
        self.pool.rollback_channels(saved)
