"""How long channels live, in one process: checkpoint and rollback, release by reference, close."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from b12x_pools import Machine

SHAPES: dict[str, Callable[[Any], Any]] = {
    "checkpoint": lambda given: given,
    "4-tuple": tuple,
    "2-tuple": lambda given: tuple(given)[:2],
}


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    return SHAPES[request.param]


def require_sound(machine: Machine, pool: Any) -> None:
    """Nothing leads to a freed channel, and no channel is lost."""
    reachable = [*pool._logical_channels.values(), *pool._channels.values()]
    assert not [channel for channel in reachable if channel.freed]
    assert machine.alive() == pool._all_channels
    assert set(pool._replay_groups) <= set(pool._logical_channels)


def capture(pool: Any, name: str, stream: int = 1, **group: str) -> Any:
    with pool.capture(stream, channel_id=name, **group) as channel:
        return channel


def test_a_rollback_frees_what_was_made_since(machine: Machine, pool: Any, shape: Callable[[Any], Any]) -> None:
    pool.prepare_channels(["kept"])
    kept = pool.for_stream(7, channel_id="kept")
    checkpoint = shape(pool.checkpoint_channels())
    pool.prepare_channels(["made"])
    pool.for_stream(8, channel_id="made")
    capture(pool, "graph")
    pool.rollback_channels(checkpoint)
    assert [channel.freed for channel in machine.channels] == [False, True, True]
    assert pool._channels == {7: kept}
    assert pool.for_stream(7, channel_id="kept") is kept
    require_sound(machine, pool)
    if len(checkpoint) == 4:
        assert capture(pool, "graph") is machine.channels[3]


def test_a_checkpoint_is_what_upstreams_callers_unpack(pool: Any) -> None:
    channel = capture(pool, "a")
    count, aliases, named, captured = pool.checkpoint_channels()
    assert (count, aliases, named, captured) == (1, {}, {"a": channel}, {"a"})


@pytest.mark.parametrize("group", [None, "g"])
def test_a_rollback_gives_back_ids_and_streams_of_kept_channels(machine: Machine, pool: Any, group: str | None) -> None:
    """So a throwaway capture of a prepared id may be followed by the real one, on another stream."""
    named = {"replay_group": group} if group else {}
    pool.prepare_channels(["a", "b"], **named)
    checkpoint = pool.checkpoint_channels()
    throwaway = capture(pool, "a", 11)
    pool.for_stream(11, channel_id="b")
    pool.rollback_channels(checkpoint)
    assert pool._channels == {}
    assert capture(pool, "a", 22) is throwaway
    pool.for_stream(22, channel_id="b")
    with pytest.raises(RuntimeError, match="already captured"):
        capture(pool, "a", 22)
    assert machine.alive() == machine.channels


def test_a_rollback_keeps_a_groups_channel_and_drops_who_joined(machine: Machine, pool: Any) -> None:
    pool.prepare_channels(["a"], replay_group="g")
    checkpoint = pool.checkpoint_channels()
    capture(pool, "b", replay_group="g")
    capture(pool, "x", replay_group="h")
    pool.rollback_channels(checkpoint)
    assert [channel.freed for channel in machine.channels] == [False, True]
    assert list(pool._logical_channels) == ["a"]
    pool.prepare_channels(["b"], replay_group="other")
    assert pool._logical_channels["b"] is not pool._logical_channels["a"]
    require_sound(machine, pool)


def test_what_is_no_checkpoint_of_this_pool_is_refused(machine: Machine, pool: Any, kind: str) -> None:
    pool.prepare_channels(["a", "b"])
    wrongs: tuple[Any, ...] = ((), (0, {}, {}), (3, {}), (-1, {}), (3, {}, {}, set()))
    for wrong in wrongs:
        with pytest.raises(RuntimeError, match="checkpoint"):
            pool.rollback_channels(wrong)
    require_sound(machine, pool)


def test_a_checkpoint_of_another_pool_is_refused(machine: Machine, pool: Any, kind: str) -> None:
    pool.prepare_channels(["a", "b"])
    other = machine.pool(kind, object())
    other.prepare_channels(["a", "b"])
    with pytest.raises(RuntimeError, match="the checkpoint is of another pool"):
        pool.rollback_channels(other.checkpoint_channels())
    assert machine.alive() == machine.channels


def test_a_release_in_the_middle(machine: Machine, pool: Any) -> None:
    for name in "abc":
        capture(pool, name, ord(name))
    pool.for_stream(ord("b"), channel_id="b")
    pool.release([" b "])
    assert [channel.freed for channel in machine.channels] == [False, True, False]
    require_sound(machine, pool)
    with pytest.raises(RuntimeError, match="'b' is not prepared"):
        pool.for_stream(1, channel_id="b")
    for name in "ac":
        with pytest.raises(RuntimeError, match="already captured"):
            capture(pool, name)
    assert capture(pool, "b", 5) is machine.channels[3], "not bound to the stream of the released one"
    pool.release(["a", "b", "c"])
    assert machine.alive() == []


def test_a_groups_channel_lives_as_long_as_an_id_refers_to_it(machine: Machine, pool: Any) -> None:
    pool.prepare_channels(["a", "b", "c"], replay_group="g")
    shared = capture(pool, "a")
    pool.release(["a"])
    assert not shared.freed
    assert capture(pool, "a", 2, replay_group="g") is capture(pool, "b", 3) is shared
    pool.release(["c", "a"])
    assert not shared.freed
    pool.release(["b"])
    assert shared.freed
    require_sound(machine, pool)
    pool.prepare_channels(["a", "b"], replay_group="g")
    pool.release(["b", "a"])
    assert [channel.freed for channel in machine.channels] == [True, True]


@pytest.mark.parametrize("names", [["a", "nope"], ["nope"], [""]])
def test_a_release_is_all_or_nothing(machine: Machine, pool: Any, names: list[str]) -> None:
    pool.prepare_channels(["a"])
    with pytest.raises(RuntimeError, match="'nope' is not prepared.*'a'" if "nope" in names else "must not be empty"):
        pool.release(names)
    assert machine.alive() == machine.channels
    pool.release(["a"])
    with pytest.raises(RuntimeError, match="'a' is not prepared"):
        pool.release(["a"])
    pool.release([])


def test_the_one_channel_is_not_released(machine: Machine, kind: str) -> None:
    pool = machine.pool(kind, object(), single_channel=True)
    with pytest.raises(RuntimeError, match=r"call close\(\)"):
        pool.release(["__single__"])
    assert machine.alive() == machine.channels


def test_nothing_is_freed_within_a_capture_scope(machine: Machine, pool: Any) -> None:
    pool.prepare_channels(["a", "b"])
    checkpoint = pool.checkpoint_channels()
    with pool.capture(1, channel_id="a"):
        for refused in (
            lambda: pool.release(["b"]), lambda: pool.rollback_channels(checkpoint), pool.checkpoint_channels,
        ):  # fmt: skip
            with pytest.raises(RuntimeError, match="during capture"):
                refused()
    assert machine.alive() == machine.channels


def release_and_make(pool: Any) -> Any:
    """Two channels on streams 1 and 2, a checkpoint, and then one released and two made."""
    for name, stream in (("old", 1), ("kept", 2)):
        pool.prepare_channels([name])
        pool.for_stream(stream, channel_id=name)
    checkpoint = pool.checkpoint_channels()
    pool.release(["old"])
    pool.prepare_channels(["old"])
    capture(pool, "new", 3)
    return checkpoint


def test_a_release_between_checkpoint_and_rollback(machine: Machine, pool: Any) -> None:
    pool.rollback_channels(release_and_make(pool))
    kept = machine.channels[1]
    assert pool._logical_channels == {"kept": kept}
    assert pool._channels == {2: kept}
    assert kept._owner_stream_key == 2
    require_sound(machine, pool)


@pytest.mark.parametrize("values", [2, 4])
def test_a_plain_tuple_after_a_release_leads_to_no_freed_channel(machine: Machine, pool: Any, values: int) -> None:
    """Its number of channels no longer says which: it is refused."""
    with pytest.raises(RuntimeError, match="does not say which channels"):
        pool.rollback_channels(tuple(release_and_make(pool))[:values])
    require_sound(machine, pool)
    assert pool.for_stream(2, channel_id="kept") is machine.channels[1]


@pytest.mark.parametrize("again", [False, True])
def test_a_released_member_does_not_come_back(machine: Machine, pool: Any, again: bool) -> None:
    """Its graph is gone, also if the id was prepared again since."""
    pool.prepare_channels(["a", "b"], replay_group="g")
    capture(pool, "a")
    checkpoint = pool.checkpoint_channels()
    pool.release(["a"])
    if again:
        pool.prepare_channels(["a"], replay_group="g")
    pool.rollback_channels(checkpoint)
    assert (set(pool._logical_channels), pool._captured_channel_ids) == ({"b"}, set())
    require_sound(machine, pool)
    capture(pool, "a", replay_group="g")
    pool.release(["a", "b"])
    assert machine.alive() == []


def test_a_failed_unmap_changes_nothing_and_can_be_repeated(machine: Machine, pool: Any) -> None:
    pool.prepare_channels(["a", "b"])
    checkpoint = pool.checkpoint_channels()
    capture(pool, "c", 3)
    steps = ((lambda: pool.rollback_channels(checkpoint), 2), (lambda: pool.release(["a"]), 0), (pool.close, 1))
    for step, number in steps:
        channel = machine.channels[number]
        state = (dict(pool._logical_channels), set(pool._captured_channel_ids), list(pool._all_channels))
        channel.unmap_fails = True
        with pytest.raises(RuntimeError, match=r"IPC unmap.*not freed.*unmap failed"):
            step()
        assert not channel.freed
        assert state == (pool._logical_channels, pool._captured_channel_ids, pool._all_channels)
        channel.unmap_fails = False
        step()
        assert channel.freed
    assert machine.alive() == []


def test_close_frees_everything_and_ends_the_pool(machine: Machine, pool: Any, kind: str) -> None:
    pool.prepare_channels(["a"])
    pool.prepare_channels(["b", "c"], replay_group="g")
    capture(pool, "b")
    checkpoint = pool.checkpoint_channels()
    pool.close()
    pool.close()
    assert machine.alive() == []
    for refused in (
        lambda: pool.prepare_channels(["a"]), lambda: pool.for_stream(1, channel_id="a"), lambda: pool.release(["a"]),
        lambda: capture(pool, "z"), lambda: pool.rollback_channels(checkpoint), pool.checkpoint_channels,
        lambda: pool.transient_captures().__enter__(),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match="closed"):
            refused()
    assert len(machine.channels) == 2
