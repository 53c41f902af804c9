"""``neaptide plans``: cases, rows and regions from what the planners answer, and calls that are refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from neaptide.both_trees import Question
from neaptide.errors import NeaptideError
from neaptide.output import Progress
from neaptide.plans import command
from neaptide.plans.cases import CASES, PlanCase, as_spec
from neaptide.session import Options

CASE = PlanCase("decode", 64, 524288)


def answer(nbytes: int, *regions: tuple[str, int], transient: int = 0) -> dict[str, Any]:
    return {
        "case": vars(CASE), "nbytes": nbytes, "transient_bytes": transient, "route": "paged_tiled", "notes": [],
        "regions": [{"name": name, "nbytes": size, "offset": 0, "shares": ""} for name, size in regions],
    }  # fmt: skip


def test_the_cases_are_those_of_the_sizes_in_question() -> None:
    assert len({case.name for case in CASES}) == len(CASES) == len(as_spec())
    assert {case.rows for case in CASES if case.mode == "decode"} == {4, 16, 17, 48, 64}
    assert {case.rows for case in CASES if case.mode == "prefill"} == {256, 512, 1024, 2048, 3072, 4096}
    assert {case.tokens for case in CASES} == {1 << 16, 1 << 19, 1 << 20}
    assert {case.keys for case in CASES} == {"fp8", "mxfp4"}
    assert {case.rows for case in CASES if case.sms == 188} == {4, 16}, "the fused route asks the device"
    assert {(case.keys, case.budget_mib) for case in CASES if case.budget_mib} == {("fp8", 192), ("mxfp4", 1024)}


def test_a_plan_and_its_regions_side_by_side() -> None:
    row = command.compared(
        "r12", answer(200, ("tile", 150), ("fold", 50)), answer(160, ("tile", 150), ("old", 10), transient=7)
    )
    assert command.table_row(row)[:6] == ["r12", CASE.name, "paged_tiled", "160", "200", "7 / 0"]
    assert command.region_rows(row) == [
        ["r12", CASE.name, "tile", "150", "150", ""],
        ["r12", CASE.name, "old", "10", "", ""],
        ["r12", CASE.name, "fold", "", "50", ""],
    ]


def test_a_plan_that_upstream_refuses() -> None:
    refused = {"case": vars(CASE), "none": "too large"}
    row = command.compared("current", refused, refused)
    assert command.table_row(row)[2:4] == ["none", "too large"]
    assert command.region_rows(row) == command.budget_rows(row) == []


def test_a_plan_that_only_a_budget_makes_possible() -> None:
    bounded = answer(96, ("scores", 96)) | {"launches": 3, "given_up": ["3 launches of 32 rows"]}
    row = command.compared("current", bounded, {"case": vars(CASE), "none": "too large"})
    assert command.table_row(row)[2:6] == ["paged_tiled", "too large", "96", " / 0"]
    assert command.budget_rows(row) == [["current", CASE.name, "3", "3 launches of 32 rows"]]
    assert command.region_rows(row) == [["current", CASE.name, "scores", "", "96", ""]]


def test_a_bad_call_is_refused_before_anything_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Question, "asked_at", lambda *given: pytest.fail("went on"))
    with pytest.raises(NeaptideError, match=re.escape("pin 'sparkinfer-de04'; wanted one of current, r12")):
        command.run(Options(root=tmp_path, build=tmp_path, pin="sparkinfer-de04"), Progress())
