"""Two processes that are the ranks of a gloo group, and what each of them printed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def found_by_two(program: Path, cases: Iterable[str], seconds: float) -> dict[str, list[dict[str, Any]]]:
    """For each case, what rank 0 and rank 1 came to.

    Args:
        program: is given its rank and ``HOST:PORT`` of the rendezvous, and prints a line ``["case", {...}]`` for each.
        seconds: in which both have to end.
    """
    from torch.distributed import TCPStore

    probe = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    port = probe.port
    del probe
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program), str(rank), f"localhost:{port}"], stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(2)
    ]  # fmt: skip
    end, outputs = time.monotonic() + seconds, []
    try:
        outputs = [rank.communicate(timeout=max(end - time.monotonic(), 1)) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], [error[-2000:] for _, error in outputs]
    rows = [dict(json.loads(line) for line in out.splitlines() if line.startswith('["')) for out, _ in outputs]
    return {name: [row[name] for row in rows] for name in cases}
