"""The dispatch of the PCIe all-reduce: by size, by what b12x takes, by stream and by whether a stream is captured."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pcie_standins import Machine
from vllm.distributed.device_communicators.pcie_all_reduce import PcieAllReduce
from vllm.distributed.device_communicators.pcie_limits import Limits

CPU = torch.device("cpu")


@pytest.fixture
def reduce(machine: Machine, group: Any) -> PcieAllReduce:
    """Oneshot to 1,024 bytes, a ring from 2,048 to 4,096."""
    made = PcieAllReduce(group, CPU, Limits(1024, 2048, 4096))
    made.join_captures()
    return made


def floats(nbytes: int) -> torch.Tensor:
    return torch.ones(nbytes // 4)


def capture(scopes: Any, machine: Machine, stream: int = 5) -> Any:
    return scopes.captured_by_others(SimpleNamespace(stream=SimpleNamespace(cuda_stream=stream)))


@pytest.mark.parametrize(
    ("nbytes", "by"),
    [
        (0, None), (16, "oneshot"), (1024, "oneshot"), (1028, None), (2044, None), (2048, "ring"), (4096, "ring"),
        (4160, None),
    ],
)  # fmt: skip
def test_by_size(nbytes: int, by: str | None, reduce: PcieAllReduce, machine: Machine) -> None:
    given = floats(nbytes)
    summed = reduce.all_reduce(given)
    assert [name for name, _ in machine.calls if name in ("oneshot", "ring")] == ([by] if by else [])
    if summed is not None:
        assert torch.equal(summed, given * 2)
        assert (summed.shape, summed.dtype) == (given.shape, given.dtype)
        assert torch.equal(given, floats(nbytes))


@pytest.mark.parametrize("nbytes", [64, 2048])
@pytest.mark.parametrize("dtype", [torch.int32, torch.float64, torch.float8_e4m3fn])
def test_a_dtype_that_b12x_does_not_take(nbytes: int, dtype: torch.dtype, reduce: PcieAllReduce) -> None:
    assert reduce.all_reduce(torch.zeros(nbytes // dtype.itemsize, dtype=dtype)) is None


@pytest.mark.parametrize("rows", [8, 32])
def test_a_layout_that_b12x_does_not_take(rows: int, reduce: PcieAllReduce) -> None:
    assert reduce.all_reduce(torch.ones(rows, 32)[:, ::2]) is None


def test_one_row_of_a_wider_tensor(reduce: PcieAllReduce, machine: Machine) -> None:
    wide = torch.rand(1, 64, dtype=torch.bfloat16)
    assert wide[:, :32].stride(0) == 64
    before = len(machine.plans)
    assert reduce.all_reduce(wide[:, :32]) is not None
    assert reduce.all_reduce(wide[:, :32].clone()) is not None
    assert len(machine.plans) == before + 1, "one kind of call"


def test_a_first_call_on_another_stream_is_nccls(reduce: PcieAllReduce, machine: Machine) -> None:
    """Plans are bound to the stream that they were made on."""
    with machine.on_stream(2):
        assert reduce.all_reduce(floats(64)) is None
    assert reduce.all_reduce(floats(64)) is not None


@pytest.mark.parametrize("nbytes", [64, 2048])
def test_another_stream_is_nccls(nbytes: int, reduce: PcieAllReduce, machine: Machine) -> None:
    assert reduce.all_reduce(floats(nbytes)) is not None
    with machine.on_stream(2):
        assert reduce.all_reduce(floats(nbytes)) is None
    assert reduce.all_reduce(floats(nbytes)) is not None


@pytest.mark.parametrize("nbytes", [64, 2048])
def test_another_thread_is_nccls(nbytes: int, reduce: PcieAllReduce) -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(reduce.all_reduce(floats(nbytes))))
    thread.start()
    thread.join()
    assert found == [None]
    assert reduce.all_reduce(floats(nbytes)) is not None


def test_one_plan_for_each_shape_and_dtype(reduce: PcieAllReduce, machine: Machine) -> None:
    ring = len(machine.plans)
    for _ in range(3):
        for given in (floats(64), floats(64).half(), floats(128), floats(128).view(4, 8)):
            assert reduce.all_reduce(given) is not None
    assert len(machine.plans) == ring + 4
    assert machine.sessions == 1
    assert {plan.query["surface"] for plan in machine.plans[ring:]} == {"OneshotAllReducePool.all_reduce"}


def test_a_row_of_a_wider_tensor_after_one_of_its_own(reduce: PcieAllReduce) -> None:
    """Both are contiguous and of one shape, but not of the same strides, which a plan has."""
    assert reduce.all_reduce(torch.ones(1, 16)) is not None
    row = torch.ones(1, 32)[:, :16]
    assert row.is_contiguous()
    summed = reduce.all_reduce(row)
    assert summed is None or torch.equal(summed, row * 2)


def test_a_transposed_tensor_after_one_that_is_not(reduce: PcieAllReduce) -> None:
    assert reduce.all_reduce(torch.ones(8, 8)) is not None
    summed = reduce.all_reduce(torch.ones(8, 8).t())
    assert summed is None or torch.equal(summed, torch.full((8, 8), 2.0))


def test_the_ring_has_one_plan_made_with_it(reduce: PcieAllReduce, machine: Machine) -> None:
    made = [plan for plan in machine.plans if plan.query["surface"] == "DmaAllReduce.all_reduce"]
    assert len(made) == 1
    for nbytes in (2048, 4096, 2048):
        reduce.all_reduce(floats(nbytes))
    assert [call["plan"] for call in machine.named("ring")] == made * 3
    assert machine.plans == made


def test_what_is_captured_was_made_eagerly(reduce: PcieAllReduce, machine: Machine, scopes: Any) -> None:
    """A capture's warm-up is eager, too, if it is on the capture's stream."""
    reduce.all_reduce(floats(64))
    with capture(scopes, machine), machine.on_stream(5):
        assert reduce.all_reduce(floats(128)) is not None
        with machine.captured():
            assert reduce.all_reduce(floats(64)) is not None
            assert reduce.all_reduce(floats(128)) is not None
            assert reduce.all_reduce(floats(256)) is None
            assert reduce.all_reduce(floats(64).half()) is None
            assert reduce.all_reduce(floats(2048)) is None, "nor was the ring's"
        assert reduce.all_reduce(floats(2048)) is not None
        with machine.captured():
            assert reduce.all_reduce(floats(4096)) is not None, "which takes all sizes then"
    plans = [call["plan"] for call in machine.named("oneshot")]
    assert plans[2:] == plans[:2]
    assert reduce.all_reduce(floats(256)) is None, "captures are over, and the engine serves"
    assert reduce.all_reduce(floats(64)) is not None


def test_within_a_capture_the_channel_is_its_streams(reduce: PcieAllReduce, machine: Machine, scopes: Any) -> None:
    reduce.all_reduce(floats(64))
    with capture(scopes, machine):
        assert reduce.all_reduce(floats(64)) is None
        with machine.on_stream(6), machine.captured():
            assert reduce.all_reduce(floats(64)) is None
        with machine.on_stream(5), capture(scopes, machine, 7), machine.on_stream(7):
            assert reduce.all_reduce(floats(64)) is not None
        with machine.on_stream(5):
            assert reduce.all_reduce(floats(64)) is not None
    with machine.on_stream(5):
        assert reduce.all_reduce(floats(64)) is None
    assert reduce.all_reduce(floats(64)) is not None


def test_without_a_ring_none_is_made(machine: Machine, group: Any) -> None:
    reduce = PcieAllReduce(group, CPU, Limits(1024))
    assert machine.named("ring made") == []
    assert machine.plans == []
    assert reduce.all_reduce(floats(2048)) is None
    assert reduce.held_bytes() == 300


def test_it_holds_what_its_limits_say(reduce: PcieAllReduce, machine: Machine, group: Any) -> None:
    (pool,), (ring,) = machine.named("pool"), machine.named("ring made")
    assert (pool["exchange_group"], pool["device"]) == (group, CPU)
    assert (pool["eager_buffer_bytes"], pool["max_size"], ring["max_bytes"]) == (1024, 1024, 4096)
    assert ring["fp8"] == "", "the wire mode is not the environment's"
    assert reduce.held_bytes() == 300 + 1000 + 24


def test_plans_for_all_rows_are_made_ahead(reduce: PcieAllReduce, machine: Machine, scopes: Any) -> None:
    reduce.prepare_rows(64, torch.float32)
    assert len(machine.plans) == 1 + 1024 // 256, "the ring's, and one for each number of rows"
    with capture(scopes, machine), machine.on_stream(5), machine.captured():
        assert reduce.all_reduce(torch.ones(4, 64)) is not None
        assert reduce.all_reduce(torch.ones(3, 32)) is None
