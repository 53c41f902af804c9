"""The PCIe pools and the DMA ring of the b12x on the path, on two GPUs.

``python tests/gpu/pcie_child SPEC RESULT [--dry]``: SPEC is a JSON file, keys as in ``ranks.DEFAULTS``; RESULT gets
``{versions, device, rows}``, after each row. ``--dry`` runs the same cases on a CPU, on stand-ins for b12x: it tests
this program. ``--build`` compiles what b12x 1.1 compiles, and exits. Imports nothing of neaptide, so that the tree
under test decides what is imported.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(prog="pcie_child", description=__doc__)
    parser.add_argument("spec", nargs="?", type=Path)
    parser.add_argument("result", nargs="?", type=Path)
    parser.add_argument("--dry", action="store_true", help="on a CPU, with stand-ins")
    parser.add_argument("--build", action="store_true", help="compile b12x 1.1's extensions, and exit")
    parser.add_argument("--rank", type=int, help="for its own use: be one of the ranks")
    given = parser.parse_args()
    if given.build:
        from extensions import build

        return build()
    if given.spec is None or given.result is None:
        parser.error("SPEC and RESULT are needed, or --build")
    spec = json.loads(given.spec.read_text())
    if given.rank is not None:
        from worker import be_rank

        return be_rank(given.rank, spec, given.result)
    from ranks import supervise

    return supervise({**spec, "dry": given.dry or bool(spec.get("dry"))}, given.result)


if __name__ == "__main__":
    sys.exit(main())
