"""What people and programs see of a run: a summary, where it grew, and lines for a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from neaptide.simulate.driver import RecordedAddresses
from neaptide.simulate.replay import Run, first_difference
from neaptide.simulate.settings import MIB

COLUMNS = (
    "run", "operations", "reserved at the end, MiB", "at most", "allocated at most", "segments", "cudaMallocs",
    "first chunk / after it, MiB", "fits",
)  # fmt: skip
GROWTH_COLUMNS = (
    "run", "operation", "what", "reserved, MiB", "grew by", "allocated, MiB", "segments", "cudaMallocs",
)  # fmt: skip
SHOWN = 40


def summary(run: Run, first: int, limit_bytes: int | None) -> dict[str, Any]:
    """One run in plain values.

    Args:
        first: operations of the ladder's first chunk; 0 for a trace that is none.
    """
    after = run.after
    last = asdict(after[-1]) if after else dict.fromkeys(
        ("reserved_bytes", "allocated_bytes", "segments", "device_allocs"), 0
    )  # fmt: skip
    row = {
        "run": run.trace.name, "settings": run.settings, "operations": len(after), **last,
        "peak_reserved_bytes": max((counters.reserved_bytes for counters in after), default=0),
        "peak_allocated_bytes": max((counters.allocated_bytes for counters in after), default=0),
        "limit_bytes": limit_bytes, "failed": run.failed, "growth": growth(run),
        "undefined_from": run.undefined_from, "recording": recording(run),
    }  # fmt: skip
    if first:
        begun = after[first - 1].reserved_bytes
        row["growth_first_chunk_bytes"] = begun
        row["growth_after_first_chunk_bytes"] = last["reserved_bytes"] - begun
    return row


def growth(run: Run) -> list[dict[str, Any]]:
    """Counters after each operation that made the reserved bytes larger."""
    out, before = [], run.initial_bytes
    for step, counters in enumerate(run.after):
        if counters.reserved_bytes > before:
            what = list(run.trace.operations[step])
            more = counters.reserved_bytes - before
            out.append({"step": step, "operation": what, "grew_bytes": more, **asdict(counters)})
        before = counters.reserved_bytes
    return out


def recording(run: Run) -> dict[str, Any] | None:
    """How the run compares with what a device recorded; None without a recording, or under other settings."""
    addresses = run.allocator.driver.addresses
    if run.trace.recorded is None or not isinstance(addresses, RecordedAddresses):
        return None
    difference = first_difference(run)
    return {"equal": difference is None, "difference": None if difference is None else asdict(difference)}


def table_row(row: Mapping[str, Any]) -> list[str]:
    sides = (row.get("growth_first_chunk_bytes"), row.get("growth_after_first_chunk_bytes"))
    limit, failed = row["limit_bytes"], row["failed"]
    fits = "" if limit is None and not failed else f"out at operation {failed[0]:,}" if failed else "yes"
    return [
        row["run"], f"{row['operations']:,}", mib(row["reserved_bytes"]), mib(row["peak_reserved_bytes"]),
        mib(row["peak_allocated_bytes"]), f"{row['segments']:,}", f"{row['device_allocs']:,}",
        " / ".join(mib(side) for side in sides if side is not None), fits,
    ]  # fmt: skip


def growth_rows(row: Mapping[str, Any]) -> list[list[str]]:
    """A line for each growth; of more than 40 the largest."""
    grown = row["growth"]
    if len(grown) > SHOWN:
        largest = sorted(grown, key=lambda line: (-line["grew_bytes"], line["step"]))[:SHOWN]
        grown = sorted(largest, key=lambda line: int(line["step"]))
    return [
        [
            row["run"], f"{line['step']:,}", described(line["operation"]), mib(line["reserved_bytes"]),
            f"+{mib(line['grew_bytes'])}", mib(line["allocated_bytes"]), f"{line['segments']:,}",
            f"{line['device_allocs']:,}",
        ]
        for line in grown
    ]  # fmt: skip


def described(operation: Sequence[Any]) -> str:
    if operation[0] != "alloc":
        return str(operation[0])
    where = [f"{name} {value}" for name, value in zip(("stream", "pool"), operation[3:], strict=False) if value]
    return ", ".join([f"{operation[2]:,} B", *where])


def notes(row: Mapping[str, Any]) -> list[str]:
    """Lines under the tables."""
    out = []
    if row["recording"] is not None:
        left = row["recording"]["difference"]
        out.append(
            f"{row['run']}: as recorded at every step"
            if left is None
            else f"{row['run']}: from operation {left['step']:,} on not as recorded: {left['what']} is "
            f"{left['simulated']:,}, recorded {left['recorded']:,}"
        )
    if row["undefined_from"] is not None:
        out.append(
            f"{row['run']}: from operation {row['undefined_from']:,} on undefined in PyTorch itself, which deletes a "
            "private pool that has blocks in use"
        )
    return out


def mib(value_bytes: int) -> str:
    """MiB, without decimals where there are none."""
    whole, rest = divmod(value_bytes, MIB)
    return f"{whole:,}" if rest == 0 else f"{value_bytes / MIB:,.2f}"


def panels(runs: Sequence[Run]) -> dict[str, list[tuple[str, list[int]]]]:
    """Reserved and allocated bytes of each run, for ``plot_bytes``."""
    return {
        run.trace.name: [
            ("reserved", [counters.reserved_bytes for counters in run.after]),
            ("allocated", [counters.allocated_bytes for counters in run.after]),
        ]
        for run in runs
    }
