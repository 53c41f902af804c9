"""Two processes over gloo: one rank leaves transient captures by an exception, wherever its peer has got to by then.

Both ranks end, the pool is as it was, and a second try works. The children are those of ``b12x_pools``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch.distributed as dist
from b12x_pools import A2A, EXCHANGE_SECONDS, ONESHOT, Rank

Logs = list[dict[str, Any]]
PLACES = ("before", "in", "between", "in nested", "after")


def go_to_capture(pool: Any) -> None:
    with pool.capture(41, channel_id="next"):
        pass


def go_to_group(pool: Any) -> None:
    with pool.capture(42, channel_id="b"):
        pass


def swallow(pool: Any) -> None:
    """A caller that treats each graph's error as its own, and goes on."""
    for name in ("next", "and next"):
        with pytest.raises(RuntimeError, match="leave me"):
            pool.prepare_channels([name])


GOES_ON: dict[str, Callable[[Any], None]] = {
    "to a capture": go_to_capture,
    "to a capture of the group": go_to_group,
    "to prepare": lambda pool: pool.prepare_channels(["next"]),
    "to release": lambda pool: pool.release(["b"]),
    "past errors": swallow,
    "to the end": lambda pool: None,
}


def body(pool: Any, place: str, leave: Callable[[], None]) -> None:
    """Two captures with a nested one; ``leave`` is called at one place."""

    def at(here: str) -> None:
        if here == place:
            leave()

    at("before")
    with pool.capture(11, channel_id="a"):
        at("in")
    at("between")
    with pool.capture(12, channel_id="b"), pool.capture(13, channel_id="new"):
        at("in nested")
    at("after")


class Leave(Exception):
    pass


def state(rank: Rank) -> list[Any]:
    pool = rank.pool
    bindings = [channel._owner_stream_key for channel in pool._all_channels]
    captured, streams = sorted(pool._captured_channel_ids), sorted(pool._channels)
    return [rank.catalog(), captured, streams, bindings, len(rank.machine.alive())]


def scenario_places(rank: Rank) -> None:
    pool = rank.pool
    pool.prepare_channels(["eager"])
    pool.for_stream(7, channel_id="eager")
    pool.prepare_channels(["a", "b"], replay_group="g")
    before = state(rank)
    for place in PLACES:
        for goes_on, go in GOES_ON.items():

            def leave(go: Callable[[Any], None] = go) -> None:
                if rank.rank:
                    raise Leave("leave me")
                go(pool)

            name = f"{place}, {goes_on}"
            with rank.error(name), pool.transient_captures():
                body(pool, place, leave)
            rank.log[f"{name}: as before"] = state(rank) == before
    with pool.transient_captures():
        body(pool, "", lambda: None)
    rank.log["retry"] = state(rank) == before


def scenario_both(rank: Rank) -> None:
    with rank.error("left"), rank.pool.transient_captures(), rank.pool.capture(1, channel_id="a"):
        raise Leave(f"rank {rank.rank}")
    with rank.error("only one goes on"), rank.pool.transient_captures():
        if rank.rank:
            rank.pool.prepare_channels(["a"])
    rank.log["alive"] = len(rank.machine.alive())
    rank.pool.prepare_channels(["a"])


def scenario_unmap(rank: Rank) -> None:
    """The freeing fails on the rank that did not raise."""
    with rank.error("left"), rank.pool.transient_captures() as checkpoint:
        with rank.pool.capture(1, channel_id="a"):
            rank.machine.channels[0].unmap_fails = rank.rank == 0
        if rank.rank:
            raise Leave("leave me")
    rank.log["after"] = rank.freed()
    rank.machine.channels[0].unmap_fails = False
    rank.pool.rollback_channels(checkpoint)
    rank.log["retry"] = rank.freed()


def leave_outer(rank: Rank, inner: Any, *, capture: bool, after: bool) -> None:
    """Rank 1 leaves the outer of two scopes, and rank 0 is in the inner one."""
    with rank.error("left"), rank.pool.transient_captures():
        with rank.pool.capture(1, channel_id="outer"):
            pass
        if after:
            with inner.transient_captures():
                inner.prepare_channels(["inner"])
        if rank.rank:
            raise Leave("leave me")
        with inner.transient_captures():
            if capture:
                inner.prepare_channels(["inner"])
    rank.log["alive"] = len(rank.machine.alive())
    with rank.pool.transient_captures(), inner.transient_captures():
        inner.prepare_channels(["inner"])
    rank.log["retry"] = len(rank.machine.alive())


def scenario_outer(rank: Rank) -> None:
    leave_outer(rank, rank.pool, capture=False, after=False)


def scenario_outer_later(rank: Rank) -> None:
    leave_outer(rank, rank.pool, capture=True, after=True)


