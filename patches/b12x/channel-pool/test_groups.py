"""Replay groups in one process: who shares a channel, which stream it belongs to, and what is as it was without."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
from b12x_pools import ONESHOT, Machine


def channel_of(pool: Any, name: str) -> Any:
    return pool._logical_channels[name]


def test_without_a_group_every_id_has_its_own_channel(machine: Machine, pool: Any) -> None:
    pool.prepare_channels(["b", "a"])
    with pool.capture(1, channel_id="c") as captured:
        assert captured is channel_of(pool, "c")
    assert len({id(channel_of(pool, name)) for name in "abc"}) == len(machine.channels) == 3


def test_members_of_a_group_share_one_channel_however_they_join(machine: Machine, pool: Any) -> None:
    pool.prepare_channels(["b", "a"], replay_group="g")
    pool.prepare_channels(["c", "a"], replay_group=" g ")
    with pool.capture(1, channel_id="d", replay_group="g") as captured:
        assert captured is machine.channels[0]
    assert {id(channel_of(pool, name)) for name in "abcd"} == {id(machine.channels[0])}
    pool.prepare_channels(["x"], replay_group="h")
    pool.prepare_channels(["y"])
    assert [channel_of(pool, "x"), channel_of(pool, "y")] == machine.channels[1:]


def test_a_prepared_member_is_captured_without_naming_its_group(machine: Machine, pool: Any) -> None:
    pool.prepare_channels(["a", "b"], replay_group="g")
    for name in "ab":
        with pool.capture(1, channel_id=name) as captured:
            assert captured is machine.channels[0]


def test_ids_stay_unique_for_each_graph(pool: Any) -> None:
    pool.prepare_channels(["a", "b"], replay_group="g")
    with pool.capture(1, channel_id="a"):
        pass
    with pytest.raises(RuntimeError, match="'a' was already captured"), pool.capture(1, channel_id="a"):
        pass
    with pool.capture(1, channel_id="b"):
        pass


@pytest.mark.parametrize("prepare", [True, False], ids=["prepare", "capture"])
@pytest.mark.parametrize(("name", "group"), [("grouped", "h"), ("plain", "g"), ("plain", "new")])
def test_an_id_stays_where_it_was_prepared(machine: Machine, pool: Any, name: str, group: str, prepare: bool) -> None:
    pool.prepare_channels(["grouped"], replay_group="g")
    pool.prepare_channels(["other"], replay_group="h")
    pool.prepare_channels(["plain"])
    before = dict(pool._logical_channels)

    def ask(pool: Any) -> None:
        if prepare:
            pool.prepare_channels(["fresh", name], replay_group=group)
        else:
            with pool.capture(1, channel_id=name, replay_group=group):
                pass

    with pytest.raises(RuntimeError, match=f"'{name}' is prepared in replay group .*'{group}' is asked for"):
        ask(pool)
    assert pool._logical_channels == before
    assert len(machine.channels) == 3
    with pool.capture(1, channel_id=name):
        pass


def test_a_member_is_not_prepared_again_without_its_group(pool: Any) -> None:
    pool.prepare_channels(["a"], replay_group="g")
    with pytest.raises(RuntimeError, match="'a' is prepared in replay group 'g', and None is asked for"):
        pool.prepare_channels(["a"])


@pytest.mark.parametrize(("group", "message"), [("", "empty"), (" \t", "empty"), (3, "wanted a string")])
def test_a_group_needs_a_name(machine: Machine, pool: Any, group: Any, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        pool.prepare_channels(["a"], replay_group=group)
    with pytest.raises(RuntimeError, match=message), pool.capture(1, channel_id="a", replay_group=group):
        pass
    assert machine.channels == []


def test_a_member_is_not_captured_within_a_capture_of_its_group(machine: Machine, pool: Any) -> None:
    pool.prepare_channels(["a", "b"], replay_group="g")
    with pool.capture(1, channel_id="a"):
        for name, group in (("b", None), ("c", "g")):
            with (
                pytest.raises(RuntimeError, match=f"'{name}' would be captured within.*'g'"),
                pool.capture(2, channel_id=name, replay_group=group),
            ):
                pass
        with pool.capture(2, channel_id="x", replay_group="h") as other:
            assert pool.for_stream(2) is other is machine.channels[1]
        assert pool.for_stream(1) is machine.channels[0]
    assert "c" not in pool._logical_channels
    with pool.capture(2, channel_id="b"):
        pass


def test_a_single_channel_pool_has_no_groups(machine: Machine, kind: str) -> None:
    pool = machine.pool(kind, object(), single_channel=True)
    with pytest.raises(RuntimeError, match="has one channel for everything"):
        pool.prepare_channels(["a"], replay_group="g")
    with pytest.raises(ValueError, match="has one channel for everything"), pool.capture(1, replay_group="g"):
        pass
    with pool.capture(1) as first, pool.capture(2) as second:
        assert first is second is pool.for_stream(3)
    assert len(machine.channels) == 1


def test_a_factory_pool_has_no_groups(machine: Machine, kind: str) -> None:
    pool = machine.factory_pool(kind)
    with pytest.raises(ValueError, match="channel_factory"):
        pool.prepare_channels(["a"], replay_group="g")
    with pytest.raises(ValueError, match="channel_factory"), pool.capture(1, replay_group="g"):
        pass
    assert machine.channels == []
    with pool.capture(1) as first, pool.capture(1) as second:
        assert [first, second] == machine.channels
    assert pool._channels == {}


def test_members_are_captured_on_streams_of_their_own(machine: Machine, pool: Any) -> None:
    pool.prepare_channels(["a", "b"], replay_group="g")
    for name, stream in (("a", 11), ("b", 22)):
        with pool.capture(stream, channel_id=name) as channel:
            assert channel._owner_stream_key == stream
            with pytest.raises(RuntimeError, match="stream-affine"):
                pool.for_stream(33)
        assert channel._owner_stream_key is None
    assert machine.synchronized >= 2, "b's warm-up may run before a's has ended"


def test_the_eager_stream_of_a_group_waits_for_captures_on_others_and_gets_it_back(machine: Machine, pool: Any) -> None:
    pool.prepare_channels(["a", "b"], replay_group="g")
    eager = pool.for_stream(7, channel_id="a")
    assert pool.for_stream(7, channel_id="b") is eager
    assert machine.synchronized == 0
    with pool.capture(9, channel_id="a"):
        assert (eager._owner_stream_key, machine.synchronized) == (9, 1)
    assert (eager._owner_stream_key, machine.synchronized) == (7, 2)
    assert pool.for_stream(7, channel_id="b") is eager
    with pytest.raises(RuntimeError, match="stream-affine"):
        pool.for_stream(9, channel_id="b")


def test_without_a_group_the_first_stream_keeps_the_channel(machine: Machine, pool: Any) -> None:
    with pool.capture(11, channel_id="a") as channel:
        pass
    assert (channel._owner_stream_key, machine.synchronized) == (11, 0)
    with pytest.raises(RuntimeError, match="stream-affine"):
        pool.for_stream(22, channel_id="a")
    assert pool.for_stream(11, channel_id="a") is channel
    pool.prepare_channels(["b"])
    pool.for_stream(33, channel_id="b")
    with pytest.raises(RuntimeError, match="stream-affine"), pool.capture(44, channel_id="b"):
        pass


@pytest.mark.parametrize("group", [None, "g"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_scope_leaves_no_alias_behind(machine: Machine, pool: Any, group: str | None, fails: bool) -> None:
    """Neither for its stream, whose handle may be recycled, nor for torch's own, which it never makes an owner."""
    pool.prepare_channels(["eager"])
    pool.prepare_channels(["a"], **({"replay_group": group} if group else {}))
    eager = pool.for_stream(7, channel_id="eager")
    graph = channel_of(pool, "a")
    try:
        with pool.capture(7, channel_id="a"):
            assert pool.for_stream(7) is graph
            machine.capturing = True
            assert pool.for_stream(99) is graph
            machine.capturing = False
            assert graph._owner_stream_key == 7
            if fails:
                raise KeyError("in the body")
    except KeyError:
        assert fails
    assert pool._channels == {7: eager}
    assert pool._capture_channel_stack == []
    assert graph._owner_stream_key == (None if group else 7)


