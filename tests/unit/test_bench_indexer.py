"""The indexer bench without a GPU: its cases, how variants are compared, and what it prints."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from neaptide.bench.engine import Bench, Variant
from neaptide.bench.indexer import (
    SWITCHES,
    choose_cases,
    compare_ladders,
    decode_line,
    ladder_line,
    measure,
    plot,
)
from neaptide.bench.indexer_cases import CASES, Decode, Ladder
from neaptide.bench.parts import run_child
from neaptide.errors import NeaptideError
from neaptide.output import Progress

MIB = 1 << 20


def ladder(variant: str, launches: int, seconds: float, hashes: list[int]) -> dict[str, Any]:
    return {
        "case": "one", "variant": variant, "outcome": "done", "launches": launches, "seconds": seconds,
        "hashes": hashes, "growth_first_chunk_bytes": MIB, "growth_after_first_chunk_bytes": 2 * MIB,
        "cuda_mallocs": 3, "peak_bytes": 4 * MIB, "reserved_bytes": [MIB, 3 * MIB],
    }  # fmt: skip


def test_ladders_are_whole_and_have_other_names_than_decode_steps() -> None:
    for name, case in CASES.items():
        assert case.name == name
        if isinstance(case, Ladder):
            assert case.total % case.chunk == 0
    assert choose_cases(["8192-to-98304"]) == [CASES["8192-to-98304"]]
    assert choose_cases([]) == list(CASES.values())


def test_an_unknown_case_names_the_known_ones() -> None:
    with pytest.raises(NeaptideError, match="no case 'nope'") as caught:
        choose_cases(["nope"])
    assert "3072-to-196608" in str(caught.value)


def test_ladders_are_compared_with_upstream() -> None:
    """Bytes and launches with the pristine vLLM, time with policy ``upstream`` of the same process."""
    rows = [
        ladder("upstream", 100, 2.0, [1, 2, 3]), ladder("constant_bytes", 101, 1.0, [1, 9, 9]),
        ladder("policy upstream", 100, 4.0, [1, 2, 3]),
    ]  # fmt: skip
    compare_ladders(rows[:2])
    assert rows[1]["time_ratio"] == 0.5
    for row, hashes in zip(rows, ([1, 2, 3], [1, 9, 9], [1, 2, 3]), strict=True):
        row["hashes"] = hashes
    compare_ladders(rows)
    assert ladder_line(rows[0])[2:] == ["100 / 1.000", "1 / 2", "3", "4", "1.000", "0"]
    assert ladder_line(rows[1])[2:] == ["101 / 1.010", "1 / 2", "3", "4", "0.250", "2"]
    assert all("hashes" not in row for row in rows)


def test_a_ladder_without_upstream_is_not_compared() -> None:
    rows = [{"case": "one", "variant": "upstream", "outcome": "failed"}, ladder("constant_bytes", 1, 1.0, [1])]
    compare_ladders(rows)
    assert ladder_line(rows[1])[2] == "1 / "
    assert "time_ratio" not in rows[1]


def test_a_decode_line_has_the_replay_or_its_error() -> None:
    row = {
        "case": "d", "tiles": 2, "rows_of_unequal_scores": 0, "rows_of_other_sets": 5, "rows_of_other_set_scores": 0,
        "untiled_peak_bytes": 4 * MIB, "tiled_peak_bytes": 2 * MIB, "time_ratio": 1.05,
        "tiled_graph_error": "capture failed",
    }  # fmt: skip
    assert decode_line(row)[1:] == ["2", "0 / 5 / 0", "4 / 2", " / ", "capture failed", "1.050"]
    row["tiled_graph_replay_rows_of_other_set_scores"] = 0
    assert decode_line(row)[5] == "0"


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A child that says which switches it saw, and does not know the case `lost`."""
    child = tmp_path / "child.py"
    child.write_text(
        "import json, os, sys\n"
        "cases = json.load(open(sys.argv[1]))['cases']\n"
        f"seen = {{n: os.environ.get(n) for n in {SWITCHES!r}}}\n"
        "policies = json.load(open(sys.argv[1]))['policies']\n"
        "rows = [{'case': c['name'], 'outcome': 'done', 'seen': seen, 'policy': p}\n"
        "        for c in cases if c['name'] != 'lost' for p in policies]\n"
        "json.dump({'rows': rows, 'device': 'none', 'versions': {}}, open(sys.argv[2], 'w'))\n"
        "sys.exit('it ended early')\n"
    )
    monkeypatch.setattr("neaptide.bench.parts.CHILD", child)
    for name in SWITCHES:
        monkeypatch.setenv(name, "inherited")
    return tmp_path


def bench(scratch: Path) -> Bench:
    return Bench(python=Path(sys.executable), package=scratch, scratch=scratch, progress=Progress())


def test_a_child_inherits_no_switch_and_a_lost_case_is_a_failure(stand_in: Path) -> None:
    cases = [Decode("one", 1, 1), Decode("lost", 1, 1)]
    found = run_child(bench(stand_in), Variant("patched", {}), cases, {"policies": [None]}, unset=SWITCHES)
    assert [row["outcome"] for row in found["rows"]] == ["done", "failed"]
    assert found["rows"][0]["seen"] == dict.fromkeys(SWITCHES)
    assert "it ended early" in found["rows"][1]["error"]


def test_ladders_run_once_for_each_policy_and_decode_steps_once(stand_in: Path) -> None:
    cases = [CASES["8192-to-98304"], CASES["decode-6-of-131072"]]
    plain = Variant("any", {})
    result = measure(bench(stand_in), plain, plain, cases)
    variants = ("upstream", "policy upstream", "constant_bytes", "fixed_width")
    assert [(r["case"], r["variant"]) for r in result["rows"]] == [
        *(("8192-to-98304", variant) for variant in variants), ("decode-6-of-131072", "tiled"),
    ]  # fmt: skip
    assert json.loads(json.dumps(result)) == result


def test_the_plot_has_every_case(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [ladder("upstream", 1, 1.0, []), {**ladder("constant_bytes", 1, 1.0, []), "case": "two"}]
    plot(rows, tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").read_text().count('<g id="axes_') == 2
