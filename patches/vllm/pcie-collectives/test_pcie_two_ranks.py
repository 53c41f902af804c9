"""Two gloo ranks that make PCIe collectives together: all or none, and nobody waits for a peer that does not come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gloo_ranks import found_by_two
from pcie_rank import CASES, PATIENCE_SECONDS

RUN_SECONDS = 100
Found = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def found() -> Found:
    """For each case, what rank 0 and rank 1 came to."""
    return found_by_two(Path(__file__).with_name("pcie_rank.py"), CASES, RUN_SECONDS)


def lines(ranks: list[dict[str, Any]]) -> list[str]:
    """The one line that each rank has said."""
    assert [len(rank["lines"]) for rank in ranks] == [1, 1]
    return [rank["lines"][0] for rank in ranks]


@pytest.mark.parametrize("case", ["all_serve", "attached_on_both"])
def test_all_serve(case: str, found: Found) -> None:
    ranks = found[case]
    assert [(rank["made"], rank["error"]) for rank in ranks] == [(True, "")] * 2
    for line in lines(ranks):
        assert "tp:0" in line
        assert "all-reduce" in line
        assert "123 bytes" in line
    if case == "attached_on_both":
        assert "oneshot up to 84 KiB" in lines(ranks)[0]
        assert "ring from 1,024 KiB to 36 MiB" in lines(ranks)[0]


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("one_has_no_b12x", "no b12x (rank 1 of the group)"),
        ("one_cannot_make_it", "rank 1 of the group: OSError: cannot map peers"),
        ("one_fails_at_the_end_and_captures_go_on", "rank 1 of the group: OSError: cannot map peers"),
        ("one_is_switched_off", "switched off (rank 1 of the group)"),
    ],
)
def test_one_that_cannot_is_enough_for_none(case: str, why: str, found: Found) -> None:
    ranks = found[case]
    assert [(rank["made"], rank["error"]) for rank in ranks] == [(False, "")] * 2
    for line in lines(ranks):
        assert "not used, because" in line
        assert why in line
        assert "123 bytes" not in line
    assert max(rank["seconds"] for rank in ranks) < PATIENCE_SECONDS


def test_a_group_need_not_begin_at_the_first_device(found: Found) -> None:
    """As that of the second stage of a pipeline, or of another replica on the same machine."""
    assert [rank["made"] for rank in found["the_upper_half_of_the_devices"]] == [True, True]


@pytest.mark.parametrize("case", ["one_has_a_ring", "one_has_a_wrong_value"])
def test_ranks_whose_switches_differ_do_not_wait_for_each_other(case: str, found: Found) -> None:
    """Communicators are made before the switches of all ranks are compared."""
    ranks = found[case]
    assert ranks[0]["made"] == ranks[1]["made"]
    assert max(rank["seconds"] for rank in ranks) < PATIENCE_SECONDS, [rank["error"] for rank in ranks]
