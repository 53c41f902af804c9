"""What PyTorch's CUDA caching allocator does, operation by operation, for the simulator to be compared with.

``python3 allocator_child OUTDIR`` runs every configuration in a process of its own and writes one ``NAME.json.xz``
each; ``python3 allocator_child OUTDIR NAME`` runs one. Needs torch and a CUDA device, nothing else: no neaptide, no
vllm. At most 60 GiB of device memory are taken. The file holds the operations, the allocator's counters after each as
deltas, the address of each allocation, and the segment events of the allocator's own history.
"""

from __future__ import annotations

import gc
import json
import lzma
import subprocess
import sys
import warnings
from pathlib import Path

from history import report
from recorder import MIB, Device
from workloads import NAMES, SETTINGS, WORKLOADS, environment


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


def run_all(out: Path, names: tuple[str, ...] = NAMES) -> int:
    """Runs configurations in turn.

    Returns:
        0, or 1 if one of them failed.
    """
    out.mkdir(parents=True, exist_ok=True)
    worst = 0
    for name in names:
        done = subprocess.run(
            [sys.executable, str(Path(__file__).parent), str(out), name], env=environment(name), check=False
        )
        worst = max(worst, int(done.returncode != 0))
    return worst


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    raise SystemExit(run_one(folder, sys.argv[2]) if len(sys.argv) > 2 else run_all(folder))
