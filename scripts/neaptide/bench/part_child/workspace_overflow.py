"""Requests over a locked slot while graphs that were captured on it go on."""

from __future__ import annotations

from typing import Any

import torch
from workspace_managers import Graph, commit, held_bytes, new_manager, request


def run_overflow(case: dict[str, Any], spec: dict[str, Any]) -> list[dict[str, Any]]:
    """A locked slot of ``slot_bytes``, a graph on it, then ``requests_bytes`` one after another."""
    manager = new_manager()
    request(manager, case["slot_bytes"])
    commit(manager)
    graph = Graph(manager, case["slot_bytes"])
    manager.lock()
    address, held, first = manager._current_workspaces[0].data_ptr(), held_bytes(), graph.replayed()
    outcomes = [_served(manager, size, address) for size in case["requests_bytes"]]
    return [{
        "requests": outcomes,
        "slot_moved": manager._current_workspaces[0].data_ptr() != address,
        "replays_equal": graph.replayed() == first,
        "held_after_bytes": held_bytes() - held,
        "in_capture": _in_capture(manager, case["requests_bytes"][0]),
        "replays_equal_at_the_end": graph.replayed() == first,
    }]  # fmt: skip


def _served(manager: Any, size: int, slot: int) -> str:
    try:
        view = request(manager, size)
    except AssertionError as error:
        return f"refused: {error}"
    view.fill_(1)
    torch.cuda.synchronize()
    right = int(view[:: 1 << 12].sum(dtype=torch.int64)) == len(range(0, size, 1 << 12))
    return "served" if right and view.data_ptr() != slot else "served wrongly"


def _in_capture(manager: Any, size: int) -> str:
    """What the same request gets inside a capture; the capture is thrown away."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            request(manager, size)
    except AssertionError:
        return "refused"
    return "served"
