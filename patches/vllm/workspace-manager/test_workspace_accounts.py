"""What the manager tells of its slots, what it serves past the lock, and the module's functions around it."""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from workspace_device import MIB, Rig


def logits(rig: Rig, size: int) -> torch.Tensor:
    """A call site."""
    return rig.manager.get_simultaneous(((size,), torch.uint8))[0]


def experts(rig: Rig, size: int) -> torch.Tensor:
    """Another one."""
    return rig.manager.get_simultaneous(((size,), torch.uint8))[0]


@contextmanager
def logged(name: str) -> Iterator[list[logging.LogRecord]]:
    """What a module of vLLM logs, at every level."""
    logger, records = logging.getLogger(name), []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    handler, level = Keep(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield records
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@pytest.fixture
def module() -> Iterator[Any]:
    found = importlib.import_module("vllm.v1.worker.workspace")
    before, found._manager = found._manager, None
    yield found
    found._manager = before


def test_a_slot_without_a_second_consumer(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    logits(rig, MIB)
    assert rig.slot().second_consumer_bytes == 0


def test_the_report_is_plain_data_and_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, num_lanes=2)
    logits(rig, 5 * MIB)
    rig.get(3 * MIB, lane=1)
    rig.manager.get_persistent("flags", (8,), torch.int32)
    rig.manager.lock()
    report = rig.manager.report()
    assert report.locked
    assert (report.committed_bytes, report.persistent_bytes) == (8 * MIB, 32)
    assert json.loads(json.dumps(report.as_dict()))["locked"] is True
    assert "logits" in json.dumps(report.as_dict())
    assert "\n" not in report.line()
    assert "logits" in report.line()


def test_the_lock_logs_its_accounts_once_at_debug_level(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    logits(rig, 5 * MIB)
    with logged("vllm.v1.worker.workspace") as records:
        rig.manager.lock()
    assert [record.levelno for record in records] == [logging.DEBUG]
    assert "logits" in records[0].getMessage()


def test_two_overflows_do_not_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, overflow_limit_bytes=2048)
    rig.manager.lock()
    first, second = experts(rig, 1024), experts(rig, 1024)
    assert first.data_ptr() != second.data_ptr()


def test_the_limit_is_for_what_is_held_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, overflow_limit_bytes=2048)
    rig.manager.lock()
    first, second = experts(rig, 1024), experts(rig, 1024)
    with pytest.raises(AssertionError, match="Workspace is locked"):
        experts(rig, 256)
    del first
    third = experts(rig, 512)
    assert third.data_ptr() != second.data_ptr()
    part = third[:16]
    del third
    with pytest.raises(AssertionError, match="Workspace is locked"):
        experts(rig, 1024)
    del part
    experts(rig, 1024)


def test_overflow_is_logged_once_for_each_call_site(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, overflow_limit_bytes=64 * MIB)
    logits(rig, 2 * MIB)
    rig.manager.lock()
    with logged("vllm.v1.worker.workspace") as records:
        for size in (5 * MIB, 7 * MIB):
            experts(rig, size)
        logits(rig, 3 * MIB)
    texts = [record.getMessage() for record in records if record.levelno == logging.WARNING]
    assert len(texts) == 2
    for text, words in zip(texts, (("experts", "5.00", "2.00"), ("logits", "3.00", "2.00")), strict=True):
        assert all(word in text for word in words), text
    assert rig.slot().overflow_count == 3
    assert rig.slot().overflow_peak_bytes == 7 * MIB


@pytest.mark.parametrize(("limit", "served"), [(0, False), (2048, False), (4096, True), (8192, True)])
def test_overflow_has_a_limit(monkeypatch: pytest.MonkeyPatch, limit: int, served: bool) -> None:
    rig = Rig(monkeypatch, overflow_limit_bytes=limit)
    place = rig.get(256).data_ptr()
    rig.manager.lock()
    if served:
        assert rig.get(4096).numel() == 4096
    else:
        with pytest.raises(AssertionError, match="Workspace is locked"):
            rig.get(4096)
    assert rig.slot().overflow_count == served
    assert rig.get(256).data_ptr() == place


