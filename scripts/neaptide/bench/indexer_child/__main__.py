"""The sparse indexer's own functions in this process, on a GPU.

``python indexer_child SPEC RESULT`` with a vLLM on the path; SPEC lists cases and policies. Imports its own folder
and nothing of neaptide, so that the variant under test decides what is imported. Bytes are read from the allocator.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

from indexer_decode import DecodeStep
from indexer_ladder import run_ladder


def versions() -> dict[str, str]:
    from importlib import metadata

    deep_gemm = sys.modules.get("vllm.third_party.deep_gemm")
    names = ("vllm", "torch", "triton")
    return {n: metadata.version(n) for n in names} | {"deep_gemm": str(getattr(deep_gemm, "__version__", "absent"))}


def main(spec_path: str, result_path: str) -> int:
    with open(spec_path) as handle:
        spec = json.load(handle)
    import torch
    from vllm.v1.worker.workspace import init_workspace_manager

    init_workspace_manager(torch.device("cuda", 0))
    rows: list[dict[str, Any]] = []
    for case in spec["cases"]:
        torch.cuda.empty_cache()
        try:
            found = run_ladder(case, spec["policies"]) if case["kind"] == "prefill" else [DecodeStep(case).run()]
            rows += [{"case": case["name"], "outcome": "done", **row} for row in found]
        except Exception as error:
            where = [f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in traceback.extract_tb(error.__traceback__)]
            rows.append({"case": case["name"], "outcome": "failed", "error": str(error)[:500], "where": where})
        with open(result_path, "w") as handle:
            json.dump({"device": torch.cuda.get_device_name(), "rows": rows, "versions": versions()}, handle)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
