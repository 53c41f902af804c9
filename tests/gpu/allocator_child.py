"""What PyTorch's CUDA caching allocator does, operation by operation, for the simulator to be compared with.

``python3 allocator_child.py OUTDIR`` runs every configuration in a process of its own and writes one ``NAME.json.xz``
each; ``python3 allocator_child.py OUTDIR NAME`` runs one. Needs torch and a CUDA device, nothing else: no neaptide, no
vllm. At most 60 GiB of device memory are taken. The file holds the operations, the allocator's counters after each as
deltas, the address of each allocation, and the segment events of the allocator's own history.
"""

from __future__ import annotations

import gc
import json
import lzma
import os
import random
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

MIB, GIB = 1 << 20, 1 << 30
UNIT = 512
RESERVED_CAP, LIVE_CAP = 44 * GIB, 16 * GIB
SEGMENT_EVENTS = ("segment_alloc", "segment_free", "segment_map", "segment_unmap")
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


@dataclass
class Merged:
    """Operations with what the allocator was asked for beside them, and its segment events.

    Attributes:
        pointers: number of each stream, by its pointer.
        unforeseen: indices of the requests that were no operation; their ids are negative, they have no counters.
        segment_events: each with the number of allocations, frees and failures before it.
    """

    pointers: dict[int, int]
    operations: list[Operation] = field(default_factory=list)
    unforeseen: list[int] = field(default_factory=list)
    segment_events: list[list[Any]] = field(default_factory=list)
    requests: int = 0
    extra: dict[int, int] = field(default_factory=dict)

    def note(self, event: dict[str, Any]) -> bool:
        """Keeps a segment event; True for an event that answers a request."""
        if event["action"] in SEGMENT_EVENTS:
            address, stream = event["addr"] // UNIT, self.pointers[event["stream"]]
            self.segment_events.append([self.requests, event["action"], address, event["size"], stream])
        answers = event["action"] in ("alloc", "free_requested", "oom")
        self.requests += answers
        return answers

    def add_unforeseen(self, event: dict[str, Any]) -> None:
        self.unforeseen.append(len(self.operations))
        if event["action"] == "alloc":
            self.extra[event["addr"]] = key = -len(self.extra) - 1
            self.operations.append(["alloc", key, event["size"], self.pointers[event["stream"]], 0])
        else:
            self.operations.append(["free", self.extra.pop(event["addr"])])


def merged(device: Device) -> Merged:
    """The history beside the operations; what was asked for before the first of them comes first."""
    out = Merged({stream.cuda_stream: index for index, stream in enumerate(device.streams)})
    events, addresses, where = iter(device.history()), iter(device.addresses), {}
    for event in islice(events, device.setup_events):
        if out.note(event):
            out.add_unforeseen(event)
    for step, operation in enumerate(device.operations):
        awaited = {"alloc": "alloc", "free": "free_requested"}.get(operation[0], "")
        if operation[0] == "alloc" and step in device.failed:
            awaited = "oom"
        elif operation[0] == "alloc":
            where[operation[1]] = next(addresses) * UNIT
        for event in events if awaited else ():
            if not out.note(event):
                continue
            if event["action"] == awaited and event.get("addr") == where.get(operation[1]):
                break
            out.add_unforeseen(event)
        out.operations.append(operation)
    for event in events:
        if out.note(event):
            out.add_unforeseen(event)
    return out


def deltas(values: list[int]) -> list[int]:
    return [value - before for before, value in zip([0, *values], values, strict=False)]


