"""Parts of vLLM in this process, on a GPU: the sparse indexer's functions, the workspace manager.

``python part_child SPEC RESULT`` with a vLLM on the path; SPEC lists cases and, for the indexer, policies. Imports its
own folder and nothing of neaptide, so that the variant under test decides what is imported. Bytes are read from the
allocator.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from pathlib import Path
from typing import Any

# By the kind of a case: the module and its function, which takes the case and the spec and returns rows.
RUNS = {
    "prefill": ("indexer_ladder", "run_ladder"), "decode": ("indexer_decode", "run_decode"),
    "growth": ("workspace_growth", "run_growth"), "overflow": ("workspace_overflow", "run_overflow"),
    "lanes": ("workspace_lane_costs", "run_lanes"),
}  # fmt: skip


def versions() -> dict[str, str]:
    from importlib import metadata

    deep_gemm = sys.modules.get("vllm.third_party.deep_gemm")
    names = ("vllm", "torch", "triton")
    return {n: metadata.version(n) for n in names} | {"deep_gemm": str(getattr(deep_gemm, "__version__", "absent"))}


def run_case(case: dict[str, Any], spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of one case; one that fails is a row, too."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    module, function = RUNS[case["kind"]]
    try:
        found = getattr(importlib.import_module(module), function)(case, spec)
        return [{"case": case["name"], "outcome": "done", **row} for row in found]
    except Exception as error:
        where = [f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in traceback.extract_tb(error.__traceback__)]
        return [{"case": case["name"], "outcome": "failed", "error": str(error)[:500], "where": where}]


def main(spec_path: str, result_path: str) -> int:
    import torch
    from vllm.v1.worker.workspace import init_workspace_manager

    with open(spec_path) as handle:
        spec = json.load(handle)
    init_workspace_manager(torch.device("cuda", 0))
    rows: list[dict[str, Any]] = []
    for case in spec["cases"]:
        rows += run_case(case, spec)
        with open(result_path, "w") as handle:
            json.dump({"device": torch.cuda.get_device_name(), "rows": rows, "versions": versions()}, handle)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
