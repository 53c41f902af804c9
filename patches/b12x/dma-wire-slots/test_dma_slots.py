"""Bytes of the ring by wire mode: what the real constructor allocates, and the layout's own answers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dma_machine import Machine, module

MIB = 1 << 20
GATHER, WHOLE = ("ag", "i8", "mx"), ("ring", "i8_ring", "mx_ring", "a2a", "i8_a2a", "mx_a2a")
# Of one rank, in MiB: upstream's slab and stage; what a whole-compressed and an all-gather mode spare of the slab, and
# an all-gather mode of the stage.
SIZES = {
    (2, 36): (36.03, 18.56, 17.44, 8.72, 9.28),
    (4, 36): (54.03, 18.56, 26.16, 13.08, 13.92),
    (8, 36): (63.03, 18.56, 30.52, 15.26, 16.24),
    (4, 96): (144.03, 49.50, 69.75, 34.88, 37.12),
}


def mib(size: int) -> Any:
    return pytest.approx(size / MIB, abs=0.0051)


def slots() -> Any:
    return module("dma_slots")


@pytest.mark.parametrize("mode", ["", *GATHER, *WHOLE])
@pytest.mark.parametrize(("world", "size"), SIZES)
def test_what_a_rank_allocates(monkeypatch: pytest.MonkeyPatch, world: int, size: int, mode: str) -> None:
    ring = Machine(monkeypatch, mode, size * MIB, world)
    slab, stage, whole, gather, one_stride = SIZES[world, size]
    upstream = slots().upstream_layout(mode, size * MIB, world)
    assert mib(upstream.slab_bytes) == slab
    assert mib(upstream.stage_bytes) == (stage if mode else 0)
    spared = whole if mode in WHOLE else gather if mode in GATHER else 0
    assert set(ring.slab_bytes) == {slots().dma_layout(mode, size * MIB, world).slab_bytes}
    assert mib(upstream.slab_bytes - ring.slab_bytes[0]) == spared
    assert mib(upstream.stage_bytes - sum(ring.stage_bytes[:1])) == (one_stride if mode in GATHER else 0)


@pytest.mark.parametrize(
    ("mode", "slab", "stage"),
    [
        ("", 56655872, []),
        ("mx", 42942464, [4866048]),
        ("mx_ring", 29229056, [19464192]),
        ("a2a", 29229056, [19464192]),
    ],
)
def test_four_ranks_and_36_mib(monkeypatch: pytest.MonkeyPatch, mode: str, slab: int, stage: list[int]) -> None:
    ring = Machine(monkeypatch, mode, 36 * MIB, 4)
    assert ring.slab_bytes == [slab] * 4
    assert ring.stage_bytes == stage * 4


def test_the_layout_has_upstreams_units() -> None:
    dma, layout = module("pcie_dma"), slots()
    assert layout.FLAGS_BYTES == dma.FLAG_SLOTS * dma.FLAG_STRIDE
    assert (layout.ALIGN_BYTES, layout.QUANT_BLOCK) == (dma.SCRATCH_ALIGN, dma.FP8_QUANT_BLOCK)
    assert {dma._normalize_fp8_mode(mode) for mode in layout.MODES} == set(layout.MODES)


@pytest.mark.parametrize("mode", ["", *GATHER, *WHOLE])
def test_no_layout_is_larger_than_upstreams(mode: str) -> None:
    for world in (2, 4, 6, 8, 10):
        for max_bytes in (*range(1, 5000, 37), *range(MIB, MIB + 3000, 331)):
            ours, theirs = (f(mode, max_bytes, world) for f in (slots().dma_layout, slots().upstream_layout))
            assert ours.slab_bytes <= theirs.slab_bytes
            assert ours.stage_bytes <= theirs.stage_bytes
            assert all(width % 256 == 0 for width in ours.slot_bytes)
            assert mode or ours == theirs


@pytest.mark.parametrize(
    ("mode", "max_bytes", "world", "found"),
    [("zip", 1024, 2, "'zip'"), ("ag", 0, 2, "max_bytes=0"), ("", -1, 2, "max_bytes=-1"), ("", 1024, 1, "1 ranks")],
)
def test_nonsense_is_refused(mode: str, max_bytes: int, world: int, found: str) -> None:
    with pytest.raises(ValueError, match=rf"{found}.*; wanted"):
        slots().dma_layout(mode, max_bytes, world)


def test_sizes_need_no_torch() -> None:
    """The ledger computes them where there is none."""
    path = Path(module("pcie_dma").__file__).with_name("dma_slots.py")
    code = "import runpy, sys; sys.modules['torch'] = None; runpy.run_path(sys.argv[1])"
    ran = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
