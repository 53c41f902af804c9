"""The sparse indexer's logits on a real GPU, through the functions of an installed vLLM, pristine and patched.

Needs a CUDA device and the vLLM of the pin `current` beside this Python; `neaptide bench indexer` does the runs.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUDGET = 512 << 20


def _missing() -> str:
    """Why this machine cannot run these tests; empty if it can."""
    if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("torch") is None:
        return "vLLM is not installed beside this Python"
    import torch

    return "" if torch.cuda.is_available() else "torch sees no CUDA device"


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(_missing()), reason=_missing() or "runs")]


LADDERS = ("3072-to-196608", "kpool4-4608-to-225792")
DECODES = ("decode-256-of-1048576", "decode-786-of-1048576", "decode-128x4-of-1048576")
Rows = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def rows() -> Rows:
    """Rows of all cases by (case, variant), from one run."""
    command = [sys.executable, "-m", "neaptide", "bench", "indexer", "--root", str(ROOT), "--json"]
    command += [part for case in (*LADDERS, *DECODES) for part in ("--case", case)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    return {(r["case"], r["variant"]): r for r in json.loads(done.stdout)["rows"]}


@pytest.mark.parametrize("case", LADDERS)
def test_a_prefill_leaves_nothing_behind_its_first_chunk(case: str, rows: Rows) -> None:
    upstream, constant = rows[case, "upstream"], rows[case, "constant_bytes"]
    assert upstream["growth_after_first_chunk_bytes"] > 0
    # The index arrays of each chunk take a few segments of the small-block pool (2 MiB); logits take none.
    assert constant["growth_after_first_chunk_bytes"] <= 16 << 20
    assert constant["growth_first_chunk_bytes"] <= BUDGET + (8 << 20)
    assert constant["peak_bytes"] < upstream["peak_bytes"]
    assert constant["launches"] <= upstream["launches"] * 1.01
    assert constant["rows_of_other_sets"] == 0


@pytest.mark.parametrize("case", DECODES)
def test_decode_in_tiles_is_exact_and_within_the_budget(case: str, rows: Rows) -> None:
    row = rows[case, "tiled"]
    assert row["tiles"] > 1
    assert row["rows_of_unequal_scores"] == 0
    assert row["rows_of_other_set_scores"] == 0
    assert row["tiled_peak_bytes"] <= BUDGET + (8 << 20) < row["untiled_peak_bytes"]
    assert row["tiled_graph_replay_rows_of_other_set_scores"] == 0
    assert row["tiled_graph_bytes"] < row["untiled_graph_bytes"]