def report(device: Device, name: str, settings: str) -> dict[str, Any]:
    """What is written for a configuration; bytes of ``allocated`` and addresses count units of 512."""
    reserved, allocated, segments, mallocs = (list(column) for column in zip(*device.counters, strict=True))
    torch, both = device.torch, merged(device)
    return {
        "schema_version": 1, "name": name, "allocator_settings": settings, "torch": torch.__version__,
        "device": torch.cuda.get_device_name(), "total_bytes": device.total_bytes, "unit_bytes": UNIT,
        "operations": both.operations, "unforeseen": both.unforeseen, "segment_events": both.segment_events,
        "failed": device.failed, "addresses": deltas(device.addresses),
        "reserved_bytes": deltas(reserved), "allocated_units": deltas([value // UNIT for value in allocated]),
        "segments": deltas(segments), "device_allocs": deltas(mallocs),
    }  # fmt: skip


EDGES = (UNIT, MIB, 2 * MIB, 10 * MIB, 20 * MIB, 64 * MIB, 84 * MIB)


def some_size(chance: random.Random, most: int = 256 * MIB) -> int:
    """Bytes: log-uniform, powers of two, and sizes one byte or one unit beside the allocator's own limits."""
    kind = chance.random()
    if kind < 0.5:
        return min(most, int(UNIT * (most / UNIT) ** chance.random()))
    if kind < 0.65:
        return 1 << chance.randint(9, most.bit_length() - 1)
    near = 1 << chance.randint(9, most.bit_length() - 2) if kind < 0.85 else chance.choice(EDGES)
    return max(1, near + chance.choice((-UNIT, -1, 1, UNIT)))


def some_step(device: Device, chance: random.Random, key: int, streams: tuple[int, ...], live: int, most: int) -> None:
    """One allocation or one free, so that about ``live`` allocations stay."""
    room = live - len(device.tensors)
    if device.tensors and (device.live_bytes > LIVE_CAP or chance.random() > 0.5 + 0.4 * room / live):
        key = chance.choice(list(device.tensors))
        device.free(key, used_elsewhere=device.capturing is None and chance.random() < 0.05)
    else:
        device.alloc(key, some_size(chance, most), chance.choice(streams))


def random_steps(device: Device, steps: int = 10_000) -> None:
    """Mixed operations on three streams: unbounded, then under a limit that runs out, then unbounded again."""
    chance = random.Random(20260)
    for step in range(steps):
        if step == steps * 5 // 10:
            device.limit(7 * GIB)
        elif step == steps * 8 // 10:
            device.limit(0)
        elif chance.random() < 0.0015 or device.reserved_bytes() > RESERVED_CAP:
            device.empty_cache()
        else:
            some_step(device, chance, step, (0, 0, 0, 1, 2), 450, 256 * MIB)


def end_graph(device: Device, graph: int, pools: dict[int, tuple[Any, set[int]]]) -> None:
    """Destroys a graph.

    With expandable segments, its pool's blocks go before the pool's last graph: torch 2.11 counts requests that mapped
    memory against ranges that it unmapped, and may forget a pool that still has blocks in use.
    """
    pool, graphs = next((pool, graphs) for pool, (_, graphs) in pools.items() if graph in graphs)
    graphs.discard(graph)
    if not graphs and device.expandable:
        for key in [key for key, (owner, _) in device.owners.items() if owner == pool and key in device.tensors]:
            device.free(key)
    device.graph_free(graph)


def graph_steps(device: Device, steps: int = 5_000) -> None:
    """Captures into shared and own pools, frees in and out of them, graphs that go before and after their blocks."""
    chance = random.Random(20261)
    pools: dict[int, tuple[Any, set[int]]] = {}
    for step in range(steps):
        kind = chance.random()
        if device.capturing is None and kind < 0.02:
            shared = [pool for pool, (_, graphs) in pools.items() if graphs]
            pool = chance.choice(shared) if shared and chance.random() < 0.5 else step + 1
            handle, graphs = pools.setdefault(pool, (device.torch.cuda.graph_pool_handle(), set()))
            graphs.add(step)
            device.graph_begin(step, pool, handle)
        elif device.capturing is not None and kind < 0.03:
            device.graph_end()
        elif device.capturing is None and device.graphs and kind < 0.035:
            graph = chance.choice(list(device.graphs))
            end_graph(device, graph, pools)
        elif device.capturing is None and kind < 0.04:
            device.empty_cache()
        else:
            some_step(device, chance, step, (3, 3, 3, 0, 1) if device.capturing else (0, 3, 1), 250, 96 * MIB)


BUDGET_ELEMENTS, HEADS_ROWS, COLUMNS = 512 * MIB // 4, 4, 256
LADDERS = ((8192, 98304, 2, 102400), (4608, 184320, 2, 204800), (3072, 196608, 2, 204800), (3072, 522240, 1, 524288))


def up(value: int, step: int) -> int:
    return -(-value // step) * step


def launches(policy: str, chunk: int, end: int, total: int, fixed: int) -> Iterator[int]:
    """Bytes of the logits of each launch of the chunk that ends at ``end`` (32 heads, FP32, budget 512 MiB)."""
    full, step = up(chunk, HEADS_ROWS), HEADS_ROWS
    if policy == "upstream":
        rows, elements = max(1, BUDGET_ELEMENTS // end), 0
    else:
        width = up(fixed if policy == "fixed-width" else end, COLUMNS)
        elements = BUDGET_ELEMENTS
        if policy == "constant-bytes":
            elements = min(elements // (full * COLUMNS) * full * COLUMNS, full * up(total, COLUMNS))
        rows = max(step, elements // width // step * step)
    for begin in range(0, chunk, rows):
        taken = up(min(rows, chunk - begin), step)
        columns = up(end, COLUMNS)
        if policy == "fixed-width":
            columns = width
        elif policy == "constant-bytes":
            columns = max(columns, elements // taken // COLUMNS * COLUMNS)
        yield taken * columns * 4


def ladder_steps(device: Device) -> None:
    """The prefill ladders of the measured table under each policy; each begins with an empty cache."""
    key = 0

    def alloc(size_bytes: int) -> int:
        nonlocal key
        key += 1
        device.alloc(key, size_bytes)
        return key

    for chunk, total, layers, fixed in LADDERS:
        for policy in ("upstream", "constant-bytes", "fixed-width"):
            device.empty_cache()
            previous = 0
            for end in range(chunk, total + 1, chunk):
                others = [alloc(size) for size in (chunk * 4, chunk * 4, chunk * 2048 * 4)]
                for _ in range(layers):
                    for size in launches(policy, chunk, end, total, fixed):
                        if previous and policy == "constant-bytes":
                            device.free(previous)
                            previous = 0
                        logits = alloc(size)
                        if previous:
                            device.free(previous)
                        previous = logits
                for other in others:
                    device.free(other)
            device.free(previous)


SETTINGS = {
    "default": "", "expandable": "expandable_segments:True", "max-split": "max_split_size_mb:64",
    "roundup": "roundup_power2_divisions:8",
}  # fmt: skip
WORKLOADS: dict[str, Callable[[Device], None]] = {
    "random": random_steps, "ladders": ladder_steps, "graphs": graph_steps,
}  # fmt: skip
NAMES = (
    *(f"random-{settings}" for settings in SETTINGS),
    *(f"{workload}-{settings}" for workload in ("ladders", "graphs") for settings in ("default", "expandable")),
)


def run_one(out: Path, name: str) -> int:
    """Runs one configuration in this process, which has its settings in the environment."""
    import torch

    warnings.simplefilter("ignore")
    workload, settings = name.split("-", 1)
    device = Device(torch, expandable=settings == "expandable")
    gc.disable()
    WORKLOADS[workload](device)
    written = json.dumps(report(device, name, SETTINGS[settings]), separators=(",", ":")).encode()
    packed = lzma.compress(written, preset=9)
    (out / f"{name}.json.xz").write_bytes(packed)
    most = max(counts[0] for counts in device.counters)
    print(f"{name}: {len(device.operations)} steps, {len(device.failed)} failed, {most // MIB} MiB, {len(packed)} B")
    return 0


def environment(name: str) -> dict[str, str]:
    """This process's environment with a configuration's allocator settings."""
    rest = {key: value for key, value in os.environ.items() if key != "PYTORCH_ALLOC_CONF"}
    return {**rest, "PYTORCH_CUDA_ALLOC_CONF": SETTINGS[name.split("-", 1)[1]]}


def run_all(out: Path, names: tuple[str, ...] = NAMES) -> int:
    """Runs configurations in turn.

    Returns:
        0, or 1 if one of them failed.
    """
    out.mkdir(parents=True, exist_ok=True)
    worst = 0
    for name in names:
        done = subprocess.run([sys.executable, __file__, str(out), name], env=environment(name), check=False)
        worst = max(worst, int(done.returncode != 0))
    return worst


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    raise SystemExit(run_one(folder, sys.argv[2]) if len(sys.argv) > 2 else run_all(folder))
