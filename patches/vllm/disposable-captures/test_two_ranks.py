"""The disposable scope of two ranks: what a rank is told when its peer fails, does not come, or has something else."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

PATIENCE_AFTER_FAILURE_SECONDS = 2.0
RUN_SECONDS = 120


class Counter:
    """A participant: ``made`` things, ``kept`` of them at the checkpoint. Its rollback meets the peer's."""

    def __init__(self, group: Any) -> None:
        self.group, self.made, self.kept = group, 1, 0

    def checkpoint(self) -> None:
        self.kept = self.made

    def rollback(self) -> None:
        import torch
        import torch.distributed as dist

        total = torch.tensor(self.made)
        dist.all_reduce(total, group=self.group)
        assert int(total) == 2 * self.made
        self.made = self.kept


class Failing(Counter):
    def checkpoint(self) -> None:
        raise OSError("no checkpoint")


def both_well(rank: int, scope: Any, counter: Counter, registry: Any) -> None:
    with scope():
        counter.made += 3


def fifty_times(rank: int, scope: Any, counter: Counter, registry: Any) -> None:
    for _ in range(50):
        both_well(rank, scope, counter, registry)


def one_raises(rank: int, scope: Any, counter: Counter, registry: Any) -> None:
    with scope():
        counter.made += 3
        if rank == 1:
            raise ValueError("capture failed here")


def one_raises_and_the_other_is_stuck(rank: int, scope: Any, counter: Counter, registry: Any) -> None:
    with scope():
        counter.made += 3
        if rank == 1:
            raise ValueError("capture failed here")
        time.sleep(2 * PATIENCE_AFTER_FAILURE_SECONDS)


def one_cannot_checkpoint(rank: int, scope: Any, counter: Counter, registry: Any) -> None:
    failing = Failing(counter.group) if rank == 1 else Counter(counter.group)
    registry.register_capture_participant(failing, counter.group)
    with scope():
        counter.made += 3


def one_has_lost_its_participant(rank: int, scope: Any, counter: Counter, registry: Any) -> None:
    other: Any = Counter(counter.group)
    registry.register_capture_participant(other, counter.group)
    if rank == 1:
        other = None
    with scope():
        counter.made += 3
    del other


def one_gains_a_participant_inside(rank: int, scope: Any, counter: Counter, registry: Any) -> None:
    other = Counter(counter.group)
    with scope():
        counter.made += 3
        if rank == 1:
            registry.register_capture_participant(other, counter.group)


CASES: dict[str, Callable[[int, Any, Counter, Any], None]] = {
    case.__name__: case
    for case in (
        both_well, fifty_times, one_raises, one_raises_and_the_other_is_stuck, one_cannot_checkpoint,
        one_has_lost_its_participant, one_gains_a_participant_inside,
    )
}  # fmt: skip


def be_rank(rank: int, rendezvous: str) -> None:
    """Run all cases as one of two ranks, and print what each came to."""
    import torch
    import torch.distributed as dist
    from vllm.distributed import capture_scopes

    capture_scopes.PATIENCE_AFTER_FAILURE_SECONDS = PATIENCE_AFTER_FAILURE_SECONDS
    dist.init_process_group(
        "gloo", init_method=f"tcp://{rendezvous}", rank=rank, world_size=2, timeout=timedelta(seconds=30)
    )
    for name, case in CASES.items():
        # A group and a registry for each: an earlier case may have left its own in the middle.
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=20))
        capture_scopes._registry = capture_scopes._Registry()
        counter, message, began = Counter(group), "", time.monotonic()
        capture_scopes.register_capture_participant(counter, group)
        try:
            with torch.inference_mode():
                case(rank, capture_scopes.disposable_captures, counter, capture_scopes)
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
        found = {"message": message, "made": counter.made, "seconds": time.monotonic() - began}
        print(json.dumps([name, {**found, "open": capture_scopes.in_disposable_capture()}]), flush=True)
        dist.barrier()


@pytest.fixture(scope="module")
def found() -> dict[str, list[dict[str, Any]]]:
    """For each case, what rank 0 and rank 1 came to."""
    # This file is a rank's program, too, without the helpers on its path.
    from gloo_ranks import found_by_two

    return found_by_two(Path(__file__), CASES, RUN_SECONDS)


@pytest.mark.parametrize("case", ["both_well", "fifty_times"])
def test_what_was_made_inside_is_gone(case: str, found: dict[str, list[dict[str, Any]]]) -> None:
    assert [(rank["message"], rank["made"]) for rank in found[case]] == [("", 1), ("", 1)]


def test_a_peers_exception_is_an_error_here_and_both_have_rolled_back(found: dict[str, list[dict[str, Any]]]) -> None:
    healthy, failed = found["one_raises"]
    assert failed["message"] == "ValueError: capture failed here"
    assert healthy["message"].startswith("RuntimeError: captures discarded")
    assert "rank 1 of the group: ValueError: capture failed here" in healthy["message"]
    assert [healthy["made"], failed["made"]] == [1, 1]


def test_a_failed_rank_does_not_wait_for_a_peer_that_is_stuck(found: dict[str, list[dict[str, Any]]]) -> None:
    stuck, failed = found["one_raises_and_the_other_is_stuck"]
    assert failed["message"] == "ValueError: capture failed here"
    assert failed["seconds"] < 1.8 * PATIENCE_AFTER_FAILURE_SECONDS
    assert "rank 1 of the group waited 2 s for ranks [0]" in stuck["message"]
    # Nobody frees what a peer still has.
    assert [stuck["made"], failed["made"]] == [4, 4]


def test_a_checkpoint_that_fails_on_one_rank_stops_both(found: dict[str, list[dict[str, Any]]]) -> None:
    healthy, failed = found["one_cannot_checkpoint"]
    assert failed["message"] == "OSError: no checkpoint"
    assert "rank 1 of the group failed to checkpoint: OSError: no checkpoint" in healthy["message"]
    assert [healthy["made"], failed["made"]] == [1, 1]


def test_ranks_with_different_participants_capture_nothing(found: dict[str, list[dict[str, Any]]]) -> None:
    for rank in found["one_has_lost_its_participant"]:
        assert "not begun: ranks have different capture participants: [['" in rank["message"]
        assert rank["made"] == 1


def test_a_participant_that_only_one_rank_gains_inside_is_an_error_on_both(
    found: dict[str, list[dict[str, Any]]],
) -> None:
    for rank in found["one_gains_a_participant_inside"]:
        assert "left something behind: ranks have different capture participants" in rank["message"]
        assert rank["made"] == 4


def test_no_scope_stays_open(found: dict[str, list[dict[str, Any]]]) -> None:
    assert not any(rank["open"] for ranks in found.values() for rank in ranks)


if __name__ == "__main__":
    be_rank(int(sys.argv[1]), sys.argv[2])
