# SPDX-License-Identifier: Apache-2.0
"""For whom workspace is asked in this execution context: its lane, and whether it is a reservation for graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_lane: ContextVar[int] = ContextVar("vllm_workspace_lane", default=0)
_for_graphs: ContextVar[bool] = ContextVar("vllm_workspace_for_graphs", default=False)


@contextmanager
def use_workspace_lane(lane: int) -> Iterator[None]:
    """Requests of this execution context come from ``lane`` (0 target, 1 draft).

    Raises:
        ValueError: a negative lane.
    """
    if lane < 0:
        raise ValueError(f"Workspace lane must be non-negative, got {lane}.")
    token = _lane.set(lane)
    try:
        yield
    finally:
        _lane.reset(token)


@contextmanager
def reserve_for_graphs(reserves: bool) -> Iterator[None]:
    """Requests of this context are reservations for graphs (if ``reserves``): the lane gets storage of its own."""
    token = _for_graphs.set(reserves)
    try:
        yield
    finally:
        _for_graphs.reset(token)


def current_lane() -> int:
    """The lane of this context, 0 outside :func:`use_workspace_lane`."""
    return _lane.get()


def reserving_for_graphs() -> bool:
    """Whether this context is in :func:`reserve_for_graphs`."""
    return _for_graphs.get()