def test_a_capture_scope_is_entered_before_the_capture(machine: Machine, pool: Any) -> None:
    pool.prepare_channels(["a"])
    machine.capturing = True
    with pytest.raises(RuntimeError, match="enter it before capture starts"), pool.capture(1, channel_id="a"):
        pass
    assert pool._captured_channel_ids == set()


@pytest.mark.parametrize("single", [False, True])
def test_a_factory_makes_no_channel_within_a_capture(machine: Machine, kind: str, single: bool) -> None:
    """IPC memory cannot be allocated there."""
    pool = machine.factory_pool(kind, single_channel=single)
    machine.capturing = True
    with pytest.raises(RuntimeError, match="capture"):
        pool.for_stream(1)
    assert machine.channels == []


def test_the_facade_passes_a_group_on(machine: Machine) -> None:
    facade_class = importlib.import_module("b12x.comm.pcie.pcie_allreduce").PCIeAllReduce
    if "channel_id" not in inspect.signature(facade_class.capture).parameters:
        pytest.skip("the facade of this release passes no channel_id on, and so no group")
    facade = object.__new__(facade_class)
    vars(facade).update(_runtime=machine.pool(ONESHOT, object()), _island_rs=None)
    facade.prepare_channels(["a"], replay_group="g")
    with facade.capture(1, channel_id="b", replay_group="g"):
        pass
    with facade.transient_captures(), facade.capture(1, channel_id="c"):
        pass
    assert [channel.freed for channel in machine.channels] == [False, True]
    facade.release(["a", "b"])
    assert machine.alive() == []
