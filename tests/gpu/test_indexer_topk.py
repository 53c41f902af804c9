"""The paged indexer's real selections on a GPU, pristine and patched, over given scores; needs no Blackwell.

The trees hold b12x before 1.3: NEAPTIDE_TEST_B12X_PATCHED, or the one on PYTHONPATH, and NEAPTIDE_TEST_B12X_UPSTREAM
for what is compared with it. NEAPTIDE_TEST_RESULTS keeps the results. ``indexer_topk_child.py`` runs by itself, too.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kernel_needs import without_kernels

CHILD = Path(__file__).with_name("indexer_topk_child.py")
PACKAGE = "b12x.attention.nsa_indexer"
RUN_SECONDS = 500
Row = dict[str, Any]


def _tree(variant: str) -> str:
    """Folder of a variant's package; empty if there is none."""
    given = os.environ.get(f"NEAPTIDE_TEST_B12X_{variant.upper()}", "")
    if given or variant != "patched" or (found := importlib.util.find_spec("b12x")) is None or found.origin is None:
        return given
    return str(Path(found.origin).parents[1])


def _missing() -> str:
    """Why this machine cannot run these tests; empty if it can."""
    if why := without_kernels():
        return why
    if not (Path(_tree("patched")) / PACKAGE.replace(".", "/")).is_dir():
        return f"no tree with {PACKAGE}: set NEAPTIDE_TEST_B12X_PATCHED"
    return ""


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(_missing()), reason=_missing() or "runs")]


def _rows(tmp: Path, variant: str) -> dict[str, Row]:
    keep = os.environ.get("NEAPTIDE_TEST_RESULTS")
    output = (Path(keep) if keep else tmp) / f"indexer-topk-{variant}.json"
    command = [sys.executable, str(CHILD), _tree(variant), str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_SECONDS, check=False)
    assert output.exists(), done.stderr[-3000:]
    return {row["case"]: row for row in json.loads(output.read_text())["rows"]}


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Row]:
    return _rows(tmp_path_factory.mktemp("patched"), "patched")


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Row]:
    if not _tree("upstream"):
        pytest.skip("NEAPTIDE_TEST_B12X_UPSTREAM names no tree")
    return _rows(tmp_path_factory.mktemp("upstream"), "upstream")


def test_every_selection_is_a_top_k(patched: dict[str, Row]) -> None:
    """Fold, carry and physical slots; also of few pages, of rows shorter than top-k, of equal and of near scores."""
    assert {name: row for name, row in patched.items() if not row["equal"]} == {}
    assert {name: row for name, row in patched.items() if row["graph_wrong_rows"]} == {}


def test_no_call_allocates(patched: dict[str, Row]) -> None:
    made = {name: [row.get(kind) for kind in ("allocations", "peak_bytes")] for name, row in patched.items()}
    assert made == {name: [0, 0] for name in patched}
    # What any capture takes, of no size of the call.
    assert {row["graph_pool_bytes"] for row in patched.values()} == {2 << 20}


@pytest.mark.parametrize(("rows", "tokens", "slices"), [(48, 524_288, 32), (64, 524_288, 32), (48, 768_000, 47)])
def test_a_decode_call_folds_in_its_plan(patched: dict[str, Row], rows: int, tokens: int, slices: int) -> None:
    fold, carry = patched[f"fold-{rows}x{tokens}"], patched[f"carry-{rows}x{tokens}"]
    chunks = -(-tokens // 32_768)
    assert fold["launches"] == {"tiled": chunks, "row": 1}
    assert carry["launches"] == patched[f"physical-{rows}x{tokens}"]["launches"] == {"tiled": chunks}
    held = rows * (slices * 2048 * 8 + 4)
    assert 0 <= fold["plan_bytes"] - carry["plan_bytes"] <= held
    ratio = fold["selection_us"] / carry["selection_us"]
    print(f"{rows} rows, {tokens:,} tokens: the fold takes {ratio:.2f} of the carry's time")


def test_a_prefill_plan_folds_few_rows(patched: dict[str, Row]) -> None:
    assert "row" not in patched["prefill-400x524288"]["launches"]
    assert patched["prefill-few-rows"]["launches"] == {"tiled": 16, "row": 1}


def test_a_budget_is_kept_by_launches_of_fewer_rows(patched: dict[str, Row]) -> None:
    row = patched["prefill-budget"]
    assert row["plan_bytes"] <= row["budget_bytes"] == 192 << 20
    assert row["launches"] == {"tiled": 2 * 4}


@pytest.mark.parametrize("rows", [48, 64])
def test_upstream_allocates_what_the_plan_holds_now(
    upstream: dict[str, Row], patched: dict[str, Row], rows: int
) -> None:
    before, after = upstream[f"fold-{rows}x524288"], patched[f"fold-{rows}x524288"]
    assert before["launches"] == after["launches"]
    assert before["equal"]
    assert before["allocations"] == 3
    assert before["peak_bytes"] >= rows * (32 * 2048 * 8 + 4)
    assert before["graph_pool_bytes"] >= before["peak_bytes"]
    assert after["plan_bytes"] < before["plan_bytes"] + before["peak_bytes"]
