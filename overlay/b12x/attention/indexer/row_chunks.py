# SPDX-License-Identifier: Apache-2.0
"""Calls with more query rows than one launch of their plan takes: the same call over chunks of rows, in order.

Chunks use one scratch, one after the other on the caller's stream. Rows are independent, and every chunk has its own
rows of each operand and output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

# Operands with a row for each query row.
_MXFP4_ROWS = (
    "q_mxfp4", "q_scales", "query_weights", "cache_lengths", "output_indices", "output_scores", "candidate_indices",
    "candidate_lengths", "candidate_output", "candidate_output_lengths",
)  # fmt: skip


@dataclass(frozen=True)
class RowChunks:
    """Bindings of the chunks of a call, each with its first row and the row behind its last.

    What else a binding has is the first one's: route, supertile, scratch.
    """

    parts: tuple[tuple[int, int, Any], ...]
    output: Any = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.parts[0][2], name)


def chunk_bounds(rows: int, launch_rows: int) -> tuple[tuple[int, int], ...]:
    """First row and the row behind the last of each launch: all rows once, in order."""
    return tuple((start, min(start + launch_rows, rows)) for start in range(0, rows, launch_rows))


def launches_of(caps: Any, rows: int) -> tuple[tuple[int, int], ...]:
    """The launches of a call; none where it is one, as without a budget.

    Raises:
        ValueError: more rows than were planned.
    """
    choice = getattr(caps, "choice", None)
    if choice is None or rows <= choice.rows:
        return ()
    if rows > choice.call_rows:
        raise ValueError(f"a call of {rows:,} rows, wanted {choice.call_rows:,} or fewer; plan with more max_q_rows")
    return chunk_bounds(rows, choice.rows)


def _require_rows(operands: Mapping[str, torch.Tensor], rows: int, of: str) -> None:
    for name, tensor in operands.items():
        if int(tensor.shape[0]) != rows:
            raise ValueError(f"{name} has {int(tensor.shape[0]):,} rows, wanted {rows:,}, as {of} has")


def bound_in_chunks(bind: Callable[..., Any], caps: Any, **operands: Any) -> Any:
    """Upstream's binding of a call, or one of each chunk where its rows are more than a launch takes.

    Raises:
        ValueError: more rows than were planned, lengths of other rows, or a ``schedule_metadata``, which is of a
            whole call.
    """
    launches = launches_of(caps, int(operands["real_page_table"].shape[0]))
    if not launches:
        return bind(**operands)
    if operands.get("schedule_metadata") is not None:
        raise ValueError(
            f"schedule_metadata with launches of {caps.choice.rows:,} rows; leave it out, or raise plan_bytes"
        )
    table, lengths = operands.pop("real_page_table"), operands.pop("cache_seqlens_int32")
    _require_rows({"cache_seqlens_int32": lengths}, int(table.shape[0]), "real_page_table")
    return RowChunks(
        tuple(
            (
                start,
                stop,
                bind(real_page_table=table[start:stop], cache_seqlens_int32=lengths[start:stop], **operands),
            )
            for start, stop in launches
        )
    )


def in_chunks(call: Callable[..., torch.Tensor], *, binding: RowChunks, **operands: Any) -> torch.Tensor:
    """``call`` of every chunk, into the caller's outputs.

    Raises:
        ValueError: without ``out_indices``: the plan's own buffers hold one launch.
    """
    out_indices, out_scores = operands.pop("out_indices"), operands.pop("out_scores")
    rows = binding.parts[-1][1]
    if out_indices is None:
        raise ValueError(
            f"{rows:,} rows in launches of {binding.parts[0][1]:,} without out_indices; pass out_indices of all rows"
        )
    by_row = {name: operands.pop(name) for name in ("q_fp8", "weights")}
    given = {**by_row, "out_indices": out_indices, **({} if out_scores is None else {"out_scores": out_scores})}
    _require_rows(given, rows, "real_page_table")
    for start, stop, part in binding.parts:
        call(
            binding=part,
            out_indices=out_indices[start:stop],
            out_scores=None if out_scores is None else out_scores[start:stop],
            **{name: tensor[start:stop] for name, tensor in by_row.items()},
            **operands,
        )
    return out_indices


def mxfp4_chunks(state: Any, operands: Mapping[str, Any]) -> RowChunks | None:
    """Bindings of an MXFP4 call's chunks; None where it is one launch.

    Args:
        operands: the local variables of ``state.bind`` as it begins: what it was given, by name.

    Raises:
        ValueError: more rows than were planned, or an operand of other rows.
    """
    q = operands["q_mxfp4"]
    rows = 0 if q is None else int(q.shape[0])
    launches = launches_of(state.caps, rows)
    if not launches:
        return None
    given = {name: value for name, value in operands.items() if name not in ("self", "_ignored")}
    by_row = {name: given.pop(name) for name in _MXFP4_ROWS if given.get(name) is not None}
    if given["page_table"].shape[0] != 1:
        by_row["page_table"] = given.pop("page_table")
    _require_rows(by_row, rows, "q_mxfp4")
    return RowChunks(
        tuple(
            (start, stop, state.bind(**{n: tensor[start:stop] for n, tensor in by_row.items()}, **given))
            for start, stop in launches
        ),
        operands["output_indices"],
    )


def run_mxfp4_chunks(state: Any, binding: RowChunks) -> torch.Tensor:
    """``state.run`` of every chunk; all rows of the output."""
    for _, _, part in binding.parts:
        state.run(part)
    whole: torch.Tensor = binding.output
    return whole


def refuse_chunks(binding: Any) -> None:
    """Nothing for a binding of one launch.

    Raises:
        ValueError: a stage by itself of a call in chunks, whose scratch has the scores of one launch.
    """
    if isinstance(binding, RowChunks):
        launch, rows = binding.parts[0][1], binding.parts[-1][1]
        raise ValueError(
            f"scores of {rows:,} rows in launches of {launch:,}; call run, call in parts of {launch:,} rows, or plan "
            "without plan_budget"
        )
