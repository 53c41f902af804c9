# SPDX-License-Identifier: Apache-2.0
"""For whom workspace is asked in this execution context: its lane, and whether a graph will hold it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import ParamSpec, TypeVar

_lane: ContextVar[int] = ContextVar("vllm_workspace_lane", default=0)
_for_graphs: ContextVar[bool] = ContextVar("vllm_workspace_for_graphs", default=False)
_piecewise: ContextVar[bool] = ContextVar("vllm_workspace_piecewise", default=False)
_eager_break: ContextVar[bool] = ContextVar("vllm_workspace_eager_break", default=False)

P = ParamSpec("P")
R = TypeVar("R")


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


@contextmanager
def capturing_graphs(*, piecewise: bool) -> Iterator[None]:
    """PIECEWISE graphs, or FULL ones, are warmed up and captured in this context."""
    token = _piecewise.set(piecewise)
    try:
        yield
    finally:
        _piecewise.reset(token)


def eager_break(op: Callable[P, R]) -> Callable[P, R]:
    """Mark an op that no PIECEWISE graph contains, but FULL graphs do: attention, the indexer."""

    @wraps(op)
    def marked(*args: P.args, **kwargs: P.kwargs) -> R:
        if not _piecewise.get():
            return op(*args, **kwargs)
        token = _eager_break.set(True)
        try:
            return op(*args, **kwargs)
        finally:
            _eager_break.reset(token)

    return marked


def in_eager_break() -> bool:
    """Whether PIECEWISE graphs are warmed up or captured now and the op that runs stays out of them."""
    return _eager_break.get()