@pytest.mark.parametrize(
    ("policy", "limit_mb", "served"), [(None, None, True), ("transient", "1", False), ("error", None, False)]
)
def test_the_switches_decide_for_the_manager_of_the_process(
    module: Any, monkeypatch: pytest.MonkeyPatch, policy: str | None, limit_mb: str | None, served: bool
) -> None:
    """The default is to serve up to 1,024 MiB."""
    for name, value in (("", policy), ("_MB", limit_mb)):
        monkeypatch.delenv(f"VLLM_NEAPTIDE_WORKSPACE_OVERFLOW{name}", raising=False)
        if value is not None:
            monkeypatch.setenv(f"VLLM_NEAPTIDE_WORKSPACE_OVERFLOW{name}", value)
    module.init_workspace_manager(torch.device("cpu"))
    module.lock_workspace()
    manager = module.current_workspace_manager()
    if served:
        assert manager.get_simultaneous(((2 * MIB,), torch.uint8))[0].numel() == 2 * MIB
    else:
        with pytest.raises(AssertionError, match="Workspace is locked"):
            manager.get_simultaneous(((2 * MIB,), torch.uint8))


def test_the_manager_of_the_process(module: Any) -> None:
    module.commit_workspace()
    assert module.workspace_report() is None
    assert not module.is_workspace_manager_initialized()
    with pytest.raises(AssertionError):
        module.current_workspace_manager()
    module.init_workspace_manager(torch.device("cpu"), 2, 2, eager_in_lane_0=True)
    manager = module.current_workspace_manager()
    manager.get_simultaneous(((512,), torch.uint8))
    assert len(module.workspace_report().slots) == 4
    assert module.workspace_report() == manager.report()
    module.lock_workspace()
    assert manager.is_locked()
    module.unlock_workspace()
    assert not manager.is_locked()
    module.reset_workspace_manager()
    assert not module.is_workspace_manager_initialized()


def test_a_machine_without_an_accelerator() -> None:
    """Has no cache to empty, no capture and no free memory to ask for; only lasting storage is in the context."""
    entered = []

    @contextmanager
    def pool() -> Iterator[None]:
        entered.append(True)
        yield

    device = importlib.import_module("vllm.v1.worker.workspace_device").DeviceMemory(torch.device("cpu"), pool)
    device.release_cached()
    assert not device.capturing()
    assert device.free_bytes() is None
    assert (device.allocate_transient(7).numel(), len(entered)) == (7, 0)
    lasting = device.allocate(300)
    assert (lasting.shape, lasting.dtype, len(entered)) == ((300,), torch.uint8, 1)
    manager = importlib.import_module("vllm.v1.worker.workspace").WorkspaceManager(torch.device("cpu"))
    for size in (256, 512):
        assert manager.get_simultaneous(((size,), torch.uint8))[0].numel() == size


def test_a_second_lane_that_is_not_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    for shared in (False, True):
        with pytest.raises(RuntimeError, match="is not configured"):
            Rig(monkeypatch, eager_in_lane_0=shared).get(256, lane=1)


def test_requests_of_the_plan_are_served_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    first, second = rig.manager.get_simultaneous(((3, 5), torch.int64), ((7,), torch.bfloat16))
    assert (first.shape, first.dtype) == ((3, 5), torch.int64)
    assert (second.shape, second.dtype) == ((7,), torch.bfloat16)
    assert second.data_ptr() - first.data_ptr() == 256
    assert rig.get(8).data_ptr() == first.data_ptr()


def test_the_warm_up_of_a_capture_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    rig.manager.commit()
    with rig.graph_capture():
        rig.get(MIB)
        rig.get(2 * MIB)
        with rig.stream_capture():
            rig.get(2 * MIB)
    assert len(rig.slot().retained_by) == 1


def test_commit_again_trims_nothing_and_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    rig.get(4 * MIB)
    rig.manager.commit()
    rig.get(6 * MIB)
    place, allocations = rig.get(256).data_ptr(), list(rig.device.allocations)
    rig.manager.commit()
    assert rig.get(6 * MIB).data_ptr() == place
    assert rig.device.allocations == allocations
