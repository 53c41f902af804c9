"""The one channel of a pool as a participant of captures: names, ids, and what a disposable capture leaves behind."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pcie_standins import Machine
from vllm.distributed.device_communicators.pcie_channels import EAGER, REPLAY_GROUP, PooledChannel

CPU = torch.device("cpu")
STREAM = SimpleNamespace(cuda_stream=5)


@pytest.fixture
def channel(machine: Machine, group: Any) -> PooledChannel:
    from b12x.comm.pcie import OneshotAllReducePool

    made = PooledChannel(OneshotAllReducePool(device=CPU, max_size=64), group, CPU)
    made.join_captures()
    return made


def test_before_it_joins_it_takes_no_part(machine: Machine, group: Any) -> None:
    """A peer may have failed to make its own."""
    from b12x.comm.pcie import OneshotAllReducePool

    alone = PooledChannel(OneshotAllReducePool(device=CPU, max_size=64), group, CPU)
    with graph_capture():
        assert ids(machine) == []
    alone.join_captures()
    with graph_capture():
        assert ids(machine) == ["graphs/1"]


@contextmanager
def graph_capture() -> Any:
    """Upstream's, as far as participants see it."""
    from vllm.distributed.capture_scopes import captured_by_others

    with captured_by_others(SimpleNamespace(stream=STREAM)):
        yield "context"


def ids(machine: Machine) -> list[str]:
    return [call["id"] for call in machine.named("capture")]


def test_it_is_made_on_the_stream_that_vllm_gives_its_process(machine: Machine, group: Any) -> None:
    """Without PyNccl nobody has asked yet; plans would be bound to the stream before it, and the first call refused."""
    from b12x.comm.pcie import OneshotAllReducePool

    machine.stream, machine.own_stream = 0, 7
    made = PooledChannel(OneshotAllReducePool(device=CPU, max_size=64), group, CPU)
    assert machine.stream == 7
    assert made.here()
    with machine.on_stream(0):
        assert not made.here()


def test_names_of_captures(scopes: Any) -> None:
    assert scopes.capture_name() == "graphs"
    with scopes.named("model", graph_capture()) as given:
        assert given == "context"
        assert scopes.capture_name() == "model"
        with scopes.named("draft", graph_capture()):
            assert scopes.capture_name() == "draft"
        assert scopes.capture_name() == "model"
    assert scopes.capture_name() == "graphs"


def test_a_name_goes_with_the_scope_that_fails(scopes: Any) -> None:
    @contextmanager
    def failing() -> Any:
        assert scopes.capture_name() == "model"
        raise OSError("no capture")
        yield

    with pytest.raises(OSError, match="no capture"), scopes.named("model", failing()):
        pass
    with pytest.raises(ValueError, match="in it"), scopes.named("model", graph_capture()):
        raise ValueError("in it")
    assert scopes.capture_name() == "graphs"
    assert not scopes.in_graph_capture()


def test_eager_work_and_captures_share_a_channel(channel: PooledChannel, machine: Machine) -> None:
    assert list(channel.pool._logical_channels) == [EAGER]
    assert channel.channel is channel.pool._logical_channels[EAGER]
    with graph_capture():
        assert channel.pool.open == [channel.channel]
    assert [(call["stream"], call["group"]) for call in machine.named("capture")] == [(STREAM, REPLAY_GROUP)]


def test_ids_are_unique_and_say_what_is_captured(channel: PooledChannel, scopes: Any, machine: Machine) -> None:
    for name in ("model", "Manager", "model"):
        with scopes.named(name, graph_capture()):
            pass
    for _ in range(2):
        with graph_capture():
            pass
    assert ids(machine) == ["model/1", "Manager/1", "model/2", "graphs/1", "graphs/2"]
    assert EAGER not in ids(machine)


def test_a_capture_that_fails_leaves_its_id_used(channel: PooledChannel, scopes: Any, machine: Machine) -> None:
    with pytest.raises(OSError, match="in it"), scopes.named("model", graph_capture()):
        raise OSError("in it")
    assert channel.pool.open == []
    assert channel.here()
    with scopes.named("model", graph_capture()):
        pass
    assert ids(machine) == ["model/1", "model/2"]


