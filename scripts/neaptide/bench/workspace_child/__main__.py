"""The workspace manager of the vLLM on the path, in this process, on a GPU.

``python workspace_child SPEC RESULT``; SPEC lists cases. Imports its own folder and nothing of neaptide, so that the
variant under test decides what is imported. Bytes are read from the allocator and the device.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

from workspace_growth import run_growth
from workspace_lane_costs import run_lanes
from workspace_overflow import run_overflow

RUNS = {"growth": run_growth, "overflow": run_overflow, "lanes": run_lanes}


def versions() -> dict[str, str]:
    from importlib import metadata

    return {name: metadata.version(name) for name in ("vllm", "torch")}


def main(spec_path: str, result_path: str) -> int:
    with open(spec_path) as handle:
        spec = json.load(handle)
    import torch

    rows: list[dict[str, Any]] = []
    for case in spec["cases"]:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        try:
            rows.append({"case": case["name"], "outcome": "done", **RUNS[case["kind"]](case)})
        except Exception as error:
            where = [f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in traceback.extract_tb(error.__traceback__)]
            rows.append({"case": case["name"], "outcome": "failed", "error": str(error)[:500], "where": where})
        with open(result_path, "w") as handle:
            json.dump({"device": torch.cuda.get_device_name(), "rows": rows, "versions": versions()}, handle)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
