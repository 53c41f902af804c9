"""The ``slabs`` command: bytes of PCIe channels at each pin, upstream's and ours, by the code that allocates them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from neaptide.bench.results import MIB, headed_table
from neaptide.both_trees import Question
from neaptide.errors import ExitCode
from neaptide.output import Progress
from neaptide.session import Options
from neaptide.slabs.cases import DEPLOYMENTS, RINGS, Deployment, as_spec

CHILD = Path(__file__).with_name("child.py")
RING_BYTES = ("slab_bytes", "stage_bytes", "total_bytes")
# Measured: tests/bench/results/pcie-current-h200x2.json.
GRANULE_BYTES = 2 << 20
Row = dict[str, Any]
Sizes = dict[str, dict[str, int]]


def run(options: Options, progress: Progress) -> tuple[ExitCode, dict[str, Any]]:
    """Sizes of every shape at the chosen pin, or at all pins that have PCIe pools with named channels."""
    rows: list[Row] = []
    for pin, *answers in Question(CHILD, as_spec(), "slabs").asked(options, progress):
        upstream, patched = ({_key(row["shape"]): row for row in answer} for answer in answers)
        rows += [row for d in DEPLOYMENTS for row in deployment_rows(pin, d, upstream, patched)]
        rows += ring_rows(pin, upstream, patched)
    _show(rows, progress)
    return ExitCode.DONE, {"rows": rows}


def _key(shape: Mapping[str, Any]) -> str:
    return json.dumps(shape, sort_keys=True)


def deployment_rows(pin: str, deployment: Deployment, upstream: Sizes, patched: Sizes) -> list[Row]:
    """A row for each way to share a deployment's channels; bytes are a rank's."""
    rows = []
    for choice in deployment.choices:
        sizes = (upstream if choice.variant == "upstream" else patched)[_key(asdict(deployment.shape))]
        channel = sizes["slab_bytes"] + sizes.get("rank_data_bytes", 0)
        rows.append({
            "pin": pin, "case": deployment.name, "variant": choice.variant, "channels": choice.channels,
            "slab_bytes": sizes["slab_bytes"], "rank_data_bytes": sizes.get("rank_data_bytes", 0),
            "total_bytes": choice.channels * channel,
            "driver_bytes": driver_bytes(sizes["slab_bytes"], choice.channels),
            "condition": choice.condition,
        })  # fmt: skip
    return rows


def ring_rows(pin: str, upstream: Sizes, patched: Sizes) -> list[Row]:
    """Slab and stage of a DMA ring for each world size and wire mode."""
    rows = []
    for ring in RINGS:
        mode = "bf16" if ring.mode == "0" else ring.mode
        for variant, sizes in (("upstream", upstream), ("patched", patched)):
            found = sizes[_key(asdict(ring))]
            rows.append({
                "pin": pin, "case": f"DMA TP{ring.world_size} {mode}", "variant": variant, "max_bytes": ring.max_bytes,
                "slab_bytes": found["slab_bytes"], "stage_bytes": found["stage_bytes"],
                "total_bytes": found["slab_bytes"] + found["stage_bytes"],
            })  # fmt: skip
    return rows


def driver_bytes(slab_bytes: int, slabs: int) -> int:
    """What an H200's driver takes for IPC slabs: whole granules for large ones; small ones share them.

    Seen for slabs of 0.3, 0.6 and 6.3 MiB; where it changes over was not looked for.
    """
    units, each = (slabs, slab_bytes) if slab_bytes >= GRANULE_BYTES else (1, slabs * slab_bytes)
    return units * -(-each // GRANULE_BYTES) * GRANULE_BYTES


def _show(rows: Sequence[Row], progress: Progress) -> None:
    def mib(value: int) -> str:
        return f"{value / MIB:.2f}"

    pools = [
        [r["pin"], r["case"], r["variant"], str(r["channels"]), mib(r["slab_bytes"]), mib(r["rank_data_bytes"]),
         mib(r["total_bytes"]), mib(r["driver_bytes"]), r["condition"]]
        for r in rows if "channels" in r
    ]  # fmt: skip
    columns = (
        "pin", "case", "variant", "channels", "slab, MiB", "rank data, MiB", "a rank, MiB",
        "slabs in granules of 2 MiB", "safe",
    )  # fmt: skip
    headed_table("channels", columns, pools, progress)
    pairs: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        if "channels" not in row:
            pairs.setdefault((row["pin"], row["case"]), {})[row["variant"]] = row
    rings = [
        [pin, case, *(f"{mib(two['upstream'][name])} / {mib(two['patched'][name])}" for name in RING_BYTES)]
        for (pin, case), two in pairs.items()
    ]
    ring_columns = ("pin", "case", "slab, MiB, upstream / patched", "stage", "a rank")
    headed_table("DMA rings", ring_columns, rings, progress)
