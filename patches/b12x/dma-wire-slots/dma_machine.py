"""Ranks of a DMA ring on a CPU: upstream's real constructor and per-call code, on addresses without memory.

A rank's kernels and copies are recorded with the address ranges they read and write. Running the records of all
ranks against each other moves labels in place of data: which ranks' inputs a range holds the sum of, for which
elements. A label must be read back exactly where a peer put it, and every range must lie inside one region.
"""

from __future__ import annotations

import contextlib
import importlib
import random
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from dma_records import DEVICE, Kernels, Label, Op, Region, Stream, Tensor

PACKAGE = "b12x" if find_spec("b12x") else "sparkinfer"
FLAGS, FLAG = 32 * 1024, 128
RANK, SLAB, STAGE, COUNTERS, TENSORS = 1 << 48, 0, 1 << 44, 2 << 44, 3 << 44


def module(name: str) -> ModuleType:
    return importlib.import_module(f"{PACKAGE}.comm.pcie.{name}")


def has_module(name: str) -> bool:
    return find_spec(f"{PACKAGE}.comm.pcie.{name}") is not None


class Machine:
    """The ranks of one ring. ``slab_bytes`` and ``stage_bytes`` are what each rank allocated."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, mode: str, max_bytes: int, world: int) -> None:
        self.prepare(monkeypatch, world)
        self.rings = [self._build(rank, mode, max_bytes) for rank in range(world)]
        for rank in range(world):
            self._map(rank)

    def prepare(self, monkeypatch: pytest.MonkeyPatch, world: int) -> None:
        """Stand-ins for the device; no rank's ring yet."""
        self.world, self.rank = world, 0
        self.slab_bytes: list[int] = []
        self.stage_bytes: list[int] = []
        self.allocated = 0
        self.regions: list[Region] = []
        self.waited: Counter[int] = Counter()
        self.flags: Counter[int] = Counter()
        self.memory: defaultdict[Region, dict[int, tuple[int, Label]]] = defaultdict(dict)
        self.itemsizes: dict[int, int] = {}
        self.kernels = [Kernels() for _ in range(world)]
        self._stand_in(monkeypatch, module("pcie_dma"))

    # Building

    def _stand_in(self, monkeypatch: pytest.MonkeyPatch, dma: ModuleType) -> None:
        oneshot = module("pcie_oneshot")
        cuda = SimpleNamespace(
            Stream=Stream, Event=Stream, stream=contextlib.nullcontext, device=contextlib.nullcontext,
            current_stream=lambda device=None: Stream(), set_device=lambda device: None,
            is_current_stream_capturing=lambda: False, current_device=lambda: 0,
        )  # fmt: skip

        class Torch:
            zeros = staticmethod(lambda n, dtype, device: self._allocate(COUNTERS, n, dtype))
            empty = staticmethod(lambda n, dtype, device: self._allocate(STAGE, n, dtype))

            def __getattr__(self, name: str) -> Any:
                return getattr(torch, name)

        proxy = Torch()
        proxy.cuda = cuda  # type: ignore[attr-defined]
        ranks = SimpleNamespace(
            get_rank=lambda group: self.rank, get_world_size=lambda group: self.world, barrier=lambda **_: None
        )
        monkeypatch.setattr(dma, "torch", proxy)
        monkeypatch.setattr(dma, "dist", ranks)
        monkeypatch.setattr(dma, "CudaRTLibrary", lambda: SimpleNamespace(cudaSetDevice=lambda index: None))
        if hasattr(dma, "_load_kernels"):
            monkeypatch.setattr(dma, "_load_kernels", lambda *_: self.kernels[self.rank])
        monkeypatch.setattr(oneshot, "_broadcast_gather_object", lambda local, group: [local] * self.world)
        monkeypatch.setattr(oneshot.PCIeOneshotAllReduce, "_allocate_shared_buffer", staticmethod(self._share))

    def _share(self, group: object, size: int, **_: object) -> Any:
        self.slab_bytes.append(size)
        return SimpleNamespace(peer_ptrs=[self._at(rank, SLAB) for rank in range(self.world)], remote_ptrs=[])

    def _allocate(self, area: int, count: int, dtype: torch.dtype) -> Tensor:
        size = count * dtype.itemsize
        self.allocated += size
        if area == STAGE:
            self.stage_bytes.append(size)
            return Tensor(self._at(self.rank, STAGE), count, dtype)
        used = sum(r.kind == "counters" and r.rank == self.rank for r in self.regions)
        start = self._at(self.rank, COUNTERS) + used * (1 << 20)
        self._add(Region("counters", self.rank, used, start, size))
        return Tensor(start, count, dtype)

    def _build(self, rank: int, mode: str, max_bytes: int) -> Any:
        self.rank = rank
        return module("pcie_dma").PCIeDmaAllReduce(
            exchange_group=object(), device=DEVICE, max_bytes=max_bytes, fp8=mode, ext_module=self.kernels[rank]
        )

    @staticmethod
    def _at(rank: int, area: int) -> int:
        return RANK * (rank + 1) + area

    def _map(self, rank: int) -> None:
        """The regions of a rank: as its layout has them, or upstream without one. They make up what was allocated."""
        ring, slab = self.rings[rank], self._at(rank, SLAB)
        upstreams = (ring.shard_capacity,) * (2 * (self.world - 1))
        widths = ring._layout.slot_bytes if hasattr(ring, "_layout") else upstreams
        self._add(Region("flags", rank, 0, slab, FLAGS))
        end = slab + FLAGS
        for step, size in enumerate(widths):
            self._add(Region("slot", rank, step, end, size))
            end += size
        assert end == slab + self.slab_bytes[rank], "slots and flags make up the slab"
        if ring._fp8_stage is not None:
            stage, total, stride = self._at(rank, STAGE), self.stage_bytes[rank], ring._fp8_stage_stride
            chunks = [(c, c * stride, stride) for c in range(self.world)] if stride else [(0, 0, total)]
            self._add(*(Region("stage", rank, c, stage + at, size) for c, at, size in chunks))
            assert chunks[-1][1] + chunks[-1][2] == total

    # Calling

    def tensors(self, call: int, elements: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """Input and output of every rank for one call."""
        made, size = [], elements * dtype.itemsize
        for rank in range(self.world):
            pair = []
            for n, kind in enumerate(("in", "out")):
                start = self._at(rank, TENSORS) + (2 * call + n) * (1 << 36)
                self._add(Region(kind, rank, call, start, size))
                pair.append(Tensor(start, elements, dtype))
            made.append((pair[0], pair[1]))
        return made

    def takes(self, elements: int, dtype: torch.dtype) -> bool:
        """What ``should_allreduce`` says, which must be the same on every rank."""
        answers = {ring.should_allreduce(Tensor(0, elements, dtype)) for ring in self.rings}
        assert len(answers) == 1
        return bool(answers.pop())

    def call(self, number: int, elements: int, dtype: torch.dtype) -> None:
        """Record one all-reduce on every rank."""
        state = SimpleNamespace(require_runtime=lambda runtime: None)
        for rank, (inp, out) in enumerate(self.tensors(number, elements, dtype)):
            self.rank, ring = rank, self.rings[rank]
            before = len(self.kernels[rank].ops)
            if hasattr(ring, "_run_prepared"):
                ring._run_prepared(inp, out=out, state=state)
            else:
                ring.all_reduce(inp, out=out)
            self._require_steps(rank, self.kernels[rank].ops[before:])

    def _add(self, *regions: Region) -> None:
        self.regions = sorted([*self.regions, *(r for r in regions if r.size)], key=lambda r: r.start)

    def locate(self, start: int, size: int) -> Region:
        """The one region in which a range lies whole."""
        at = bisect_right(self.regions, start, key=lambda r: r.start) - 1
        region = self.regions[at]
        inside = at >= 0 and start + size <= region.start + region.size
        assert inside, f"{size} bytes at {start:#x} lie outside of every slot, chunk and tensor"
        return region

    def _require_steps(self, rank: int, ops: list[Op]) -> None:
        """Every write to a peer lies in the slot of the step that its flag announces."""
        sent = [self.locate(*op.writes[0][:2]) for op in ops if op.kind == "copy"]
        sent = [region for region in sent if region.rank != rank]
        steps = 2 * (self.world - 1)
        pieces = len(sent) // steps
        assert pieces > 0
        assert len(sent) == pieces * steps
        assert {region.kind for region in sent} == {"slot"}
        announced = [op.flag for op in ops if op.kind == "set"]
        assert len(announced) - len(sent) in (0, 1), "a flag for each write, and the ring's last handshake"
        for region, at in zip(sent, announced, strict=False):
            flags = self.locate(at, 4)
            assert (region.rank, region.index) == (flags.rank, (at - flags.start) // FLAG // pieces)

    # Running

    def run(self, seed: int = 0) -> None:
        """Run what was recorded on all ranks, a random one that can go on at a time."""
        draw, left = random.Random(seed), [list(k.ops) for k in self.kernels]
        for kernels in self.kernels:
            kernels.ops.clear()
        while any(left):
            ready = [r for r in range(self.world) if left[r] and not self._blocked(left[r][0])]
            assert ready, "every rank waits"
            rank = draw.choice(ready)
            self._step(left[rank].pop(0))

    def _blocked(self, op: Op) -> bool:
        return op.kind == "wait" and self.flags[op.flag] <= self.waited[op.flag]

    def _step(self, op: Op) -> None:
        for start, size, _ in (*op.reads, *op.writes):
            self.locate(start, size)
        if op.kind == "set":
            self.flags[op.flag] += 1
        elif op.kind == "wait":
            self.waited[op.flag] += 1
        elif op.kind == "copy":
            (src, size, _), (dst, _, _) = op.reads[0], op.writes[0]
            for start, length, label in list(self._pieces(src, size)):
                self._write(dst + start - src, length, label)
        else:
            self._compute(op)

    def _compute(self, op: Op) -> None:
        """The sum of what an op reads, under every range that it writes."""
        labels = [self._read(*r) for r in op.reads]
        assert all(label.form == form for label, (_, _, form) in zip(labels, op.reads, strict=True))
        parts = [label for label in labels if label.form != "scales"]
        halves = [(label.ranks, label.first, label.count) for label in labels if label.form == "scales"]
        assert halves == [(p.ranks, p.first, p.count) for p in parts if p.form == "payload"]
        assert len({(p.first, p.count) for p in parts}) == 1, "the summands are of the same elements"
        ranks: frozenset[int] = frozenset().union(*(p.ranks for p in parts))
        assert len(ranks) == sum(len(p.ranks) for p in parts), "no rank's input is added twice"
        for start, size, form in op.writes:
            self._write(start, size, Label(ranks, parts[0].first, parts[0].count, form))

    def _pieces(self, start: int, size: int) -> Iterator[tuple[int, int, Label]]:
        """The labels that fill a range, end to end."""
        region = self.locate(start, size)
        if region.kind == "in":
            yield start, size, self._read(start, size, "raw")
            return
        end, held = start + size, self.memory[region]
        while start < end:
            assert start in held, f"nothing was put at {start:#x} in {region}"
            length, label = held[start]
            yield start, length, label
            start += length
        assert start == end, f"what lies in {region} is longer than what is read"

    def _read(self, start: int, size: int, form: str) -> Label:
        region = self.locate(start, size)
        if region.kind == "in":
            itemsize = self.itemsizes[region.index]
            return Label(frozenset({region.rank}), (start - region.start) // itemsize, size // itemsize)
        (_, _, label), *more = self._pieces(start, size)
        assert not more
        return label

    def _write(self, start: int, size: int, label: Label) -> None:
        held = self.memory[self.locate(start, size)]
        for at, (length, _) in list(held.items()):
            if at < start + size and start < at + length:
                del held[at]
        held[start] = (size, label)

    def all_reduce(self, calls: Sequence[tuple[int, torch.dtype]], seed: int = 0) -> None:
        """Record and run some calls (elements of a rank's input, dtype), and check every rank's outputs."""
        self.itemsizes = {n: dtype.itemsize for n, (_, dtype) in enumerate(calls)}
        self.regions = [r for r in self.regions if r.kind not in ("in", "out")]
        for number, (elements, dtype) in enumerate(calls):
            self.call(number, elements, dtype)
        self.run(seed)
        everyone = frozenset(range(self.world))
        for region in [r for r in self.regions if r.kind == "out"]:
            at = 0
            for _, _, label in self._pieces(region.start, region.size):
                assert (label.ranks, label.first, label.form) == (everyone, at, "raw")
                at += label.count
            assert at * self.itemsizes[region.index] == region.size
