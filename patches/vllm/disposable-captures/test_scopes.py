"""Participants of captures and the disposable scope, in one process."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist


def capture(scopes: Any, events: list[str]) -> None:
    with scopes.captured_by_others(SimpleNamespace(stream="stream")):
        events.append("capture")


def test_checkpoints_come_first_and_rollbacks_after_the_device_is_idle(
    scopes: Any, events: list[str], registered: Callable[..., Any]
) -> None:
    kept = [registered("a"), registered("b")]
    with scopes.disposable_captures():
        assert scopes.in_disposable_capture()
        capture(scopes, events)
        events.append("destroy")
    assert not scopes.in_disposable_capture()
    assert events == [
        "checkpoint a", "checkpoint b", "enter a", "enter b", "capture", "leave b", "leave a", "destroy",
        "synchronize", "rollback b", "rollback a",
    ]  # fmt: skip
    assert len(kept) == 2


def test_a_graph_capture_is_open_from_its_first_context_to_its_last(
    scopes: Any, events: list[str], registered: Callable[..., Any]
) -> None:
    seen: list[bool] = []
    kept = registered("a")

    @contextmanager
    def enter(stream: Any) -> Any:
        seen.append(scopes.in_graph_capture())
        yield
        seen.append(scopes.in_graph_capture())

    kept.capture = enter
    assert not scopes.in_graph_capture()
    capture(scopes, events)
    with pytest.raises(OSError, match="in it"), scopes.captured_by_others(SimpleNamespace(stream="stream")):
        raise OSError("in it")
    assert seen == [True, True, True]
    assert not scopes.in_graph_capture()


def test_nothing_is_waited_for_without_participants(scopes: Any, events: list[str]) -> None:
    with scopes.disposable_captures():
        assert scopes.in_disposable_capture()
        capture(scopes, events)
    assert events == ["capture"]


def test_an_exception_is_the_callers_and_everything_is_rolled_back(
    scopes: Any, events: list[str], registered: Callable[..., Any]
) -> None:
    kept = [registered("a"), registered("b", fails="rollback")]
    with pytest.raises(ValueError, match="the capture's own"), scopes.disposable_captures():
        raise ValueError("the capture's own")
    assert events[-3:] == ["synchronize", "rollback b", "rollback a"]
    assert not scopes.in_disposable_capture()
    assert kept


def test_graphs_held_by_the_frames_of_an_exception_are_gone_at_the_rollback(
    scopes: Any, events: list[str], registered: Callable[..., Any]
) -> None:
    class Graph:
        pass

    alive: list[bool] = []

    def failing() -> None:
        graph = Graph()
        reference = weakref.ref(graph)
        kept.rollback = lambda: alive.append(reference() is not None)
        raise ValueError(str(graph))

    kept = registered("a")
    with pytest.raises(ValueError, match="Graph"):
        scopes.disposable_captures()(failing)()
    assert alive == [False]


def test_an_interrupt_waits_for_nobody(scopes: Any, events: list[str], registered: Callable[..., Any]) -> None:
    kept = registered("a")
    with pytest.raises(KeyboardInterrupt), scopes.disposable_captures():
        raise KeyboardInterrupt
    assert events == ["checkpoint a"]
    assert not scopes.in_disposable_capture()
    assert kept


def test_a_rollback_that_fails_does_not_stop_the_others(
    scopes: Any, events: list[str], registered: Callable[..., Any]
) -> None:
    kept = [registered("a"), registered("b", fails="rollback")]
    expected = pytest.raises(RuntimeError, match=r"left something behind: .*Recorder: b cannot rollback")
    with expected, scopes.disposable_captures():
        pass
    assert events[-2:] == ["rollback b", "rollback a"]
    assert kept


def test_a_checkpoint_that_fails_captures_nothing(
    scopes: Any, events: list[str], registered: Callable[..., Any]
) -> None:
    kept = registered("a", fails="checkpoint")
    with pytest.raises(OSError, match="a cannot checkpoint"), scopes.disposable_captures():
        events.append("capture")
    assert events == ["checkpoint a"]
    assert not scopes.in_disposable_capture()
    assert kept


def test_nesting_is_refused(scopes: Any) -> None:
    with scopes.disposable_captures():
        with pytest.raises(RuntimeError, match="leave the outer scope first"), scopes.disposable_captures():
            pass
        assert scopes.in_disposable_capture()


def test_who_is_registered_inside_goes_back_to_that_moment(
    scopes: Any, events: list[str], registered: Callable[..., Any]
) -> None:
    kept = [registered("a")]
    with scopes.disposable_captures():
        kept.append(registered("b"))
    assert events == ["checkpoint a", "checkpoint b", "synchronize", "rollback b", "rollback a"]


def test_participants_are_held_weakly_but_not_within_a_scope(
    scopes: Any, events: list[str], registered: Callable[..., Any]
) -> None:
    participants = [registered("a")]
    with scopes.disposable_captures():
        participants.clear()
        gc.collect()
    assert events[-1] == "rollback a"
    del events[:]
    gc.collect()
    with scopes.disposable_captures():
        capture(scopes, events)
    assert events == ["capture", "synchronize"]


def test_only_live_groups_of_torch_distributed_are_taken(scopes: Any, group: Any) -> None:
    with pytest.raises(ValueError, match="not a live group"):
        scopes.register_capture_participant(SimpleNamespace(), object())
    gone = dist.new_group([0])
    participant = type("Participant", (), {})()
    scopes.register_capture_participant(participant, gone)
    dist.destroy_process_group(gone)
    with scopes.disposable_captures():
        pass
    assert scopes._registry.live() == []


def test_hooks_are_entered_with_the_stream(scopes: Any, events: list[str]) -> None:
    @contextmanager
    def hook(stream: Any) -> Any:
        events.append(f"enter {stream}")
        yield
        events.append(f"leave {stream}")

    scopes.register_capture_hook(hook)
    capture(scopes, events)
    assert events == ["enter stream", "capture", "leave stream"]


def test_each_group_with_something_to_capture_is_entered_once(
    scopes: Any, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm.distributed.parallel_state as state

    class Group:
        def __init__(self, name: str, communicator: Any) -> None:
            self.name, self.device_communicator = name, communicator

        @contextmanager
        def graph_capture(self, context: Any) -> Any:
            events.append(f"{self.name} {context.stream}")
            yield context

    able = SimpleNamespace(ca_comm=object())
    unable = SimpleNamespace(ca_comm=None, fi_pcie_ipc_ar_comm=None)
    tp, dcp = Group("tp", able), Group("dcp", able)
    monkeypatch.setattr(state, "_TP", tp)
    monkeypatch.setattr(state, "_PP", Group("pp", unable))
    monkeypatch.setattr(state, "_DP", Group("dp", None))
    monkeypatch.setattr(state, "_DCP", dcp)
    monkeypatch.setattr(state, "_PCP", dcp)
    monkeypatch.setattr(state, "_EP", tp)
    monkeypatch.setattr(state, "GraphCaptureContext", lambda stream: SimpleNamespace(stream=stream))
    monkeypatch.setattr(state.torch.cuda, "Stream", lambda device: "stream")
    with state.graph_capture(device="cuda:0"):
        events.append("capture")
    assert events == ["tp stream", "pp stream", "dp stream", "dcp stream", "capture"]
    for absent in (None, Group("ep", unable), Group("ep", None)):
        monkeypatch.setattr(state, "_DCP", absent)
        monkeypatch.setattr(state, "_PCP", None)
        assert scopes.other_capturing_groups() == []
