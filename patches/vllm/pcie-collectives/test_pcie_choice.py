"""Which groups are served: each thing that is missing, which of several is said, and one answer for all ranks."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from vllm.distributed.device_communicators.pcie_choice import Found, agreed_refusal, refusal, worth_a_line

WELL = Found("auto", "listed", 4, capability=(12, 0), peers=True)
# What is missing, in the order in which it is said, and a word of the reason.
MISSING: dict[str, tuple[dict[str, Any], str]] = {
    "off": ({"asked": "0"}, "switched off"),
    "obstacle": ({"obstacle": "not the CUDA platform"}, "not the CUDA platform"),
    "ranks": ({"world_size": 9}, "9 ranks"),
    "architecture": ({"capability": (9, 0)}, "compute capability 9.0"),
    "mig": ({"mig": True}, "MIG"),
    "peers": ({"peers": False}, "no peer access"),
    "ubatches": ({"ubatches": True}, "DBO"),
    "nvlink": ({"nvlink": True}, "more than two GPUs without NVLink"),
    "runtime": ({"runtime": "no b12x"}, "no b12x"),
}


def without(*names: str) -> Found:
    changes: dict[str, Any] = {}
    for name in names:
        changes |= MISSING[name][0]
    return replace(WELL, **changes)


def test_four_gpus_without_nvlink_are_served() -> None:
    assert refusal(WELL) == ""
    assert agreed_refusal([WELL] * 4) == ""


@pytest.mark.parametrize("name", MISSING)
def test_each_missing_thing_is_the_reason(name: str) -> None:
    assert MISSING[name][1] in refusal(without(name))


@pytest.mark.parametrize(("first", "second"), list(combinations(MISSING, 2)))
def test_of_two_missing_things_one_is_said(first: str, second: str) -> None:
    assert MISSING[first][1] in refusal(without(first, second))


def test_of_all_missing_things_one_is_said() -> None:
    names = list(MISSING)
    for at, name in enumerate(names):
        assert MISSING[name][1] in refusal(without(*names[at:]))


@pytest.mark.parametrize("world_size", [0, 1, 2, 3, 4, 8, 9])
@pytest.mark.parametrize("asked", ["auto", "1"])
def test_how_many_ranks(world_size: int, asked: str) -> None:
    wanted = (2, 4, 8) if asked == "1" else (4, 8)
    served = refusal(replace(WELL, world_size=world_size, asked=asked)) == ""
    assert served == (world_size in wanted)


@pytest.mark.parametrize("capability", [(12, 0), (12, 1), (12, 2), (11, 0), (9, 0), (0, 0)])
def test_architectures_are_listed_or_any(capability: tuple[int, int]) -> None:
    found = replace(WELL, capability=capability)
    assert (refusal(found) == "") == (capability in ((12, 0), (12, 1)))
    assert refusal(replace(found, architectures="any")) == ""


def test_asked_for_nvlink_and_two_ranks_do_not_matter() -> None:
    assert refusal(replace(WELL, asked="1", nvlink=True)) == ""
    assert refusal(replace(WELL, asked="1", world_size=2)) == ""
    assert refusal(replace(WELL, asked="1", runtime="no b12x")) == "no b12x"


def test_a_rank_that_differs_is_named() -> None:
    everyones = [WELL, WELL, replace(WELL, mig=True), WELL]
    assert agreed_refusal(everyones).endswith("(rank 2 of the group)")
    assert "MIG" in agreed_refusal(everyones)


def test_ranks_that_agree_are_not() -> None:
    assert agreed_refusal([replace(WELL, mig=True)] * 4) == refusal(replace(WELL, mig=True))


def test_of_two_reasons_the_first_ranks_is_said() -> None:
    everyones = [WELL, replace(WELL, peers=False), replace(WELL, asked="0"), WELL]
    assert agreed_refusal(everyones) == f"{refusal(everyones[1])} (rank 1 of the group)"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, True),
        ({"asked": "0"}, False),
        ({"asked": "1", "obstacle": "several nodes", "world_size": 2}, True),
        ({"asked": "1", "nvlink": True}, True),
        ({"obstacle": "several nodes"}, False),
        ({"nvlink": True}, False),
        ({"world_size": 2}, False),
        ({"world_size": 3}, True),
        ({"runtime": "no b12x"}, True),
        ({"peers": False}, True),
    ],
)
def test_what_is_worth_a_line(changes: dict[str, Any], said: bool) -> None:
    assert worth_a_line([replace(WELL, **changes)] * 4) == said


def test_one_rank_that_was_asked_is_enough_for_a_line() -> None:
    off = replace(WELL, asked="0")
    assert worth_a_line([off, replace(WELL, asked="1"), off])
    assert not worth_a_line([off, off])
