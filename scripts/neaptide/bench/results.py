"""What the engine bench prints and keeps: a table, JSON, and a plot of reserved memory over the run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from neaptide.bench.engine import UPSTREAM
from neaptide.disk import write_bytes
from neaptide.errors import NeaptideError
from neaptide.output import Progress
from neaptide.plotting import plot_bytes

Row = Mapping[str, Any]
MIB = 1 << 20


def growth(row: Row) -> list[int]:
    """Reserved bytes after each request, less those at boot."""
    boot = row["boot"]["reserved_bytes"]
    return [r["after"]["reserved_bytes"] - boot for r in row["requests"]]


def same_outputs(row: Row, other: Row) -> bool:
    return [r["outputs"] for r in row["requests"]] == [r["outputs"] for r in other["requests"]]


def step_seconds(row: Row) -> float:
    return float(sum(s["seconds"] for s in row["steps"]))


def upstream_of(row: Row, rows: Sequence[Row]) -> Row | None:
    """Upstream's first finished row of the same case, which the tokens of every variant and turn are compared with."""
    same = (r for r in rows if r["case"] == row["case"] and r["variant"] == UPSTREAM)
    return next((r for r in same if r["outcome"] == "done"), None)


def time_ratio(row: Row, rows: Sequence[Row]) -> float | None:
    """Step time over that of upstream in the same turn."""
    turn = [r for r in rows if r.get("repeat", 0) == row.get("repeat", 0)]
    base = upstream_of(row, turn)
    return None if base is None else step_seconds(row) / step_seconds(base)


def without_steps(row: Row) -> dict[str, Any]:
    """A row with the sum of its steps in place of each of them."""
    if "steps" not in row:
        return dict(row)
    kept = {key: value for key, value in row.items() if key != "steps"}
    return {**kept, "step_count": len(row["steps"]), "step_seconds": round(step_seconds(row), 3)}


def table_rows(rows: Sequence[Row]) -> list[list[str]]:
    """One line a row: KV tokens, memory at boot, growth after each request, and how it compares with upstream."""
    out = []
    for row in rows:
        if row["outcome"] != "done":
            out.append([row["case"], row["variant"], row["outcome"], str(row.get("error", ""))[:80], "", "", "", ""])
            continue
        base = upstream_of(row, rows)
        ratio, boot = time_ratio(row, rows), row["boot"]
        mallocs = row["requests"][-1]["after"]["cuda_mallocs"] - boot["cuda_mallocs"]
        out.append([
            row["case"], row["variant"], f"{boot['kv_tokens']:,}", f"{round(boot['reserved_bytes'] / MIB):,}",
            " ".join(f"{round(g / MIB):+,}" for g in growth(row)), str(mallocs),
            "" if base is None else "same" if same_outputs(row, base) else "DIFFER",
            "" if ratio is None else f"{ratio:.3f}",
        ])  # fmt: skip
    return out


COLUMNS = (
    "case", "variant", "KV tokens", "reserved at boot, MiB", "growth after each request, MiB", "cudaMallocs",
    "tokens out", "step time / upstream",
)  # fmt: skip


GRAPH_COLUMNS = (
    "case", "variant", "KV tokens", "graphs estimated", "actual", "off by, MiB", "workspace lanes, MiB", "tokens out",
)  # fmt: skip


def graph_rows(rows: Sequence[Row]) -> list[list[str]]:
    """One line a row whose engine estimated its graphs: estimate, actual and what the workspace holds."""
    out = []
    for row in rows:
        boot = row.get("boot", {})
        estimated, actual = boot.get("graph_bytes_estimated"), boot.get("graph_bytes_actual")
        if row["outcome"] != "done" or estimated is None or actual is None:
            continue
        base, lanes = upstream_of(row, rows), (boot.get("workspace") or {}).get("slots", [])
        out.append([
            row["case"], row["variant"], f"{boot['kv_tokens']:,}", f"{estimated / MIB:,.1f}", f"{actual / MIB:,.1f}",
            f"{(estimated - actual) / MIB:+,.1f}", " / ".join(f"{s['committed_bytes'] / MIB:,.1f}" for s in lanes),
            "" if base is None else "same" if same_outputs(row, base) else "DIFFER",
        ])  # fmt: skip
    return out


def headed_table(title: str, columns: Sequence[str], lines: Sequence[list[str]], progress: Progress) -> None:
    """A table; on a pipe, its heading is the first line."""
    heading = [] if progress.console.is_terminal else [list(columns)]
    progress.table(title, columns, [*heading, *lines])


def show(rows: Sequence[Row], progress: Progress) -> None:
    headed_table("engine", COLUMNS, table_rows(rows), progress)
    if graphs := graph_rows(rows):
        headed_table("graphs", GRAPH_COLUMNS, graphs, progress)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Reserved memory over the steps of each case, one line a variant."""
    panels: dict[str, list[tuple[str, list[int]]]] = {}
    for row in rows:
        if row["outcome"] == "done" and not row.get("repeat"):
            series = [row["boot"]["reserved_bytes"], *(s["reserved_bytes"] for s in row["steps"])]
            panels.setdefault(row["case"], []).append((row["variant"], series))
    plot_bytes(panels, "engine step", "reserved, GiB", path)


def between_markers(path: Path, name: str, text: str) -> None:
    """Put ``text`` into a page, between the comments that say where ``name`` begins and ends.

    Raises:
        NeaptideError: they are not there once.
    """
    begin, end = (f"<!-- {name}: {word} -->" for word in ("begin", "end"))
    pattern = re.compile(f"{re.escape(begin)}\n.*?{re.escape(end)}", re.DOTALL)
    after, found = pattern.subn(lambda _: f"{begin}\n{text}{end}", path.read_text(encoding="utf-8"))
    if found != 1:
        raise NeaptideError(
            f"{found} places for {name}", wanted=f"one, between {begin} and {end}", todo="Put the two lines in.",
            where=str(path),
        )  # fmt: skip
    write_bytes(path, after.encode())
