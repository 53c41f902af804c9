"""The workspace manager on a fake device: plan, commit, growth, lock, captures, accounts, persistent tensors."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from workspace_device import MIB, Rig

GROWING = tuple(range(64 * MIB, 1024 * MIB + 1, 64 * MIB))
# Sizes of local-inference-lab/vllm#224.
SLOT_BYTES = int(578.50 * MIB)
OVERFLOWS = (int(917.67 * MIB), int(607.70 * MIB))


def refused() -> Any:
    return importlib.import_module("vllm.v1.worker.workspace").WorkspaceGrowthRefused


def captured_kernel(rig: Rig, size: int) -> torch.Tensor:
    """A call site."""
    return rig.manager.get_simultaneous(((size,), torch.uint8))[0]


def larger_kernel(rig: Rig, size: int) -> torch.Tensor:
    """Another one."""
    return rig.manager.get_simultaneous(((size,), torch.uint8))[0]


def test_a_view_of_the_plan_stays_memory_while_it_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    held = rig.get(4096)
    held.fill_(7)
    rig.get(MIB)
    rig.manager.commit()
    rig.get(MIB).fill_(1)
    assert rig.device.holds(held.data_ptr())
    assert bool((held == 7).all())


def test_growing_requests_whose_views_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream keeps each request: 64 MiB x (1 + ... + 16). The plan at most twice the last, the commit it alone."""
    rig = Rig(monkeypatch, total_bytes=128 << 30)
    views = [rig.get(size) for size in GROWING]
    assert sum(GROWING) == 8704 * MIB
    assert rig.device.peak_reserved_bytes == rig.device.reserved_bytes <= 2 * GROWING[-1]
    assert all(rig.device.holds(view.data_ptr()) for view in views)
    del views
    rig.manager.commit()
    assert rig.device.reserved_bytes == rig.device.allocated_bytes == GROWING[-1]


def test_growing_requests_whose_views_are_dropped_leave_no_orphans(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, total_bytes=1024 * MIB)
    for size in GROWING:
        rig.get(size)
        assert rig.device.reserved_bytes == rig.device.allocated_bytes
    rig.manager.commit()
    assert rig.device.reserved_bytes == GROWING[-1]


def test_commit_allocates_every_slot_once_at_its_largest_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """All provisional storage goes first: the device has room for what stays and no more."""
    rig = Rig(monkeypatch, total_bytes=128 << 30, num_lanes=2, num_ubatches=2)
    wanted = {(0, 0): 70 * MIB, (0, 1): 90 * MIB, (1, 0): 130 * MIB}
    for (ubatch, lane), size in wanted.items():
        rig.ubatch = ubatch
        for part in (size - 20 * MIB, size, 256):
            rig.get(part, lane)
    rig.device.total_bytes = sum(wanted.values())
    before = len(rig.device.allocations)
    rig.manager.commit()
    assert sorted(rig.device.allocations[before:]) == sorted(wanted.values())
    assert rig.device.reserved_bytes == sum(wanted.values())
    assert {(u, n): rig.slot(n, u).committed_bytes for u, n in wanted} == wanted


def test_growth_after_the_commit_is_exact_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, total_bytes=128 << 30)
    rig.get(60 * MIB)
    rig.get(64 * MIB)
    rig.manager.commit()
    assert rig.slot().growths == 0
    rig.get(65 * MIB)
    rig.get(64 * MIB)
    assert rig.slot().committed_bytes == 65 * MIB
    assert rig.slot().growths == 1
    assert rig.device.reserved_bytes == 66 * MIB


def test_lock_ends_the_planning_where_the_slots_are(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, total_bytes=128 << 30)
    place = rig.get(4 * MIB).data_ptr()
    rig.manager.lock()
    assert rig.manager.is_locked()
    assert rig.get(4 * MIB).data_ptr() == place
    rig.manager.unlock()
    rig.get(5 * MIB)
    assert (rig.slot().committed_bytes, rig.slot().growths) == (5 * MIB, 1)


def test_a_locked_slot_refuses_what_is_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    place = rig.get(512).data_ptr()
    rig.manager.lock()
    with pytest.raises(AssertionError, match=r"Workspace is locked.*_manager\.py:\d+:larger_kernel"):
        larger_kernel(rig, MIB)
    assert rig.get(512).data_ptr() == place


@pytest.mark.parametrize("committed", [False, True])
@pytest.mark.parametrize("disposable", [False, True])
def test_no_growth_inside_a_stream_capture(monkeypatch: pytest.MonkeyPatch, committed: bool, disposable: bool) -> None:
    rig = Rig(monkeypatch, overflow_limit_bytes=64 * MIB)
    rig.get(4 * MIB)
    if committed:
        rig.manager.commit()
    with rig.stream_capture(disposable=disposable):
        place = rig.get(MIB).data_ptr()
        with pytest.raises(AssertionError):
            rig.get(8 * MIB)
    assert rig.get(4 * MIB).data_ptr() == place


