"""Streams, graphs and memory: of this rank's GPU, or for ``--dry`` of nothing."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

Body = Callable[[], None]
GRANULE_BYTES = 2 << 20


def rounded(size_bytes: int) -> int:
    """What the driver takes for an allocation of its own."""
    return -(-size_bytes // GRANULE_BYTES) * GRANULE_BYTES


class Gpu:
    def __init__(self, rank: int) -> None:
        self.device = torch.device("cuda", rank)
        torch.cuda.set_device(self.device)
        self.name = torch.cuda.get_device_name(self.device)

    def stream(self) -> Any:
        return torch.cuda.Stream(self.device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def sync(self) -> None:
        torch.cuda.synchronize(self.device)

    def settle(self) -> None:
        """Wait, and give back what nothing refers to."""
        self.sync()
        gc.collect()
        torch.cuda.empty_cache()
        self.sync()

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.device)[0])

    def graph(self, stream: Any, body: Body) -> Any:
        """``body`` captured on ``stream``. NCCL's watchdog may query events meanwhile, hence the mode."""
        graph = torch.cuda.CUDAGraph()
        self.sync()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            body()
        self.sync()
        return graph

    def seconds(self, stream: Any, body: Body) -> float:
        """Time that the device takes for ``body``, enqueued on ``stream``."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with self.on(stream):
            begin.record(stream)
            body()
            end.record(stream)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000


class _Replay:
    def __init__(self, body: Body) -> None:
        self.replay = body


class Cpu:
    """The same on a CPU. A graph is its body, run again."""

    name = "cpu"

    def __init__(self, rank: int) -> None:
        self.device = torch.device("cpu")
        self._handles = itertools.count(1 + rank * 1000)

    def stream(self) -> Any:
        return type("Stream", (), {"cuda_stream": next(self._handles)})()

    @contextmanager
    def on(self, stream: Any) -> Iterator[Any]:
        import standins

        before, standins.STREAM = standins.STREAM, stream.cuda_stream
        try:
            yield stream
        finally:
            standins.STREAM = before

    def sync(self) -> None:
        return None

    def settle(self) -> None:
        gc.collect()

    def free_bytes(self) -> int:
        import standins

        return (1 << 30) - standins.allocated_bytes()

    def graph(self, stream: Any, body: Body) -> Any:
        with self.on(stream):
            body()
        return _Replay(body)

    def seconds(self, stream: Any, body: Body) -> float:
        begin = time.perf_counter()
        body()
        return time.perf_counter() - begin
