"""The workspace manager on a real GPU, upstream's and the patched one.

Needs a CUDA device and the vLLM of the pin `current` beside this Python; `neaptide bench workspace` does the runs.
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
MIB = 1 << 20
LARGEST = 1 << 30
Rows = dict[tuple[str, str], dict[str, Any]]


def _missing() -> str:
    """Why this machine cannot run these tests; empty if it can."""
    if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("torch") is None:
        return "vLLM is not installed beside this Python"
    import torch

    return "" if torch.cuda.is_available() else "torch sees no CUDA device"


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(_missing()), reason=_missing() or "runs")]


@pytest.fixture(scope="module")
def rows() -> Rows:
    """Rows of all cases by (case, variant), from one run."""
    command = [sys.executable, "-m", "neaptide", "bench", "workspace", "--root", str(ROOT), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    return {(r["case"], r["variant"]): r for r in json.loads(done.stdout)["rows"]}


def test_views_that_are_kept_hold_at_most_twice_the_last_one(rows: Rows) -> None:
    upstream, patched = rows["growth-views-kept", "upstream"], rows["growth-views-kept", "patched"]
    assert patched["reserved_views_kept_bytes"] <= 2 * LARGEST < upstream["reserved_views_kept_bytes"]
    assert patched["reserved_end_bytes"] == LARGEST


def test_a_plan_leaves_exactly_its_largest_request(rows: Rows) -> None:
    assert rows["growth", "patched"]["reserved_end_bytes"] == LARGEST


def test_no_captured_address_dangles(rows: Rows) -> None:
    upstream, patched = rows["growth-captured-first", "upstream"], rows["growth-captured-first", "patched"]
    assert upstream["dangling_addresses"] == 1
    assert (patched["dangling_addresses"], patched["moves"], patched["refused"]) == (0, 0, 15)
    assert patched["replay_sum_right"]
    planned = rows["growth-captured-planned", "patched"]
    assert (planned["dangling_addresses"], planned["moves"], planned["refused"]) == (0, 0, 0)
    assert planned["replay_sum_right"]


def test_requests_over_the_lock_are_served_beside_the_slot(rows: Rows) -> None:
    row = rows["overflow", "patched"]
    assert row["requests"] == ["served", "served"]
    assert not row["slot_moved"]
    assert row["replays_equal"]
    assert row["replays_equal_at_the_end"]
    assert row["held_after_bytes"] == 0
    assert row["in_capture"] == "refused"


@pytest.mark.parametrize("key", [("overflow", "upstream"), ("overflow-error", "patched")])
def test_the_policy_error_is_upstreams_assertion(key: tuple[str, str], rows: Rows) -> None:
    row = rows[key]
    assert [said.split(":")[0] for said in row["requests"]] == ["refused", "refused"]
    assert all("Workspace is locked" in said for said in row["requests"])
    assert row["replays_equal_at_the_end"]


def test_a_drafts_lane_holds_what_its_graphs_hold(rows: Rows) -> None:
    whole, ours = rows["lanes-whole", "patched"], rows["lanes-graphs-only", "patched"]
    assert whole["lane_1_bytes"] == whole["lane_0_bytes"] == 16 * 524288 * 132 + MIB
    assert (ours["lane_0_bytes"], ours["lane_1_bytes"]) == (whole["lane_0_bytes"], MIB)
