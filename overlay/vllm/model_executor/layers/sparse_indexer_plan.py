# SPDX-License-Identifier: Apache-2.0
"""The plan of the sparse indexer's prefill: which rows are scored in one launch. Without torch, as the sizes are."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.model_executor.layers.sparse_indexer_logits import PrefillLaunch

Chunk = tuple[slice, slice]


def plan_chunks(
    rows: Sequence[int],
    kv_rows: Sequence[int],
    columns: Sequence[int],
    workspace_rows: int,
    launch: PrefillLaunch,
) -> list[Chunk]:
    """Split prefill requests into launches by what each launch allocates.

    Requests are packed in order while their gathered keys fit the workspace and their logits one launch. A request
    that does not fit alone is split into row ranges.

    Args:
        rows: query rows of each request.
        kv_rows: keys of each request that are gathered into the workspace.
        columns: keys that a row of each request can be scored against on this rank.
        workspace_rows: keys that the workspace holds.

    Returns:
        (requests, rows within them) of each launch, in order; every row is in exactly one.
    """
    chunks: list[Chunk] = []
    end = 0
    while end < len(rows):
        start, packed, gathered, widest = end, 0, 0, 0
        while end < len(rows):
            width = launch.packed_columns(widest, columns[end])
            more, keys = packed + rows[end], gathered + kv_rows[end]
            if keys > workspace_rows or not launch.fits(more, width):
                break
            packed, gathered, widest, end = more, keys, width, end + 1
        if end == start:
            packed, widest, end = rows[start], columns[start], start + 1
        step = launch.max_rows(widest) if widest else max(1, packed)
        chunks += [(slice(start, end), slice(at, min(at + step, packed))) for at in range(0, packed, step)]
    return chunks
