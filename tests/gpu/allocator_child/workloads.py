"""What is asked of the allocator, and with which settings."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

from recorder import GIB, MIB, UNIT, Device

RESERVED_CAP, LIVE_CAP = 44 * GIB, 16 * GIB
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


def environment(name: str) -> dict[str, str]:
    """This process's environment with a configuration's allocator settings."""
    rest = {key: value for key, value in os.environ.items() if key != "PYTORCH_ALLOC_CONF"}
    return {**rest, "PYTORCH_CUDA_ALLOC_CONF": SETTINGS[name.split("-", 1)[1]]}
