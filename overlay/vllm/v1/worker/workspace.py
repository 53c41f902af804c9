# SPDX-License-Identifier: Apache-2.0
"""Scratch memory that layers share, one slot for each (ubatch, lane): first planned, then committed, then locked.

*Planning* lasts from the start to :meth:`WorkspaceManager.commit`, which the worker calls after its first profiling
pass. Layers run on what they get, so a request is served at once, from provisional storage of the slot that grows
as needed. A view taken then stays valid memory for as long as it is held, but it belongs to the plan: the slot may have
other storage at the next request, and has after the commit. Nobody may keep such a view across requests to pass data
on, before as after the commit, and a capture that shall last must come after it.

*Commit* drops the provisional storage of every slot and allocates its largest request, once, exactly. After it a
slot still grows if it must, by the same rule for everybody: never inside a stream capture, and never while a graph
that was captured to last holds its addresses. Graphs of a disposable capture (``capture_scopes``) do not count, for
they are never replayed.

*Lock* is upstream's: after the captures a slot stays where it is. A request that is larger is upstream's assertion,
or, with ``VLLM_NEAPTIDE_WORKSPACE_OVERFLOW=transient`` in an engine's worker and outside capture, an allocation of its
own, up to ``VLLM_NEAPTIDE_WORKSPACE_OVERFLOW_MB``, that dies with its views.

*Lanes* keep what the graphs of target and draft hold apart. With ``eager_in_lane_0`` a lane above 0 has storage of
its own only for what is captured and for the warm-up of a capture; its eager requests come from lane 0 of the same
ubatch, and so do those of ops that a PIECEWISE graph leaves out. Lane 0 grows with the warm-ups of the other lanes
while nothing lasting holds it, since a step without graphs asks it for as much. Sharing is right because a step runs
target and draft one after the other on one stream, and scratch holds nothing across calls.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import TypeVar, cast

import torch
import vllm.envs as envs
from vllm.distributed.capture_scopes import in_disposable_capture, in_graph_capture
from vllm.logger import init_logger
from vllm.v1.worker.ubatching import dbo_current_ubatch_id
from vllm.v1.worker.workspace_context import (
    current_lane,
    in_eager_break,
    use_workspace_lane,
)
from vllm.v1.worker.workspace_device import DeviceMemory
from vllm.v1.worker.workspace_layout import Spec, planned_bytes, workspace_layout
from vllm.v1.worker.workspace_overflow import Overflow, WorkspaceGrowthRefused, refuse_if_retained
from vllm.v1.worker.workspace_persistent import PersistentResources
from vllm.v1.worker.workspace_report import MIB, CallSite, SlotAccount, WorkspaceReport

# Upstream's modules take use_workspace_lane from here.
__all__ = [
    "WorkspaceGrowthRefused", "WorkspaceManager", "commit_workspace", "current_workspace_manager",
    "init_workspace_manager", "is_workspace_manager_initialized", "lock_workspace",
    "reset_workspace_manager", "unlock_workspace", "use_workspace_lane", "workspace_report",
]  # fmt: skip

logger = init_logger(__name__)
T = TypeVar("T")

_manager: WorkspaceManager | None = None


def _debug(text: str, *args: object) -> None:
    if envs.VLLM_DEBUG_WORKSPACE:
        logger.info(f"[WORKSPACE DEBUG] {text}", *args)


class WorkspaceManager:
    """Scratch and keyed persistent resources of each (ubatch, lane).

    Args:
        device: where the storage lies.
        num_ubatches: ubatches, default 1.
        num_lanes: lanes of a ubatch, at least 1.
        alloc_context: makes the context that storage is allocated in (the sleep-mode pool).
        eager_in_lane_0: lanes above 0 have storage of their own for graphs only.
        overflow_limit_bytes: most that requests over a locked slot may hold at once; 0 for upstream's assertion.

    Raises:
        ValueError: ``num_lanes`` below 1.
    """

    def __init__(
        self,
        device: torch.device,
        num_ubatches: int | None = None,
        num_lanes: int = 1,
        alloc_context: Callable[[], AbstractContextManager] = nullcontext,
        *,
        eager_in_lane_0: bool = False,
        overflow_limit_bytes: int = 0,
    ):
        if num_lanes < 1:
            raise ValueError(f"num_lanes must be at least one, got {num_lanes}.")
        self._device = device
        self._memory = DeviceMemory(device, alloc_context)
        self._num_lanes = num_lanes
        self._eager_in_lane_0 = eager_in_lane_0
        self._overflow = Overflow(overflow_limit_bytes)
        slots = [
            (ubatch, lane) for ubatch in range(1 if num_ubatches is None else num_ubatches) for lane in range(num_lanes)
        ]
        self._accounts = [SlotAccount(ubatch, lane) for ubatch, lane in slots]
        self._current_workspaces: list[torch.Tensor | None] = [None] * len(slots)
        self._persistent_resources = [PersistentResources() for _ in slots]
        self._planning = True
        self._locked = False

    @staticmethod
    def _workspace_size_bytes(workspace: torch.Tensor | None) -> int:
        return 0 if workspace is None else workspace.numel() * workspace.element_size()

    def commit(self) -> None:
        """End the planning: every slot gets storage of its largest request.

        A slot that a lasting graph holds keeps its storage. Calling it again trims nothing and moves nothing.
        """
        if not self._planning:
            return
        self._planning = False
        loose = [
            index
            for index, (account, workspace) in enumerate(zip(self._accounts, self._current_workspaces, strict=True))
            if not account.retained_by and self._workspace_size_bytes(workspace) != account.high_water_bytes
        ]
        for index in loose:
            self._current_workspaces[index] = None
        self._memory.release_cached()
        for index in loose:
            self._current_workspaces[index] = self._memory.allocate(self._accounts[index].high_water_bytes)

    def lock(self) -> None:
        """Keep every slot where it is from now on, and refuse new persistent resources.

        If the planning still lasts, it is committed first, which may move a slot that no lasting graph holds.
        """
        self.commit()
        self._locked = True
        logger.debug("Workspace locked. %s", self.report().as_dict())
        _debug("Workspace locked. %s", self.report().line())

    def unlock(self) -> None:
        """Allow growth again. The caller has released its graphs (elastic EP does), so none holds a slot any more."""
        self._locked = False
        for account in self._accounts:
            account.retained_by.clear()
        _debug("Workspace unlocked. %s", self.report().line())

    def is_locked(self) -> bool:
        """Whether the slots are locked."""
        return self._locked

    def report(self) -> WorkspaceReport:
        """Sizes, consumers and overflows of all slots."""
        slots = zip(self._accounts, self._current_workspaces, self._persistent_resources, strict=True)
        return WorkspaceReport(
            self._locked,
            tuple(
                account.report(self._workspace_size_bytes(workspace), resources.tensor_bytes)
                for account, workspace, resources in slots
            ),
        )

    def _slot(self, *, own: bool = True) -> int:
        """Index of the current ubatch's slot: the lane's own, or that of lane 0."""
        lane = current_lane()
        if lane >= self._num_lanes:
            raise RuntimeError(f"Workspace lane {lane} is not configured; manager has {self._num_lanes} lane(s).")
        return dbo_current_ubatch_id() * self._num_lanes + (lane if own else 0)

    def get_persistent_resource(self, key: Hashable, factory: Callable[[], T]) -> T:
        """The resource of ``key`` in the current ubatch and lane, made by ``factory`` at its first request.

        It lives as long as the manager, each ubatch and lane has its own, and its storage must not be replaced once the
        manager is locked. Uses must not overlap: the key names type and configuration, and the stream where streams
        run at the same time. Under torch.compile call it from a custom op.

        Raises:
            AssertionError: a new key after the lock.
        """
        return self._persistent_resources[self._slot()].get(key, factory, locked=self._locked)

    def get_persistent(
        self,
        key: Hashable,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        zero_init: bool = False,
    ) -> torch.Tensor:
        """A tensor of fixed ``shape`` and ``dtype``, zeroed (if ``zero_init``) when it is made and never again.

        Raises:
            AssertionError: a new key after the lock.
            ValueError: another shape or dtype than the key has.
        """
        make = torch.zeros if zero_init else torch.empty
        tensor = self.get_persistent_resource(
            (torch.Tensor, key), lambda: make(shape, dtype=dtype, device=self._device)
        )
        if tensor.shape != shape or tensor.dtype != dtype:
            raise ValueError(
                f"Persistent workspace {key!r} has shape={tensor.shape}, dtype={tensor.dtype}; "
                f"requested shape={shape}, dtype={dtype}."
            )
        return tensor

    def get_simultaneous(self, *shapes_and_dtypes: Spec) -> list[torch.Tensor]:
        """Tensors that are used together: views into one storage, one for each (shape, dtype), uninitialised.

        Two calls return overlapping memory. Under torch.compile call it from a custom op.

        Raises:
            AssertionError: larger than the slot inside a capture, or after the lock where overflow is not allowed.
            WorkspaceGrowthRefused: larger than the slot, whose storage a captured graph holds.
            RuntimeError: the lane is not configured.
        """
        layout = workspace_layout(shapes_and_dtypes)
        return layout.views(self._storage(layout.total_bytes, sys._getframe(1)))

    def _storage(self, required: int, frame: FrameType) -> torch.Tensor:
        capturing = self._memory.capturing()
        index = self._request_slot(capturing)
        workspace = self._current_workspaces[index]
        if workspace is None and not required:
            return torch.empty(0, dtype=torch.uint8, device=self._device)
        fits = workspace is not None and workspace.numel() >= required
        if fits and self._locked:
            return cast(torch.Tensor, workspace)
        account, site = self._accounts[index], CallSite.of(frame, current_lane())
        if not fits:
            if self._locked or capturing:
                return self._serve_overflow(index, required, site, capturing)
            refuse_if_retained(account, self._workspace_size_bytes(workspace), required, site)
            # The old storage has to be gone before the new one is allocated.
            del workspace
            workspace = self._grow(index, required, site)
        account.note(site, required)
        if not capturing:
            self._provide_for_eager(index, required, site)
        elif not in_disposable_capture():
            account.retained_by.add(site)
        return cast(torch.Tensor, workspace)

    def _request_slot(self, capturing: bool) -> int:
        """The slot that serves a request of the current ubatch and lane."""
        for_graphs = capturing or (in_graph_capture() and not in_eager_break())
        return self._slot(own=for_graphs or not self._eager_in_lane_0)

    def _provide_for_eager(self, index: int, required: int, site: CallSite) -> None:
        """Let lane 0 have what a lane's graph is warmed up with, if it can: a step without graphs asks for as much."""
        shared = self._slot(own=False)
        account, size = self._accounts[shared], self._workspace_size_bytes(self._current_workspaces[shared])
        if not self._eager_in_lane_0 or index == shared or size >= required or account.retained_by:
            return
        self._grow(shared, required, site)
        account.note(site, required)

    def _serve_overflow(self, index: int, required: int, site: CallSite, capturing: bool) -> torch.Tensor:
        current = self._workspace_size_bytes(self._current_workspaces[index])
        if capturing or not self._overflow.has_room(required):
            raise AssertionError(
                self._overflow.refusal(current, required, site, locked=self._locked, capturing=capturing)
            )
        account = self._accounts[index]
        if account.note_overflow(site, required):
            logger.warning(
                "Workspace overflow: '%s' requires %.2f MB, current size is %.2f MB (ubatch %d, lane %d). It is served "
                "beside the slot, out of memory that no profile has reserved; more of this caller are counted only.",
                site, required / MIB, current / MIB, account.ubatch, account.lane,
            )  # fmt: skip
        return self._overflow.allocate(self._memory, required)

    def _grow(self, index: int, required: int, site: CallSite) -> torch.Tensor:
        """Other storage for a slot that nothing lasting holds; only this slot, others grow at their own requests."""
        current = self._workspace_size_bytes(self._current_workspaces[index])
        self._current_workspaces[index] = None
        self._memory.release_cached()
        if self._planning:
            size = planned_bytes(current, required, self._memory.free_bytes())
        else:
            size = required
            self._accounts[index].growths += 1
        grown = self._memory.allocate(size)
        self._current_workspaces[index] = grown
        _debug(
            "Resized workspace from '%s': %.2f MB -> %.2f MB (ubatch %d, lane %d)",
            site, current / MIB, size / MIB, self._accounts[index].ubatch, self._accounts[index].lane,
        )  # fmt: skip
        return grown


