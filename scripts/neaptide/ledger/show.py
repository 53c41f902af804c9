"""How a ledger is shown and written: tables, CSV, a plot."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from neaptide.bench.results import MIB, headed_table
from neaptide.disk import write_bytes
from neaptide.ledger.regions import Region, Sum, by_lifetime, by_term, kv_tokens, total
from neaptide.output import Progress
from neaptide.plotting import figure_of, save

COLUMNS = ("region", "upstream, MiB", "overlay, MiB", "saved", "lifetime", "counted in", "reached", "patches")
SUM_COLUMNS = ("sum", "upstream, MiB", "overlay, MiB", "saved", "KV tokens")
NOTE_COLUMNS = ("region", "owner", "note")


def mib(value: int | None, missing: str = "") -> str:
    return missing if value is None else f"{value / MIB:,.2f}"


def region_row(region: Region) -> list[str]:
    terms = dict.fromkeys((
        _counted_in(region.upstream_term.value, region.upstream_over),
        _counted_in(region.overlay_term.value, region.overlay_over),
    ))  # fmt: skip
    sizes = [*(mib(size, region.missing) for size in (region.upstream_bytes, region.overlay_bytes)),
             mib(region.saved_bytes)]  # fmt: skip
    if not region.summed:
        # What is in no sum stands in brackets.
        sizes = [f"({size})" if size else "" for size in sizes]
    return [
        f"- {region.name}" if region.part_of else region.name, *sizes, region.lifetime.value, " / ".join(terms),
        "yes" if region.reached else "no", " ".join(region.patches),
    ]  # fmt: skip


def _counted_in(term: str, over: int) -> str:
    return f"{term} but for {mib(over)}" if over else term


def sum_rows(regions: Sequence[Region], kv_bytes: int) -> list[list[str]]:
    """The total, then its groups: by lifetime and by term of the budget."""
    named: list[tuple[str, Sum]] = [("all", total(regions))]
    named += [(f"lifetime {name}", one) for name, one in by_lifetime(regions).items()]
    named += [(f"counted in {name}", one) for name, one in by_term(regions).items()]
    return [
        [name, mib(one.upstream_bytes), mib(one.overlay_bytes), mib(one.saved_bytes), f"{kv_tokens(one, kv_bytes):,}"]
        for name, one in named
        if name == "all" or one.upstream_bytes or one.overlay_bytes
    ]


def show(title: str, regions: Sequence[Region], kv_bytes: int, progress: Progress) -> None:
    headed_table(title, COLUMNS, [region_row(region) for region in regions], progress)
    headed_table("sums of what is reached", SUM_COLUMNS, sum_rows(regions, kv_bytes), progress)
    headed_table("notes", NOTE_COLUMNS, [[r.name, r.owner, r.note] for r in regions], progress)
    left = [region.name for region in regions if not region.computed]
    if left:
        progress.note(f"not computed, and in no sum: {', '.join(left)}")
    for text in findings(regions):
        progress.note(text)


def findings(regions: Sequence[Region]) -> list[str]:
    """What somebody should look into."""
    return [region.finding for region in regions if region.finding]


def write_csv(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """A line for each region, with a heading; bytes, never MiB."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, fieldnames=list(rows[0]))
    writer.writeheader()
    for row in rows:
        writer.writerow({**row, "patches": " ".join(row["patches"])})
    write_bytes(path, text.getvalue().encode())


def plot(title: str, regions: Sequence[Region], path: Path) -> None:
    """Two bars, upstream and overlay, of the regions in the sums."""
    figure = figure_of(9, 6)
    axes = figure.add_subplot()
    bottom = [0.0, 0.0]
    for number, region in enumerate(region for region in regions if region.summed):
        sizes = [(region.upstream_bytes or 0) / 2**30, (region.overlay_bytes or 0) / 2**30]
        hatch = ("", "//", "..")[number // 10 % 3]
        axes.bar(["upstream", "overlay"], sizes, bottom=bottom, label=region.name, width=0.6, hatch=hatch)
        bottom = [low + size for low, size in zip(bottom, sizes, strict=True)]
    axes.set(title=title, ylabel="GiB of one rank")
    figure.legend(loc="outside right upper", fontsize="small", reverse=True)
    save(figure, path)
