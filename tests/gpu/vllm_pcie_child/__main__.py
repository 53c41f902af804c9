"""PCIe collectives of b12x through vLLM's own groups and captures.

``python tests/gpu/vllm_pcie_child RANK WORLD PORT RESULT``: one of the ranks, each with a GPU; RESULT gets a JSON
object with a row for each case. NCCL makes every reference. The trees on the path decide what is under test; the
architecture's limit is lifted by VLLM_NEAPTIDE_PCIE_ARCHITECTURES=any. On NVLink times are not those of PCIe.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from cases import CASES
from rig import Rig


def main() -> None:
    rank, world, port, result = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    found: dict[str, Any] = {"rank": rank, "world": world, "cases": list(CASES), "rows": [], "error": ""}
    try:
        rig = Rig(rank, world, port, found["rows"])
        found |= rig.named()
        for name, case in CASES.items():
            rig.case = name
            case(rig)
            result.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    except BaseException:
        found["error"] = traceback.format_exc()[-4000:]
    result.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    sys.stdout.flush()
    # Neither torch's nor a peer's teardown is under test, and either may hang.
    os._exit(1 if found["error"] else 0)


if __name__ == "__main__":
    main()