def scenario_other_pool(rank: Rank) -> None:
    """Both pools exchange through one group."""
    other = rank.machine.pool({A2A: ONESHOT, ONESHOT: A2A}[rank.kind], rank.group)
    leave_outer(rank, other, capture=False, after=False)


def frees_itself(rank: Rank, step: Callable[[Any, Any], None]) -> None:
    """The peer of the rank that left goes on to free channels by itself."""
    with rank.error("left"), rank.pool.transient_captures() as checkpoint:
        rank.pool.prepare_channels(["a"])
        if rank.rank:
            raise Leave("leave me")
        step(rank.pool, checkpoint)
    rank.log["alive"] = len(rank.machine.alive())
    rank.pool.prepare_channels(["a"])
    rank.log["retry"] = len(rank.machine.alive()) - 1


def scenario_rollback(rank: Rank) -> None:
    frees_itself(rank, lambda pool, checkpoint: pool.rollback_channels(checkpoint))


def scenario_close(rank: Rank) -> None:
    frees_itself(rank, lambda pool, _: pool.close())


def scenario_a_scope_of_its_own(rank: Rank) -> None:
    """Nothing fails, and one rank is within a scope of a pool that the other has no part in."""
    own = rank.machine.factory_pool(rank.kind).transient_captures() if rank.rank else nullcontext()
    with rank.error("ended"), own, rank.pool.transient_captures():
        rank.pool.prepare_channels(["a"])
    rank.log["alive"] = len(rank.machine.alive())


def scenario_two_groups(rank: Rank) -> None:
    """A rank that leaves scopes of two groups could wait in one of them for a peer that waits in the other."""
    other = rank.machine.pool(rank.kind, dist.new_group([0, 1]))
    with rank.error("refused"), rank.pool.transient_captures():
        rank.pool.prepare_channels(["a"])
        with other.transient_captures():
            rank.log["entered"] = True
    rank.log["alive"] = len(rank.machine.alive())
    with rank.error("one after another"):
        for pool in (rank.pool, other):
            with pool.transient_captures():
                pool.prepare_channels(["a"])
    rank.log["retry"] = len(rank.machine.alive())


def test_scopes_of_two_groups_are_refused_on_both_ranks(runs: dict[str, Logs], kind: str) -> None:
    for log in runs[f"two_groups-{kind}"]:
        assert "exchanges through another group" in log["refused"]
        assert "entered" not in log
        assert (log["alive"], log["one after another"], log["retry"]) == (0, None, 0)


def require_ended(logs: Logs) -> None:
    for log in logs:
        assert log["seconds"] < EXCHANGE_SECONDS, "a rank waited for one that had gone"
        assert "raised" not in log, log["raised"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("goes_on", GOES_ON)
def test_places(runs: dict[str, Logs], kind: str, place: str, goes_on: str) -> None:
    logs, name = runs[f"places-{kind}"], f"{place}, {goes_on}"
    require_ended(logs)
    assert logs[1][name] == "Leave: leave me", "its own exception comes out"
    assert logs[0][name].startswith("RuntimeError: ")
    assert "group rank 1: " in logs[0][name]
    assert "leave me" in logs[0][name]
    assert [log[f"{name}: as before"] for log in logs] == [True, True]
    assert [log["retry"] for log in logs] == [True, True]


def test_both(runs: dict[str, Logs], kind: str) -> None:
    logs = runs[f"both-{kind}"]
    require_ended(logs)
    assert [log["left"] for log in logs] == ["Leave: rank 0", "Leave: rank 1"]
    assert all("RuntimeError" in log["only one goes on"] for log in logs)
    assert [log["alive"] for log in logs] == [0, 0]


def test_unmap(runs: dict[str, Logs], kind: str) -> None:
    logs = runs[f"unmap-{kind}"]
    require_ended(logs)
    assert all("group rank 0: " in log["left"] and "unmap failed" in log["left"] for log in logs)
    assert [(log["after"], log["retry"]) for log in logs] == [([False], [True])] * 2


@pytest.mark.parametrize("scenario", ["outer", "outer_later", "other_pool", "rollback", "close"])
def test_where_the_peer_is_elsewhere(runs: dict[str, Logs], kind: str, scenario: str) -> None:
    logs = runs[f"{scenario}-{kind}"]
    require_ended(logs)
    assert logs[1]["left"] == "Leave: leave me"
    assert "leave me" in logs[0]["left"]
    assert [(log["alive"], log["retry"]) for log in logs] == [(0, 0)] * 2


def test_a_scope_of_its_own(runs: dict[str, Logs], kind: str) -> None:
    logs = runs[f"a_scope_of_its_own-{kind}"]
    require_ended(logs)
    assert [(log["ended"], log["alive"]) for log in logs] == [(None, 0)] * 2
