"""The graph estimate on real CUDA graphs: what the meter says after a throwaway capture, what the real one then takes.

Any CUDA device and torch; no vLLM is needed, the overlay's own modules run. ``upstream`` rows follow the arithmetic
that vLLM 0.33.0 has for FULL graphs on the V2 runner. ``python3 tests/gpu/test_graph_memory.py OUT.json`` writes the
rows without pytest.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from graph_memory_child import BUILDER_BYTES, CASES, MIB, REAL_KV_BYTES, VARIANTS

CHILD = Path(__file__).with_name("graph_memory_child.py")


def row(name: str, variant: str) -> dict[str, Any]:
    """One row, in a process of its own."""
    command = [sys.executable, str(CHILD), name, variant]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, f"{name} {variant}: {done.stderr[-3000:]}"
    return dict(json.loads(done.stdout.splitlines()[-1]))


def missing() -> str:
    """Why this machine cannot run these tests; empty if it can."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed beside this Python"
    import torch

    return "" if torch.cuda.is_available() else "torch sees no CUDA device"


def off(estimate_bytes: int, actual_bytes: int) -> int:
    """Bytes by which an estimate is out of bounds: 10 % of an actual of 1 GiB or more, else 16 MiB."""
    bound = actual_bytes // 10 if actual_bytes >= 1 << 30 else 16 * MIB
    return max(0, abs(estimate_bytes - actual_bytes) - bound)


if "pytest" in sys.modules:
    import pytest

    pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(missing()), reason=missing() or "runs")]

    @pytest.mark.parametrize("name", CASES)
    def test_the_estimate_is_what_the_real_capture_takes(name: str) -> None:
        measured = row(name, "patched")
        case = CASES[name]
        assert measured["wrong_rows"] == 0
        assert measured["samples"] == min(len(case.sizes), max(8, -(-len(case.sizes) // 4)))
        assert off(measured["estimate_bytes"], measured["actual_bytes"]) == 0, measured
        assert off(measured["planned_bytes"] - REAL_KV_BYTES, measured["taken_bytes"] - REAL_KV_BYTES) == 0, measured
        assert BUILDER_BYTES <= measured["builder_bytes"] <= BUILDER_BYTES + 20 * MIB, measured

    def test_a_large_transient_of_the_first_capture_is_headroom_and_no_graph() -> None:
        without, with_it = row("64-sizes", "patched"), row("transient-in-first", "patched")
        assert abs(with_it["estimate_bytes"] - without["estimate_bytes"]) <= 8 * MIB
        pool = with_it["estimate_bytes"]
        transient = CASES["transient-in-first"].first_transient_bytes
        assert transient - pool <= with_it["headroom_bytes"] <= transient + 64 * MIB, with_it


def main(arguments: list[str]) -> int:
    """Write all rows to the file named first.

    Returns:
        0, or 1 if an estimate is out of bounds, 2 without a CUDA device.
    """
    if missing():
        print(missing(), file=sys.stderr)
        return 2
    import torch

    rows = [row(name, variant) for name in CASES for variant in VARIANTS]
    for line in rows:
        print({key: value // MIB if key.endswith("_bytes") else value for key, value in line.items()})
    report = {
        "schema_version": 1,
        "command": "python3 tests/gpu/test_graph_memory.py OUT.json",
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
        "cases": {name: asdict(case) for name, case in CASES.items()},
        "rows": rows,
    }
    Path(arguments[0]).write_text(json.dumps(report, indent=2, sort_keys=True) + "\n")
    return int(any(off(r["estimate_bytes"], r["actual_bytes"]) for r in rows if r["variant"] == "patched"))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
