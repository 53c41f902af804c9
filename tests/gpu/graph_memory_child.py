"""One row of ``test_graph_memory``: real CUDA graphs, captured for a profile and then for good.

``python3 graph_memory_child.py CASE VARIANT`` prints it as JSON. Each row has a process of its own, because the driver
keeps what destroyed graphs had.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OVERLAY = Path(__file__).resolve().parents[2] / "overlay" / "vllm"
MIB = 1 << 20
KV_BYTES, REAL_KV_BYTES, BUILDER_BYTES = 24 * MIB, 4096 * MIB, 94 * MIB


@dataclass(frozen=True)
class Case:
    """Graphs of ``sizes`` rows through ``layers`` square matrices; ``first_transient_bytes`` in the first warm-up."""

    sizes: tuple[int, ...]
    hidden: int = 2048
    layers: int = 8
    first_transient_bytes: int = 0


CASES = {
    "64-sizes": Case(tuple(range(512, 0, -8))),
    "64-tiny": Case(tuple(range(64, 0, -1)), hidden=256, layers=40),
    "transient-in-first": Case(tuple(range(512, 0, -8)), first_transient_bytes=1024 * MIB),
    "large-pool": Case((65536, 49152, 32768, 16384, 8192, 4096, 2048, 1024, 512, 256), hidden=4096),
    "one-size": Case((256,)),
}
VARIANTS = ("upstream", "patched")


def overlay(name: str) -> Any:
    """A module of the overlay, from an installed patched vLLM or from its file here."""
    if "vllm" not in sys.modules:
        spec = importlib.util.find_spec("vllm")
        installed = Path(spec.origin).parent if spec and spec.origin else None
        if installed is None or not (installed / "v1/worker/graph_meter.py").exists():
            for package in ("vllm", "vllm.distributed", "vllm.v1", "vllm.v1.worker"):
                stand_in = types.ModuleType(package)
                stand_in.__path__ = [str(OVERLAY.joinpath(*package.split(".")[1:]))]
                sys.modules[package] = stand_in
    return importlib.import_module(name)


class Model:
    """Captures and warms up as a runner does: eagerly first, on the capture's stream, then into one pool."""

    def __init__(self, case: Case) -> None:
        import torch

        self.case, self.torch = case, torch
        torch.manual_seed(6)
        options: dict[str, Any] = {"device": "cuda", "dtype": torch.float16}
        scale = case.hidden**-0.5
        self.weights = [torch.randn(case.hidden, case.hidden, **options) * scale for _ in range(case.layers)]
        self.inputs = torch.randn(case.sizes[0], case.hidden, **options)
        self.outputs = torch.empty_like(self.inputs)
        self.graphs: dict[int, Any] = {}

    def forward(self, size: int) -> None:
        rows = self.inputs[:size]
        for weight in self.weights:
            rows = self.torch.relu(rows @ weight)
        self.outputs[:size].copy_(rows)

    def warm_up(self, size: int) -> None:
        if size == self.case.sizes[0] and self.case.first_transient_bytes:
            self.torch.empty(self.case.first_transient_bytes, dtype=self.torch.uint8, device="cuda").zero_()
        self.forward(size)
        self.torch.cuda.synchronize()

    def capture(self, size: int, pool: Any) -> None:
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph, pool=pool, stream=self.torch.cuda.current_stream()):
            self.forward(size)
        self.graphs[size] = graph

    def wrong_rows(self) -> int:
        """Rows of the replays that differ from an eager run by more than rounding."""
        wrong = 0
        for size, graph in self.graphs.items():
            self.outputs.zero_()
            graph.replay()
            replayed = self.outputs[:size].clone()
            self.forward(size)
            close = self.torch.isclose(replayed.float(), self.outputs[:size].float(), rtol=1e-2, atol=1e-2)
            wrong += int((~close.all(dim=1)).sum())
        return wrong


