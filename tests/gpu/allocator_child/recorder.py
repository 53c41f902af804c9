"""Operations on a device's allocator, and what it says after each."""

from __future__ import annotations

from typing import Any

MIB, GIB = 1 << 20, 1 << 30
UNIT = 512
Operation = list[Any]


class Device:
    """Runs operations on the current device and writes down what the allocator says after each."""

    def __init__(self, torch: Any, *, expandable: bool) -> None:
        self.torch, self.expandable = torch, expandable
        self.tensors: dict[int, Any] = {}
        self.owners: dict[int, tuple[int, int]] = {}
        self.graphs: dict[int, Any] = {}
        self.operations: list[Operation] = []
        self.addresses: list[int] = []
        self.failed: list[int] = []
        self.counters: list[tuple[int, int, int, int]] = []
        self.live_bytes = 0
        torch.cuda.init()
        self.total_bytes = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.memory._record_memory_history(enabled="all", context=None, stacks="python", max_entries=1 << 20)
        self.streams = [torch.cuda.default_stream(), *(torch.cuda.Stream() for _ in range(3))]
        self.fill = torch.empty(UNIT, dtype=torch.uint8, device="cuda").zero_()
        # Random generators hold two small tensors while any graph lives; this one lives throughout.
        self.anchor = self._empty_graph()
        self.capturing: tuple[int, int, Any] | None = None
        self.setup_events = len(self.history())

    def _empty_graph(self) -> Any:
        graph = self.torch.cuda.CUDAGraph()
        self.torch.cuda.synchronize()
        with self.torch.cuda.stream(self.streams[3]):
            graph.capture_begin(capture_error_mode="relaxed")
            self.fill.zero_()
            graph.capture_end()
        return graph

    def counts(self) -> tuple[int, int, int, int]:
        """Reserved bytes, allocated bytes, segments, device allocations so far."""
        stats = self.torch._C._cuda_memoryStats(0)
        return (
            stats["reserved_bytes"]["all"]["current"],
            stats["allocated_bytes"]["all"]["current"],
            stats["segment"]["all"]["current"],
            stats["num_device_alloc"],
        )

    def _done(self, operation: Operation) -> None:
        self.operations.append(operation)
        self.counters.append(self.counts())

    def reserved_bytes(self) -> int:
        return self.counters[-1][0] if self.counters else 0

    def alloc(self, key: int, size_bytes: int, stream: int = 0) -> bool:
        """False if the allocator ran out of its limit."""
        torch = self.torch
        capturing = self.capturing
        pool = capturing[1] if capturing and stream == 3 else 0
        try:
            with torch.cuda.stream(self.streams[stream]):
                tensor = torch.empty(size_bytes, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            self.failed.append(len(self.operations))
        else:
            self.tensors[key], self.owners[key] = tensor, (pool, stream)
            self.live_bytes += size_bytes
            self.addresses.append(tensor.data_ptr() // UNIT)
            del tensor
        self._done(["alloc", key, size_bytes, stream, pool])
        return key in self.tensors

    def free(self, key: int, *, used_elsewhere: bool = False) -> None:
        """Frees a tensor; if another stream used it, the allocator looks at the next request whether that is done."""
        tensor = self.tensors.pop(key)
        self.live_bytes -= tensor.numel()
        if used_elsewhere:
            tensor.record_stream(self.streams[(self.owners[key][1] + 1) % 3])
        del tensor
        if used_elsewhere:
            self.torch.cuda.synchronize()
        self._done(["free", key, 0] if used_elsewhere else ["free", key])

    def empty_cache(self) -> None:
        self.torch.cuda.empty_cache()
        self._done(["empty_cache"])

    def limit(self, limit_bytes: int) -> None:
        """Lets the allocator reserve that much; 0 for the whole device."""
        fraction = limit_bytes / self.total_bytes if limit_bytes else 1.0
        self.torch.cuda.set_per_process_memory_fraction(fraction)
        self._done(["limit", int(fraction * self.total_bytes)])

    def graph_begin(self, graph: int, pool: int, handle: Any) -> None:
        """Begins a capture on stream 3 into a pool; allocations of that stream go there until it ends."""
        self.torch.cuda.synchronize()
        self.graphs[graph] = self.torch.cuda.CUDAGraph()
        context = self.torch.cuda.stream(self.streams[3])
        context.__enter__()
        self.graphs[graph].capture_begin(pool=handle, capture_error_mode="relaxed")
        self.fill.zero_()
        self.capturing = (graph, pool, context)
        self._done(["graph_begin", graph, 3, pool])

    def graph_end(self) -> None:
        assert self.capturing is not None
        graph, _, context = self.capturing
        self.graphs[graph].capture_end()
        context.__exit__(None, None, None)
        self.capturing = None
        self._done(["graph_end", graph])

    def graph_free(self, graph: int) -> None:
        del self.graphs[graph]
        self._done(["graph_free", graph])

    def history(self) -> list[dict[str, Any]]:
        """The allocator's own events, oldest first."""
        return list(self.torch.cuda.memory._snapshot()["device_traces"][0])
