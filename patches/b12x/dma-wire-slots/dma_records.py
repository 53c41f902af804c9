"""What one rank of a DMA ring launches, recorded with the address ranges that it reads and writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

DEVICE = torch.device("cuda:0")


@dataclass(frozen=True)
class Region:
    kind: str  # flags, slot, stage, counters, in, out
    rank: int
    index: int  # step of a slot, chunk of the stage, call of a tensor
    start: int
    size: int


@dataclass(frozen=True)
class Label:
    """The sum of some ranks' inputs over ``count`` elements from ``first``: raw, or one half of it compressed."""

    ranks: frozenset[int]
    first: int
    count: int
    form: str = "raw"


Range = tuple[int, int, str]


@dataclass(frozen=True)
class Op:
    kind: str
    reads: tuple[Range, ...] = ()
    writes: tuple[Range, ...] = ()
    flag: int = 0


def coded(payload: int, scales: int, elements: int) -> tuple[Range, Range]:
    return (payload, elements, "payload"), (scales, elements // 128 * 4, "scales")


class Kernels:
    """Records what one rank launches."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        for suffix in ("", "_i8", "_mx"):
            for name in ("quant", "dequant_store", "dequant_accum", "dequant_add_quant"):
                setattr(self, f"dma_{name}{suffix}", getattr(self, name))

    def install(self, launchers: object) -> None: ...
    def prepare(self, **_: object) -> None: ...

    def dma_copy(self, dst: int, src: int, size: int) -> None:
        self.ops.append(Op("copy", ((src, size, ""),), ((dst, size, ""),)))

    def dma_add(self, dst: int, a: int, b: int, elements: int, code: int) -> None:
        size = elements * (4 if code == 2 else 2)
        self.ops.append(Op("add", ((a, size, "raw"), (b, size, "raw")), ((dst, size, "raw"),)))

    def dma_set_flag(self, flag: int, counter: int) -> None:
        self.ops.append(Op("set", ((counter, 4, ""),), ((flag, 4, ""),), flag))

    def dma_wait_flag(self, flag: int, counter: int) -> None:
        self.ops.append(Op("wait", ((counter, 4, ""), (flag, 4, "")), (), flag))

    def quant(self, src: int, payload: int, scales: int, elements: int) -> None:
        self.ops.append(Op("quant", ((src, elements * 2, "raw"),), coded(payload, scales, elements)))

    def dequant_store(self, out: int, payload: int, scales: int, elements: int) -> None:
        self.ops.append(Op("store", coded(payload, scales, elements), ((out, elements * 2, "raw"),)))

    def dequant_accum(self, out: int, inp: int, payloads: Sequence[int], scales: Sequence[int], elements: int) -> None:
        sources = [r for p, s in zip(payloads, scales, strict=True) for r in coded(p, s, elements)]
        reads = ((inp, elements * 2, "raw"), *sources)
        self.ops.append(Op("accum", reads, ((out, elements * 2, "raw"),)))

    def dequant_add_quant(
        self, out: int, local: int, payload: int, scales: int, to: int, to_scales: int, elements: int, store: bool
    ) -> None:
        reads = ((local, elements * 2, "raw"), *coded(payload, scales, elements))
        stored = ((out, elements * 2, "raw"),) if store else ()
        self.ops.append(Op("add-quant", reads, (*coded(to, to_scales, elements), *stored)))

    # As the priming of 1.5 calls them
    def _quant(self, codec: str, *args: int) -> None:
        self.quant(*args)

    def _dequant_store(self, codec: str, *args: int) -> None:
        self.dequant_store(*args)

    def _dequant_accum(self, codec: str, *args: Any) -> None:
        self.dequant_accum(*args)

    def _dequant_add_quant(self, codec: str, *args: Any) -> None:
        self.dequant_add_quant(*args)


@dataclass(frozen=True)
class Tensor:
    """A device tensor of which only the address and the shape exist."""

    address: int
    elements: int
    dtype: torch.dtype = torch.uint8
    device: torch.device = DEVICE

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.elements,)

    def numel(self) -> int:
        return self.elements

    def element_size(self) -> int:
        return self.dtype.itemsize

    def is_contiguous(self) -> bool:
        return True

    def data_ptr(self) -> int:
        return self.address


class Stream:
    def __init__(self, **_: object) -> None: ...
    def wait_event(self, event: object) -> None: ...
    def wait_stream(self, stream: object) -> None: ...
    def synchronize(self) -> None: ...
    def record(self, stream: object = None) -> None: ...
    def elapsed_time(self, end: object) -> float:
        return 1.0