def allocate(kv_bytes: int) -> list[Any]:
    """A KV cache and what builders allocate with it, as 47 buffers of 2 MiB."""
    import torch

    sizes = [kv_bytes] + [2 * MIB] * (BUILDER_BYTES // (2 * MIB))
    return [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]


@contextmanager
def on_stream(stream: Any) -> Iterator[None]:
    import torch

    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield


def free_bytes() -> int:
    import torch

    torch.cuda.synchronize()
    return int(torch.cuda.mem_get_info()[0])


def release() -> None:
    import torch

    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()


def patched(case: Case) -> dict[str, Any]:
    """The meter's profile, then the real capture on its streams."""
    import torch

    meters, memory = overlay("vllm.v1.worker.graph_meter"), overlay("vllm.v1.worker.graph_memory")
    streams = overlay("vllm.distributed.capture_streams")
    device, model = torch.device("cuda"), Model(case)
    model.forward(case.sizes[0])
    reader = meters.AcceleratorMemory()
    with meters.measuring(meters.CaptureMeter(reader)) as meter, streams.capture_pass():
        caches = allocate(KV_BYTES)
        meter.cache_stands(meters.storage_bytes(caches[:1]))
        pool = torch.cuda.graph_pool_handle()
        with on_stream(streams.capture_stream(device)):
            for size in meters.graphs_to_profile(case.sizes, 2):
                model.warm_up(size)
                meters.before_capture()
                model.capture(size, pool)
                meters.after_capture()
        meters.captures_done()
        model.graphs.clear()
        meters.graphs_destroyed()
        caches.clear()
        meters.profile_torn_down()
    profile = meter.profile()
    assert isinstance(profile, memory.GraphProfile)

    caches = allocate(REAL_KV_BYTES)
    before = reader.reading()
    reader.reset_peaks()
    pool = torch.cuda.graph_pool_handle()
    with streams.capture_pass(), on_stream(streams.capture_stream(device)):
        for size in case.sizes:
            model.warm_up(size)
            model.capture(size, pool)
    peaks = reader.peaks()
    after = reader.reading()
    return {
        "samples": len(profile.series[0].growths),
        "estimate_bytes": profile.graph_bytes,
        "actual_bytes": before.free_bytes - after.free_bytes,
        "planned_bytes": profile.standing_bytes + profile.graph_bytes + REAL_KV_BYTES,
        "taken_bytes": profile.start.free_bytes - after.free_bytes,
        "builder_bytes": profile.builder_bytes,
        "residue_bytes": profile.residue_bytes,
        "headroom_bytes": profile.transient_bytes,
        "needed_headroom_bytes": max(0, peaks.allocated_bytes - after.allocated_bytes),
        "wrong_rows": model.wrong_rows(),
    }


def upstream(case: Case) -> dict[str, Any]:
    """The same on a new stream each time, with the differences of free memory that upstream takes."""
    import torch

    model = Model(case)
    model.forward(case.sizes[0])

    def capture(sizes: tuple[int, ...]) -> tuple[int, list[int]]:
        release()
        start, samples, pool = free_bytes(), [], torch.cuda.graph_pool_handle()
        with on_stream(torch.cuda.Stream()):
            for size in sizes:
                model.warm_up(size)
                before = free_bytes()
                model.capture(size, pool)
                samples.append(before - free_bytes())
        return start - free_bytes(), samples

    caches = allocate(KV_BYTES)
    measured, samples = capture(case.sizes[:2])
    model.graphs.clear()
    caches.clear()
    release()
    later = max(samples[1], MIB) if len(samples) > 1 else 0
    estimate = max(0, measured - sum(samples) + samples[0] + (len(case.sizes) - 1) * later)
    caches += allocate(REAL_KV_BYTES)
    actual, _ = capture(case.sizes)
    return {
        "samples": len(samples), "estimate_bytes": estimate, "actual_bytes": actual, "wrong_rows": model.wrong_rows()
    }  # fmt: skip


if __name__ == "__main__":
    name, variant = sys.argv[1:]
    result = {"patched": patched, "upstream": upstream}[variant](CASES[name])
    print(json.dumps({"case": name, "variant": variant, **result}))
