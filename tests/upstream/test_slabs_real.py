"""Bytes of PCIe channels, computed by the pins' real sources, pristine and patched."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from real import ROOT

MIB = 1 << 20
DMA = [(world, mode) for world in (2, 4, 8) for mode in ("ag", "i8", "mx", "ring", "i8_ring", "mx_ring", "a2a")]


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, str, str], dict[str, Any]]:
    command = [sys.executable, "-m", "neaptide", "slabs", "--json", "--root", str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {(row["pin"], row["case"], row["variant"]): row for row in json.loads(done.stdout)["rows"]}


@pytest.mark.parametrize("pin", ["current", "r12"])
def test_exchange_channels(pin: str, rows: dict[tuple[str, str, str], dict[str, Any]]) -> None:
    gate, turnkey = "DCP4 gate (V2 runner, MTP)", "DCP2 turnkey (V1 runner)"
    signal = 266_240 if pin == "current" else 266_496
    assert rows[pin, gate, "upstream"]["slab_bytes"] == signal + 2 * (6.75 * MIB + 24_576)
    assert rows[pin, gate, "isolated"]["slab_bytes"] == signal + 2 * (6 * MIB + 24_576)
    totals = [
        rows[pin, gate, name]["total_bytes"] / MIB for name in ("upstream", "isolated", "safe groups", "one group")
    ]
    assert [round(total, 1) for total in totals] == [55.2, 49.2, 36.9, 12.3]
    totals = [
        rows[pin, turnkey, name]["total_bytes"] / MIB for name in ("upstream", "transient profiling", "one group")
    ]
    assert [round(total, 2) for total in totals] == [21.08, 12.55 if pin == "current" else 12.56, 6.28]


@pytest.mark.parametrize("pin", ["current", "r12"])
def test_oneshot_channels(pin: str, rows: dict[tuple[str, str, str], dict[str, Any]]) -> None:
    case = "TP4 oneshot, 84 KiB (V2 runner, MTP)"
    staging = (150_528 if pin == "current" else 150_784) + 2 * 86_016
    assert rows[pin, case, "upstream"]["total_bytes"] == 4 * (staging + 8 * MIB)
    assert rows[pin, case, "isolated"]["total_bytes"] == 4 * (staging + 8192)
    wide = rows[pin, "TP8 oneshot, 8 MiB (defaults)", "isolated"]["slab_bytes"]
    assert wide == staging - 2 * 86_016 + 16 * MIB
    if pin == "current":
        assert rows[pin, "TP8 oneshot, 8 MiB (defaults)", "upstream"]["slab_bytes"] == 150_528 + 128 * MIB


@pytest.mark.parametrize("pin", ["current", "r12"])
@pytest.mark.parametrize(("world", "mode"), DMA)
def test_rings(pin: str, world: int, mode: str, rows: dict[tuple[str, str, str], dict[str, Any]]) -> None:
    """36 MiB: what the issue's table saves, full modes 2 (W-1) and AG modes W-1 slots of 0.484 of a shard."""
    case = f"DMA TP{world} {mode}"
    before, after = rows[pin, case, "upstream"], rows[pin, case, "patched"]
    shard = 36 * MIB // world
    narrow = 36 * MIB // 2 // world // 128 * 132
    narrow = -(-narrow // 256) * 256
    full, compressed = (0, 2 * (world - 1)) if "ring" in mode or "a2a" in mode else (world - 1, world - 1)
    assert before["slab_bytes"] == 32_768 + 2 * (world - 1) * shard
    assert after["slab_bytes"] == 32_768 + full * shard + compressed * narrow
    assert before["stage_bytes"] == world * narrow
    assert after["stage_bytes"] == (narrow if full else world * narrow)
    assert rows[pin, f"DMA TP{world} bf16", "patched"]["slab_bytes"] == before["slab_bytes"]
