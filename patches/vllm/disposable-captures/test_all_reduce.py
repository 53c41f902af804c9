"""CustomAllreduce in a disposable capture: nothing is captured that has to be registered, and nothing is registered."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch


class Ops:
    """The library's list of captured inputs: all calls within a capture add to it, whatever the buffer."""

    def __init__(self) -> None:
        self.pending: list[int] = []
        self.registered: list[int] = []

    def all_reduce(self, ptr: int, inp: torch.Tensor, out: torch.Tensor, buffer: int, size: int) -> None:
        self.pending.append(buffer or inp.data_ptr())

    def get_graph_buffer_ipc_meta(self, ptr: int) -> tuple[list[int], list[int]]:
        return [0] * len(self.pending), [0] * len(self.pending)

    def register_graph_buffers(self, ptr: int, handles: Any, offsets: Any) -> None:
        self.registered += self.pending
        self.pending.clear()


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> Ops:
    from vllm.distributed.device_communicators import custom_all_reduce as module

    found = Ops()
    monkeypatch.setattr(module, "ops", found)
    monkeypatch.setattr(module.torch.cuda, "is_current_stream_capturing", lambda: True)
    return found


@pytest.fixture
def communicator(ops: Ops, group: Any) -> Any:
    from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce

    made = CustomAllreduce.__new__(CustomAllreduce)
    vars(made).update(
        disabled=False, _IS_CAPTURING=False, _capture_registered=True, _ptr=0, group=group, rank=0, world_size=2,
        fully_connected=True, max_size=1 << 20, buffer_ptrs=[7, 8], batch_invariant=False,
    )  # fmt: skip
    # One rank stands for two: what is exchanged is not under test.
    made.register_graph_buffers = lambda: ops.register_graph_buffers(0, [], [])
    return made


def test_a_disposable_capture_leaves_no_address_behind(scopes: Any, ops: Ops, communicator: Any) -> None:
    with scopes.disposable_captures(), communicator.capture():
        thrown_away = communicator.custom_all_reduce(torch.arange(8.0))
    assert thrown_away.shape == (8,)
    assert ops.pending == ops.registered == []
    kept = torch.arange(8.0)
    with communicator.capture():
        communicator.custom_all_reduce(kept)
    assert ops.registered == [kept.data_ptr()]


@pytest.mark.parametrize("shape", [(4, 8), (8, 4)])
def test_its_result_takes_the_same_memory_as_the_kernels(
    scopes: Any, ops: Ops, communicator: Any, shape: tuple[int, int]
) -> None:
    given = torch.rand(shape).t()
    with communicator.capture():
        kept = communicator.custom_all_reduce(given)
    with scopes.disposable_captures(), communicator.capture():
        thrown_away = communicator.custom_all_reduce(given)
    assert (thrown_away.shape, thrown_away.stride(), thrown_away.dtype) == (kept.shape, kept.stride(), kept.dtype)
    assert thrown_away.data_ptr() != given.data_ptr()


def test_warm_up_is_as_upstream(scopes: Any, ops: Ops, communicator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with scopes.disposable_captures(), communicator.capture():
        assert communicator.custom_all_reduce(torch.arange(8.0)).shape == (8,)
    assert ops.pending == ops.registered == []


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("disabled", [False, True])
def test_registration_is_left_out_however_the_scope_ends(
    scopes: Any, ops: Ops, communicator: Any, raises: bool, disabled: bool
) -> None:
    calls: list[str] = []
    communicator.disabled = disabled
    communicator.register_graph_buffers = lambda: calls.append("register")
    expected = pytest.raises(ValueError, match="no capture") if raises else nullcontext()
    with expected, scopes.disposable_captures(), communicator.capture():
        if raises:
            raise ValueError("no capture")
    assert calls == []
    with communicator.capture():
        pass
    assert calls == ([] if disabled else ["register"])
    assert not communicator._IS_CAPTURING
