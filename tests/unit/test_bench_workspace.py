"""The workspace bench without a GPU: its cases, what it runs with which variant, and what it prints."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from neaptide.bench.engine import Bench, Variant
from neaptide.bench.indexer_cases import CASES as INDEXER_CASES
from neaptide.bench.parts import CHILD
from neaptide.bench.results import graph_rows
from neaptide.bench.workspace import CASES, OVERFLOW, choose_cases, growth_line, lane_line, measure, overflow_line
from neaptide.errors import NeaptideError
from neaptide.output import Progress

MIB = 1 << 20


class Recorded(Bench):
    """A bench whose children only say what they were given."""

    def child(  # type: ignore[override]
        self, script: Path, spec: Mapping[str, Any], variant: Variant, unset: Any = (), environment: Any = None
    ) -> tuple[dict[str, Any] | None, str]:
        asked = [case["name"] for case in spec["cases"]]
        if "lanes-whole" in asked:
            asked.remove("lanes-whole")
        rows = [{"case": name, "outcome": "done", "policy": environment.get(OVERFLOW)} for name in asked]
        return {"rows": rows, "device": "none", "versions": {"vllm": "0"}}, "exit 1: gone"


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Recorded(python=tmp_path, package=tmp_path, scratch=tmp_path, progress=Progress())


def test_an_unknown_case_names_the_known_ones() -> None:
    with pytest.raises(NeaptideError, match="no case 'nope'") as caught:
        choose_cases(["nope"])
    assert "growth-views-kept" in str(caught.value)
    assert choose_cases([]) == list(CASES.values())


def test_upstream_gets_neither_a_policy_nor_what_it_does_not_have(bench: Bench) -> None:
    found = measure(bench, Variant("upstream", {}), Variant("patched", {"a": b""}), choose_cases([]))
    rows = {(r["case"], r["variant"]): r for r in found["rows"]}
    assert {case for case, variant in rows if variant == "patched"} == set(CASES)
    assert not {"overflow-error", "lanes-graphs-only"} & {case for case, variant in rows if variant == "upstream"}
    assert rows["overflow-error", "patched"]["policy"] == "error"
    assert rows["overflow", "patched"]["policy"] is None
    assert found["device"] == "none"


def test_a_case_that_wrote_nothing_has_failed_and_says_how_it_ended(bench: Bench) -> None:
    found = measure(bench, Variant("upstream", {}), Variant("patched", {"a": b""}), choose_cases(["lanes-whole"]))
    assert [(r["outcome"], r["error"]) for r in found["rows"]] == [("failed", "exit 1: gone")] * 2


def test_every_kind_of_case_has_a_function_in_the_child() -> None:
    """Read, not imported: it needs a vLLM."""
    kinds = {case.as_dict()["kind"] for case in (*CASES.values(), *INDEXER_CASES.values())}
    main = ast.parse((CHILD / "__main__.py").read_text())
    runs = next(ast.literal_eval(n.value) for n in main.body if isinstance(n, ast.Assign) and n.targets[0].id == "RUNS")  # type: ignore[attr-defined]
    assert set(runs) == kinds
    for module, function in runs.values():
        defined = ast.parse((CHILD / f"{module}.py").read_text()).body
        found = next(n for n in defined if isinstance(n, ast.FunctionDef) and n.name == function)
        assert [a.arg for a in found.args.args] == ["case", "spec"]


def test_the_sequence_of_the_issue_is_what_is_run() -> None:
    for name in ("growth", "growth-views-kept", "growth-captured-first"):
        sizes = CASES[name].as_dict()["sizes_bytes"]
        assert (sizes[0], sizes[-1], len(sizes)) == (64 * MIB, 1024 * MIB, 16)
    overflow = CASES["overflow"].as_dict()
    assert [round(b / MIB, 2) for b in (overflow["slot_bytes"], *overflow["requests_bytes"])] == [578.5, 607.7, 917.67]


def test_lines() -> None:
    growth = {
        "case": "c", "variant": "v", "peak_reserved_bytes": 2 * MIB, "reserved_views_kept_bytes": MIB,
        "reserved_end_bytes": 3 * MIB // 2, "moves": 3, "refused": 0, "dangling_addresses": 1,
    }  # fmt: skip
    assert growth_line(growth) == ["c", "v", "2", "1", "1.50", "3", "0", "1"]
    overflow = {
        "case": "c", "variant": "v", "requests": ["served", "refused: Workspace is locked"], "slot_moved": False,
        "replays_equal": True, "replays_equal_at_the_end": False, "in_capture": "refused", "held_after_bytes": 0,
    }  # fmt: skip
    assert overflow_line(overflow) == ["c", "v", "served, refused", "False", "False", "refused", "0"]
    assert lane_line({"case": "c", "variant": "v", "lane_0_bytes": MIB, "lane_1_bytes": 0}) == ["c", "v", "1", "0"]


def test_graphs_have_a_line_where_an_engine_estimated_them() -> None:
    boot = {"kv_tokens": 1000, "graph_bytes_estimated": 3 * MIB, "graph_bytes_actual": 2 * MIB}
    row = {"case": "c", "variant": "patched", "outcome": "done", "boot": boot, "requests": []}
    slots = {"slots": [{"committed_bytes": MIB}, {"committed_bytes": 2 * MIB}]}
    with_lanes = {**row, "boot": {**boot, "workspace": slots}}
    without = {**row, "boot": {**boot, "graph_bytes_actual": None}}
    lines = graph_rows([row, with_lanes, without, {"case": "c", "variant": "v", "outcome": "failed"}])
    assert lines == [
        ["c", "patched", "1,000", "3.0", "2.0", "+1.0", "", ""],
        ["c", "patched", "1,000", "3.0", "2.0", "+1.0", "1.0 / 2.0", ""],
    ]
