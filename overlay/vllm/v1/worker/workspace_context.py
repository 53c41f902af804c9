# SPDX-License-Identifier: Apache-2.0
"""For whom workspace is asked: the lane of this execution context, and whether a graph being captured will hold it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from threading import local
from typing import ParamSpec, TypeVar

_lane: ContextVar[int] = ContextVar("vllm_workspace_lane", default=0)

P = ParamSpec("P")
R = TypeVar("R")


class _Capture(local):
    """What this thread captures; torch.compile can trace attributes of a thread's own, and no ContextVar."""

    piecewise = False
    in_break = False


_capture = _Capture()


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


def current_lane() -> int:
    """The lane of this context, 0 outside :func:`use_workspace_lane`."""
    return _lane.get()


@contextmanager
def capturing_graphs(*, piecewise: bool) -> Iterator[None]:
    """Graphs that break at attention (PIECEWISE), or whole ones, are warmed up and captured by this thread."""
    before, _capture.piecewise = _capture.piecewise, piecewise
    try:
        yield
    finally:
        _capture.piecewise = before


def eager_break(op: Callable[P, R]) -> Callable[P, R]:
    """Mark an op that no PIECEWISE graph contains, but FULL graphs do: attention, the indexer.

    Models call some of these ops where torch.compile traces them, so the mark must be traceable.
    """

    @wraps(op)
    def marked(*args: P.args, **kwargs: P.kwargs) -> R:
        if not _capture.piecewise:
            return op(*args, **kwargs)
        before, _capture.in_break = _capture.in_break, True
        try:
            return op(*args, **kwargs)
        finally:
            _capture.in_break = before

    return marked


def in_eager_break() -> bool:
    """Whether PIECEWISE graphs are warmed up or captured now and the op that runs stays out of them."""
    return _capture.in_break
