"""Transient captures in one process: a scope that leaves the pool as it found it, whatever happens inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from b12x_pools import Machine, module


def furnish(pool: Any) -> None:
    """An eager channel, a group of two ids, and a captured graph: three channels."""
    pool.prepare_channels(["eager"])
    pool.for_stream(7, channel_id="eager")
    pool.prepare_channels(["a", "b"], replay_group="g")
    with pool.capture(1, channel_id="graph"):
        pass


def state(pool: Any) -> tuple[object, ...]:
    return (
        list(pool._all_channels), dict(pool._channels), dict(pool._logical_channels), dict(pool._replay_groups),
        set(pool._captured_channel_ids), [channel._owner_stream_key for channel in pool._all_channels],
    )  # fmt: skip


def use(pool: Any, suffix: str = "") -> None:
    """Everything that a profiling run does: captures old and new ids, joins groups, prepares, runs eagerly."""
    with pool.capture(11, channel_id="a"):
        pool.for_stream(11)
    with pool.capture(12, channel_id=f"joined{suffix}", replay_group="g"), pool.capture(13, channel_id=f"new{suffix}"):
        pool.for_stream(13)
    pool.prepare_channels([f"x{suffix}", f"y{suffix}"], replay_group=f"h{suffix}")
    pool.for_stream(15, channel_id="b")


def profile(pool: Any, end: Callable[[Any], object]) -> None:
    """Use a pool within transient captures, and then call ``end`` with the checkpoint."""
    with pool.transient_captures() as checkpoint:
        use(pool)
        end(checkpoint)


def test_what_was_made_inside_is_freed_and_nothing_else(machine: Machine, pool: Any) -> None:
    furnish(pool)
    before, kept = state(pool), list(machine.channels)
    with pool.transient_captures():
        use(pool)
        assert len(machine.alive()) == len(kept) + 2
    assert state(pool) == before
    assert machine.alive() == kept
    use(pool)  # the same ids, for good
    assert len(machine.alive()) == len(kept) + 2


@pytest.mark.parametrize("error", [KeyError("inside"), KeyboardInterrupt()])
@pytest.mark.parametrize("within_capture", [False, True])
def test_an_exception_inside_comes_out_and_the_pool_is_as_before(
    machine: Machine, pool: Any, error: BaseException, within_capture: bool
) -> None:
    furnish(pool)
    before, kept = state(pool), list(machine.channels)

    def fail(_: object) -> None:
        if within_capture:
            with pool.capture(21, channel_id="b"), pool.capture(22, channel_id="other"):
                raise error
        raise error

    with pytest.raises(type(error)) as caught:
        profile(pool, fail)
    assert caught.value is error
    assert state(pool) == before
    assert machine.alive() == kept
    with pool.transient_captures():
        use(pool)
    assert machine.alive() == kept


def test_a_failed_allocation_inside(machine: Machine, pool: Any) -> None:
    furnish(pool)
    before = state(pool)

    def fail(_: object) -> None:
        machine.fail_allocation = True
        pool.prepare_channels(["one more"])

    with pytest.raises(RuntimeError, match="no memory for a slab"):
        profile(pool, fail)
    machine.fail_allocation = False
    assert state(pool) == before
    assert machine.alive() == before[0]


def test_nested_scopes_free_what_is_theirs(machine: Machine, pool: Any) -> None:
    furnish(pool)
    before, kept = state(pool), list(machine.channels)
    with pool.transient_captures():
        pool.prepare_channels(["outer"])
        between = state(pool)
        with pytest.raises(RuntimeError, match="not prepared"):
            profile(pool, lambda _: pool.release(["of nobody"]))
        assert state(pool) == between
        with pool.transient_captures():
            use(pool)
        assert state(pool) == between
        assert machine.alive() == [*kept, *between[0][len(kept) :]]  # type: ignore[index]
    assert state(pool) == before
    assert machine.alive() == kept


def test_a_release_inside(machine: Machine, pool: Any) -> None:
    furnish(pool)
    kept = [channel for channel in machine.channels if channel is not pool._logical_channels["graph"]]
    with pool.transient_captures():
        use(pool)
        pool.release(["graph", "new"])
    assert machine.alive() == kept == pool._all_channels
    assert sorted(pool._logical_channels) == ["a", "b", "eager"]
    assert pool._captured_channel_ids == set()


def test_if_freeing_fails_the_checkpoint_frees_again(machine: Machine, pool: Any) -> None:
    furnish(pool)
    before, kept = state(pool), list(machine.channels)
    given: list[Any] = []

    def fail_to_free(checkpoint: Any) -> None:
        given.append(checkpoint)
        machine.channels[-1].unmap_fails = True

    with pytest.raises(RuntimeError, match=r"IPC unmap.*unmap failed"):
        profile(pool, fail_to_free)
    assert len(machine.alive()) == len(kept) + 2
    machine.channels[-1].unmap_fails = False
    pool.rollback_channels(given[0])
    assert state(pool) == before
    assert machine.alive() == kept


def test_it_is_not_entered_within_a_capture_scope(pool: Any) -> None:
    furnish(pool)
    with (
        pool.capture(1, channel_id="a"),
        pytest.raises(RuntimeError, match="during capture"),
        pool.transient_captures(),
    ):
        pass


def test_a_factory_pools_channels_are_freed_too(machine: Machine, kind: str) -> None:
    pool = machine.factory_pool(kind)
    eager = pool.for_stream(1)
    with pool.transient_captures(), pool.capture(2) as graph:
        assert pool.for_stream(2) is graph
    assert (eager.freed, graph.freed) == (False, True)
    assert pool._channels == {1: eager}


def answered(monkeypatch: pytest.MonkeyPatch, kind: str, peer: Callable[[Any], Any]) -> None:
    """From now on the peer answers like this."""
    monkeypatch.setattr(module(kind), "_broadcast_gather_object", lambda state, group: [state, peer(state)])


def test_a_peer_that_goes_on_for_ever_is_given_up(
    machine: Machine, pool: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    furnish(pool)
    with pytest.raises(RuntimeError, match="a rank goes on while others leave"):
        profile(pool, lambda _: answered(monkeypatch, kind, lambda state: ()))
    assert machine.alive() == machine.channels


def test_ranks_that_made_different_numbers_of_channels_free_nothing(
    machine: Machine, pool: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_more(state: Any) -> Any:
        return tuple(type(value)(int(value) + 1) if str(value) == "41" else value for value in state)

    def make(checkpoint: Any) -> None:
        given.append(checkpoint)
        pool.prepare_channels([f"made {number}" for number in range(39)])
        answered(monkeypatch, kind, one_more)

    given: list[Any] = []
    furnish(pool)
    before = state(pool)
    with pytest.raises(RuntimeError, match=r"different numbers of channels.*'?41'?, '?42'?.*nothing was freed"):
        profile(pool, make)
    assert machine.alive() == machine.channels
    answered(monkeypatch, kind, lambda state: state)
    pool.rollback_channels(given[0])
    assert state(pool) == before


def test_an_abandoned_scope_does_not_wait_for_peers(
    machine: Machine, pool: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Collected by the garbage collector, on one rank and at any time: it may not exchange anything."""
    with pool.transient_captures():
        scope = pool.transient_captures()
        scope.__enter__()
        pool.prepare_channels(["a"])
        exchanged: list[Any] = []
        with monkeypatch.context() as patch:
            patch.setattr(module(kind), "_broadcast_gather_object", lambda state, group: exchanged.append(state))
            scope.gen.close()
        assert exchanged == []
        assert len(machine.alive()) == 1
    assert machine.alive() == [], "the scope around it, or close(), frees it"
