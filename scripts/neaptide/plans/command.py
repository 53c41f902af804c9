"""The ``plans`` command: what plans of the sparse indexer reserve at each pin, by upstream's planner and by ours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from neaptide.bench.results import MIB, headed_table
from neaptide.both_trees import Question
from neaptide.errors import ExitCode
from neaptide.output import Progress
from neaptide.plans.cases import PlanCase, as_spec
from neaptide.session import Options

CHILD = Path(__file__).with_name("child.py")
COLUMNS = ("pin", "plan", "route", "upstream, B", "patched, B", "beside it in a call, B", "MiB")
BUDGET_COLUMNS = ("pin", "plan", "launches", "given up for the budget, in order")
REGION_COLUMNS = ("pin", "plan", "region", "upstream, B", "patched, B", "shares")
Row = dict[str, Any]


def run(options: Options, progress: Progress) -> tuple[ExitCode, dict[str, Any]]:
    """Plans of every case at the chosen pin, or at both."""
    rows: list[Row] = []
    for pin, upstream, patched in Question(CHILD, as_spec(), "plans").asked(options, progress):
        rows += [compared(pin, mine, theirs) for mine, theirs in zip(patched, upstream, strict=True)]
    headed_table("plans", COLUMNS, [table_row(row) for row in rows], progress)
    headed_table("budgets", BUDGET_COLUMNS, [line for row in rows for line in budget_rows(row)], progress)
    headed_table("regions", REGION_COLUMNS, [line for row in rows for line in region_rows(row)], progress)
    return ExitCode.DONE, {"rows": rows}


def compared(pin: str, patched: Mapping[str, Any], upstream: Mapping[str, Any]) -> Row:
    """One case of both trees."""
    return {"pin": pin, "plan": PlanCase(**patched["case"]).name, "upstream": upstream, "patched": patched}


def table_row(row: Row) -> list[str]:
    """One line; a plan that is refused shows why in place of its bytes."""
    sides = (row["upstream"], row["patched"])
    sizes = [side.get("none") or f"{side['nbytes']:,}" for side in sides]
    beside = " / ".join(f"{side['transient_bytes']:,}" if "nbytes" in side else "" for side in sides)
    mib = " / ".join(f"{side['nbytes'] / MIB:.2f}" if "nbytes" in side else "none" for side in sides)
    return [row["pin"], row["plan"], row["patched"].get("route", "none"), *sizes, beside, mib]


def budget_rows(row: Row) -> list[list[str]]:
    """A line for each thing that a plan gave up for its budget."""
    patched = row["patched"]
    return [[row["pin"], row["plan"], str(patched["launches"]), why] for why in patched.get("given_up", ())]


def region_rows(row: Row) -> list[list[str]]:
    """A line for each region that either tree has."""
    if "none" in row["patched"]:
        return []
    theirs = {region["name"]: region for region in row["upstream"].get("regions", ())}
    mine = {region["name"]: region for region in row["patched"]["regions"]}

    def size(regions: Mapping[str, Mapping[str, Any]], name: str) -> str:
        return f"{regions[name]['nbytes']:,}" if name in regions else ""

    return [
        [row["pin"], row["plan"], name, size(theirs, name), size(mine, name), mine.get(name, {}).get("shares", "")]
        for name in dict.fromkeys([*theirs, *mine])
    ]
