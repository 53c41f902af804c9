"""Deployments whose channels are counted, and the shapes for which slabs are sized."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

DMA_MODES = ("0", "ag", "i8", "mx", "ring", "i8_ring", "mx_ring", "a2a", "i8_a2a", "mx_a2a")
RING_MAX_BYTES = 36 << 20


@dataclass(frozen=True)
class Exchange:
    """A DCP exchange's channel: ranks, rows, heads of all ranks, and head sizes in elements of 2 bytes."""

    world_size: int
    rows: int
    heads: int
    head_dim: int
    query_head_dim: int


@dataclass(frozen=True)
class Oneshot:
    """A oneshot channel: ranks, widest payload in bytes."""

    world_size: int
    eager_bytes: int


@dataclass(frozen=True)
class Dma:
    """A DMA ring: ranks, widest tensor in bytes, wire mode as a caller names it."""

    world_size: int
    max_bytes: int
    mode: str


@dataclass(frozen=True)
class Choice:
    """How many channels a deployment holds, and when that is safe.

    Attributes:
        variant: ``upstream`` counts with upstream's slabs, all others with the patched ones.
    """

    variant: str
    channels: int
    condition: str


@dataclass(frozen=True)
class Deployment:
    """A deployment's channels of one kind."""

    name: str
    shape: Exchange | Oneshot
    choices: tuple[Choice, ...]


_GATE = Exchange(4, 64, 96, 512, 576)
_TURNKEY = Exchange(2, 64, 48, 512, 576)
_FOUR = "one for eager work, one for each capture scope: target, draft prefill, draft decode"
DEPLOYMENTS = (
    Deployment("DCP4 gate (V2 runner, MTP)", _GATE, (
        Choice("upstream", 4, _FOUR),
        Choice("isolated", 4, f"always: {_FOUR}"),
        Choice("safe groups", 3,
               "target prefill and draft prefill share the eager channel (eager work and PIECEWISE graphs of one "
               "stream); target FULL and draft decode have their own, since they may overlap"),
        Choice("one group", 1,
               "only if target and draft run on one stream, or wait for each other, in the same order on every rank"),
    )),
    Deployment("DCP2 turnkey (V1 runner)", _TURNKEY, (
        Choice("upstream", 3, "eager work, the profiling capture (never freed), the production capture"),
        Choice("transient profiling", 2, "always: the profiling capture is freed; eager work and production apart"),
        Choice("one group", 1, "only if eager work and graph replay share a stream, in one order on every rank"),
    )),
    Deployment("TP4 oneshot, 84 KiB (V2 runner, MTP)", Oneshot(4, 84 << 10), (
        Choice("upstream", 4, _FOUR),
        Choice("isolated", 4, f"always: {_FOUR}"),
        Choice("one group", 1,
               "only if target and draft run on one stream, or wait for each other, in the same order on every rank"),
    )),
    Deployment("TP8 oneshot, 8 MiB (defaults)", Oneshot(8, 8 << 20), (
        Choice("upstream", 1, "one channel"), Choice("isolated", 1, "always"),
    )),
    Deployment("TP2 oneshot, 8 MiB (defaults)", Oneshot(2, 8 << 20), (
        Choice("upstream", 1, "one channel"), Choice("isolated", 1, "always"),
    )),
)  # fmt: skip
RINGS = tuple(Dma(world, RING_MAX_BYTES, mode) for world in (2, 4, 8) for mode in DMA_MODES)


def as_spec() -> dict[str, list[dict[str, Any]]]:
    """All shapes, for the child."""
    shapes = list(dict.fromkeys(d.shape for d in DEPLOYMENTS))
    return {
        "exchange": [asdict(s) for s in shapes if isinstance(s, Exchange)],
        "oneshot": [asdict(s) for s in shapes if isinstance(s, Oneshot)],
        "dma": [asdict(ring) for ring in RINGS],
    }
