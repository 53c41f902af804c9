"""Reading what workers wrote: sums, findings, and files that are none."""

from __future__ import annotations

import ast
import copy
import json
from pathlib import Path
from typing import Any

import pytest
from neaptide.errors import ExitCode, NeaptideError
from neaptide.ledger import live
from neaptide.ledger.live import read_live, run_live
from neaptide.output import Progress

ROOT = Path(__file__).resolve().parents[2]
RANK: dict[str, Any] = {
    "device": "a card", "free_bytes": 500, "large_blocks": [], "pcie_held_bytes": 0, "rank": 1,
    "regions": [
        {"bytes": 300, "in_torch": True, "name": "KV cache"}, {"bytes": 199, "in_torch": False, "name": "context"},
    ],
    "residue_bytes": 1, "residue_share": 0.005, "schema_version": 1, "total_bytes": 1000,
}  # fmt: skip


def file(folder: Path, **changes: Any) -> Path:
    path = folder / f"ledger.rank{changes.get('rank', 1)}.json"
    path.write_text(json.dumps({**copy.deepcopy(RANK), **changes}))
    return path


def test_ranks_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run_live([file(tmp_path), file(tmp_path, rank=0)], Progress())
    assert (code, [one["rank"] for one in out["ranks"]], out["findings"]) == (ExitCode.DONE, [0, 1], [])
    shown = capsys.readouterr().err
    assert "KV cache\t0.0\ttorch" in shown
    assert "in no region\t0.0\t0.50% of what is not KV cache" in shown


def test_a_rank_twice_is_refused(tmp_path: Path) -> None:
    path = file(tmp_path)
    with pytest.raises(NeaptideError, match="rank 1 twice; wanted one file a rank"):
        run_live([path, path], Progress())


def test_a_large_residue_and_a_block_without_a_name_are_findings(tmp_path: Path) -> None:
    block = {"bytes": 1 << 27, "name": "other tensors", "named": False, "region": "other tensors"}
    path = file(tmp_path, residue_share=0.021, large_blocks=[block])
    code, out = run_live([path], Progress())
    assert code is ExitCode.FINDINGS
    assert out["findings"] == [
        "rank 1: 1 B belong to no region: 2.1% of what is not KV cache, wanted at most 2%",
        "rank 1: a block of 134,217,728 B without a name",
    ]
    assert run_live([file(tmp_path, residue_share=-0.021)], Progress())[0] is ExitCode.FINDINGS


@pytest.mark.parametrize(
    "changes",
    [
        {"regions": RANK["regions"][:1]},
        {"regions": [*RANK["regions"], RANK["regions"][0]]},
        {"free_bytes": 501},
        {"residue_bytes": 0},
    ],
)
def test_parts_that_do_not_sum_to_the_device(changes: dict[str, Any], tmp_path: Path) -> None:
    """A region left out, or counted twice."""
    with pytest.raises(NeaptideError, match=r"the parts sum to .* wanted the device.s 1,000 B"):
        read_live(file(tmp_path, **changes))


@pytest.mark.parametrize("text", ["", "{}", "[1]", json.dumps({**RANK, "regions": "none"})])
def test_another_file(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(NeaptideError, match="a file that a patched vLLM wrote under VLLM_NEAPTIDE_LEDGER_FILE"):
        read_live(path)


def test_a_file_of_another_schema(tmp_path: Path) -> None:
    with pytest.raises(NeaptideError, match="schema_version 2; wanted 1, which this neaptide reads"):
        read_live(file(tmp_path, schema_version=2))


def test_the_schema_is_that_of_the_overlay() -> None:
    """Which writes it, and runs in the engine without this tool."""
    tree = ast.parse((ROOT / "overlay/vllm/v1/worker/memory_ledger.py").read_text())
    (value,) = [node.value for node in tree.body if isinstance(node, ast.Assign)
                and ast.unparse(node.targets[0]) == "SCHEMA_VERSION"]  # fmt: skip
    assert ast.literal_eval(value) == live.SCHEMA_VERSION


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(NeaptideError, match="No such file"):
        read_live(tmp_path / "none.json")