@pytest.mark.parametrize("committed", [False, True])
def test_growth_under_a_captured_graph_names_both_callers(monkeypatch: pytest.MonkeyPatch, committed: bool) -> None:
    rig = Rig(monkeypatch)
    rig.get(4 * MIB)
    if committed:
        rig.manager.commit()
    with rig.stream_capture():
        place = captured_kernel(rig, MIB).data_ptr()
    with pytest.raises(refused()) as refusal:
        larger_kernel(rig, 8 * MIB)
    for caller in ("captured_kernel", "larger_kernel"):
        assert caller in str(refusal.value)
    assert rig.get(4 * MIB).data_ptr() == place
    assert [site.split(":")[2] for site in rig.slot().retained_by] == ["captured_kernel"]


def test_commit_keeps_what_a_lasting_graph_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although it has grown ahead; and a second commit moves it no more, when nothing holds it."""
    rig = Rig(monkeypatch, total_bytes=128 << 30)
    rig.get(4 * MIB)
    rig.get(5 * MIB)
    with rig.stream_capture():
        place = rig.get(256).data_ptr()
    for _ in range(2):
        rig.manager.commit()
        assert rig.get(5 * MIB).data_ptr() == place
        assert rig.slot().committed_bytes == 8 * MIB
        rig.manager.unlock()


def test_disposable_graphs_hold_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the plan and after the commit: they are gone before the slot moves."""
    rig = Rig(monkeypatch)
    for size in (4 * MIB, 8 * MIB):
        rig.get(size)
        with rig.stream_capture(disposable=True):
            rig.get(size)
        assert rig.slot().retained_by == ()
        assert rig.get(size + MIB).numel() == size + MIB
        rig.manager.commit()


def test_unlock_releases_what_graphs_held(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    rig.get(4 * MIB)
    rig.manager.commit()
    with rig.stream_capture():
        rig.get(4 * MIB)
    rig.manager.lock()
    rig.manager.unlock()
    assert rig.get(8 * MIB).numel() == 8 * MIB
    assert rig.slot().retained_by == ()


def test_persistent_tensors_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scratch, commit and lock leave them alone; each lane has its own, shared eager scratch or not."""
    rig = Rig(monkeypatch, num_lanes=2, eager_in_lane_0=True)
    flags = rig.manager.get_persistent("flags", (8,), torch.int32, zero_init=True)
    assert bool((flags == 0).all())
    flags.fill_(3)
    with rig.module.use_workspace_lane(1):
        own = rig.manager.get_persistent("flags", (8,), torch.int32, zero_init=True)
    rig.get(MIB).zero_()
    rig.manager.lock()
    assert rig.manager.get_persistent("flags", (8,), torch.int32, zero_init=True) is flags
    assert bool((flags == 3).all())
    assert bool((own == 0).all())
    assert rig.slot(0).persistent_bytes == rig.slot(1).persistent_bytes == 32
    for shape, dtype in (((9,), torch.int32), ((8,), torch.float32)):
        with pytest.raises(ValueError, match="requested shape"):
            rig.manager.get_persistent("flags", shape, dtype)
    with pytest.raises(AssertionError, match="other"):
        rig.manager.get_persistent("other", (8,), torch.int32)


def test_each_consumer_has_its_maximum_and_its_call_site(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    for size in (2 * MIB, 5 * MIB, MIB):
        captured_kernel(rig, size)
    for size in (3 * MIB, 256):
        larger_kernel(rig, size)
    rig.manager.commit()
    slot = rig.slot()
    assert (slot.committed_bytes, slot.high_water_bytes, slot.second_consumer_bytes) == (5 * MIB, 5 * MIB, 3 * MIB)
    sites = {consumer.site.split(":")[2]: consumer.max_bytes for consumer in slot.consumers}
    assert sites == {"captured_kernel": 5 * MIB, "larger_kernel": 3 * MIB}
    for consumer in slot.consumers:
        file, line, _ = consumer.site.split(":")
        assert (file, consumer.lane, int(line) > 1) == ("test_workspace_manager.py", 0, True)


def test_overflow_is_served_beside_the_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that holds the slot finds it where it was."""
    rig = Rig(monkeypatch, total_bytes=4 << 30, overflow_limit_bytes=1024 * MIB)
    captured_kernel(rig, SLOT_BYTES)
    rig.manager.commit()
    with rig.stream_capture():
        place = captured_kernel(rig, SLOT_BYTES).data_ptr()
    rig.manager.lock()
    before = rig.device.allocated_bytes
    for size in OVERFLOWS:
        view = larger_kernel(rig, size)
        assert view.numel() == size
        assert view.data_ptr() != place
        assert rig.device.allocated_bytes >= before + size
        del view
        assert rig.device.allocated_bytes == before
        assert captured_kernel(rig, SLOT_BYTES).data_ptr() == place
    assert rig.device.holds(place)
    assert [size // 256 for size in rig.device.transients] == [-(-size // 256) for size in OVERFLOWS]
    slot = rig.slot()
    assert (slot.committed_bytes // 256, slot.overflow_count) == (-(-SLOT_BYTES // 256), 2)
    assert slot.overflow_peak_bytes == rig.device.transients[0]


def test_overflow_inside_a_capture_is_an_assertion(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, overflow_limit_bytes=1024 * MIB)
    rig.get(256)
    rig.manager.lock()
    for disposable in (False, True):
        with rig.stream_capture(disposable=disposable), pytest.raises(AssertionError, match="Workspace is locked"):
            rig.get(4096)
    assert rig.device.transients == []
