"""A sequence of growing requests: what is held at its end, and where a captured graph's address is then."""

from __future__ import annotations

from typing import Any

import torch
from workspace_managers import Graph, commit, held_bytes, new_manager, request


def run_growth(case: dict[str, Any], spec: dict[str, Any]) -> list[dict[str, Any]]:
    """One sequence.

    ``keep_views``: every view is kept to the end of the sequence. ``captured``: ``first`` captures a graph at the first
    size before anything has grown, ``planned`` after the sequence has run once and the plan is committed.
    """
    manager = new_manager()
    start = held_bytes()
    sizes = case["sizes_bytes"]
    graph = None
    if case["captured"] == "planned":
        for size in sizes:
            request(manager, size)
        commit(manager)
    if case["captured"]:
        graph = Graph(manager, sizes[0])
    views: list[torch.Tensor] = []
    refused = moves = 0
    peak = 0
    for size in sizes:
        before = _address(manager)
        try:
            view = request(manager, size)
        except RuntimeError as error:
            if "captured CUDA graph holds" not in str(error):
                raise
            refused += 1
            continue
        moves += before not in (None, _address(manager))
        if case["keep_views"]:
            views.append(view)
        del view
        peak = max(peak, torch.cuda.memory_reserved() - start)
    row = {
        "moves": moves, "refused": refused, "peak_reserved_bytes": peak,
        "reserved_views_kept_bytes": held_bytes() - start,
    }  # fmt: skip
    if graph is not None:
        row["dangling_addresses"] = int(graph.dangles(manager))
        if not row["dangling_addresses"]:
            row["replay_sum_right"] = graph.replayed() == 3 * len(range(0, sizes[0], 1 << 12))
    views.clear()
    if graph is None:
        commit(manager)
    return [row | {"reserved_end_bytes": held_bytes() - start}]


def _address(manager: Any) -> int | None:
    storage = manager._current_workspaces[0]
    return None if storage is None else storage.data_ptr()