def test_a_disposable_capture_is_taken_back(channel: PooledChannel, scopes: Any, machine: Machine) -> None:
    with scopes.named("model", graph_capture()):
        pass
    with scopes.disposable_captures():
        for _ in range(2):
            with scopes.named("model", graph_capture()):
                pass
        with graph_capture():
            pass
    assert len(machine.named("rollback")) == 1
    assert channel.pool.captured_ids == ["model/1"]
    assert channel.channel is channel.pool._logical_channels[EAGER]
    for _ in range(2):
        with scopes.named("model", graph_capture()):
            pass
    assert channel.pool.captured_ids == ["model/1", "model/2", "model/3"]


def test_it_is_taken_back_each_time(channel: PooledChannel, scopes: Any) -> None:
    for _ in range(3):
        with scopes.disposable_captures(), scopes.named("model", graph_capture()):
            pass
        with scopes.named("model", graph_capture()):
            pass
    assert channel.pool.captured_ids == ["model/1", "model/2", "model/3"]


def test_a_disposable_capture_that_fails_is_taken_back_too(channel: PooledChannel, scopes: Any) -> None:
    with (
        pytest.raises(ValueError, match="in it"),
        scopes.disposable_captures(),
        scopes.named("model", graph_capture()),
    ):
        raise ValueError("in it")
    assert channel.pool.captured_ids == []
    with scopes.named("model", graph_capture()):
        pass
    assert channel.pool.captured_ids == ["model/1"]


def test_a_rollback_wants_a_checkpoint(channel: PooledChannel, machine: Machine) -> None:
    with pytest.raises(RuntimeError, match="without a checkpoint"):
        channel.rollback()
    assert machine.named("rollback") == []


def test_a_plan_outlives_a_disposable_capture(channel: PooledChannel, scopes: Any, machine: Machine) -> None:
    """It was made on the channel of eager work, which stays."""
    call = {"inp": torch.ones(4)}
    with scopes.disposable_captures(), graph_capture():
        made = channel.plan_of("surface", "kind", call)
    with machine.captured():
        assert channel.plan_of("surface", "kind", call) is made
        assert channel.plan_of("surface", "other kind", call) is None
    assert machine.plans == [made]


def test_all_channels_of_a_process_share_a_session(channel: PooledChannel, machine: Machine, group: Any) -> None:
    from b12x.comm.pcie import DcpAllToAllPool

    other = PooledChannel(DcpAllToAllPool(device=CPU), group, CPU)
    other.join_captures()
    plans = [each.plan_of("surface", "kind", {}) for each in (channel, other)]
    assert machine.sessions == 1
    assert [plan.runtime for plan in plans] == [channel.channel, other.channel]
    with graph_capture():
        pass
    assert ids(machine) == ["graphs/1", "graphs/1"], "an id is unique in its pool"


def test_bind_is_called_with_the_state(channel: PooledChannel, machine: Machine) -> None:
    bound: list[Any] = []
    made = channel.plan_of("surface", "kind", {}, bound.append)
    assert channel.plan_of("surface", "kind", {}, bound.append) is made
    assert bound == [made]


def test_garbage_takes_no_part(channel: PooledChannel, machine: Machine, group: Any) -> None:
    from b12x.comm.pcie import DcpAllToAllPool

    gone = PooledChannel(DcpAllToAllPool(device=CPU), group, CPU)
    gone.join_captures()
    del gone
    gc.collect()
    with graph_capture():
        pass
    assert ids(machine) == ["graphs/1"]


def test_after_the_captures_no_kind_is_new(channel: PooledChannel, scopes: Any, machine: Machine) -> None:
    """Whatever is captured afterwards: nothing is compiled while requests wait."""
    with scopes.disposable_captures(), graph_capture():
        pass
    known = channel.plan_of("surface", "profiled", {})
    with graph_capture():
        pass
    assert channel.plan_of("surface", "new", {}) is None
    with scopes.disposable_captures(), graph_capture():
        pass
    assert channel.plan_of("surface", "new", {}) is None
    assert channel.plan_of("surface", "profiled", {}) is known
    assert machine.plans == [known]