def is_workspace_manager_initialized() -> bool:
    """Whether :func:`init_workspace_manager` was called."""
    return _manager is not None


def current_workspace_manager() -> WorkspaceManager:
    """The manager of this process.

    Raises:
        AssertionError: there is none.
    """
    assert _manager is not None, (
        "WorkspaceManager not initialized. Call init_workspace_manager() with a device before using workspace "
        "functions."
    )
    return _manager


def init_workspace_manager(
    device: torch.device,
    num_ubatches: int | None = None,
    num_lanes: int = 1,
    alloc_context: Callable[[], AbstractContextManager] = nullcontext,
    *,
    eager_in_lane_0: bool = False,
) -> None:
    """Make the manager of this process, with the overflow policy of the environment's switches.

    Args: see :class:`WorkspaceManager`.
    """
    global _manager
    if _manager is not None:
        logger.warning(
            "WorkspaceManager already initialized on device %s, reinitializing on device %s", _manager._device, device
        )
    transient = envs.VLLM_NEAPTIDE_WORKSPACE_OVERFLOW == "transient"
    _manager = WorkspaceManager(
        device,
        num_ubatches,
        num_lanes,
        alloc_context,
        eager_in_lane_0=eager_in_lane_0,
        overflow_limit_bytes=envs.VLLM_NEAPTIDE_WORKSPACE_OVERFLOW_MB * MIB if transient else 0,
    )


def commit_workspace() -> None:
    """End the planning of the current manager, if there is one."""
    if _manager is not None:
        _manager.commit()


def workspace_report() -> WorkspaceReport | None:
    """What the current manager holds; None without one."""
    return None if _manager is None else _manager.report()


def lock_workspace() -> None:
    """Lock the current manager: see :meth:`WorkspaceManager.lock`."""
    current_workspace_manager().lock()


def unlock_workspace() -> None:
    """Unlock the current manager, whose graphs the caller has released: see :meth:`WorkspaceManager.unlock`."""
    current_workspace_manager().unlock()


def reset_workspace_manager() -> None:
    """Forget the manager of this process; its storage dies with the last view."""
    global _manager
    _manager = None
