"""The rows as Markdown: releases down, tools across, and what the goal says of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

NEAPTIDE = "neaptide"
WANTED_POINTS = 15
Row = dict[str, Any]


def markdown(rows: Sequence[Row]) -> str:
    """Edits applied rightly, in the wrong place in brackets; then the sums of each tool."""
    tools = list(dict.fromkeys(row["variant"] for row in rows))
    cases = list(dict.fromkeys(row["case"] for row in rows))
    by = {(row["case"], row["variant"]): row for row in rows}
    lines = [_line("release", "edits", *(f"`{t}`" if t != NEAPTIDE else t for t in tools)), _rule(2 + len(tools))]
    for case in cases:
        cells = [f"{by[case, t]['applied_rightly']} ({by[case, t]['wrong_place']})" for t in tools]
        lines.append(_line(case, by[case, tools[0]]["edits"], *cells))
    heads = ("all releases", "applied rightly", "wrong place", "not applied", "failures that name the symbol",
             "CPU seconds a release")  # fmt: skip
    lines += ["", _line(*heads), _rule(len(heads))]
    for tool in tools:
        found = total(rows, tool)
        failed, edits = found["wrong_place"] + found["not_applied"], found["edits"]
        share = f"{found['applied_rightly']} of {edits} ({percent(rows, tool):.1f} %)"
        name = f"`{tool}`" if tool != NEAPTIDE else tool
        named = f"{found['names_symbol']} of {failed}"
        seconds = f"{found['cpu_seconds'] / len(cases):.2f}"
        lines.append(_line(name, share, found["wrong_place"], found["not_applied"], named, seconds))
    return "\n".join([*lines, "", *goal(rows), ""])


def goal(rows: Sequence[Row]) -> list[str]:
    """What was wanted and what was found."""
    found, best = total(rows, NEAPTIDE), best_other(rows)
    points = percent(rows, NEAPTIDE) - percent(rows, best)
    failed, held = found["wrong_place"] + found["not_applied"], found["drift_right_if_accepted"]
    reasons: Counter[str] = Counter()
    for row in rows:
        reasons.update(row.get("reasons", {}))
    there = found["edits"] - reasons["no such file"] - reasons["no such symbol"]
    ours, others = found["applied_rightly"], total(rows, best)["applied_rightly"]
    missed = "" if points >= WANTED_POINTS else ": missed"
    return [
        f"- Wanted: no edit in a wrong place. Found: {found['wrong_place']}.",
        f"- Wanted: at least {WANTED_POINTS} points more edits applied rightly than the best of the others. "
        f"Found: {points:+.1f} points over `{best}`{missed}. With the {held} edits in drift that stand rightly once "
        f"somebody has read and accepted them: {100 * (ours + held - others) / found['edits']:+.1f}. Of the {there} "
        f"edits whose file and symbol the release has under that name: {100 * ours / there:.1f} % against "
        f"{100 * others / there:.1f} %, with the drift {100 * (ours + held) / there:.1f} %.",
        f"- Wanted: no failure without symbol and reason. Found: {failed - found['names_symbol']} without a symbol, "
        f"{failed - found['names_reason']} without a reason and a next step, of {failed}.",
        "- Why neaptide did not apply: " + ", ".join(f"{name} {n}" for name, n in reasons.most_common()) + ".",
    ]


def sound(rows: Sequence[Row]) -> bool:
    """Nothing in a wrong place, and no failure without symbol and reason."""
    found = total(rows, NEAPTIDE)
    told = (found["names_symbol"], found["names_reason"])
    return not found["wrong_place"] and told == (found["not_applied"], found["not_applied"])


def total(rows: Sequence[Row], tool: str) -> Counter[str]:
    out: Counter[str] = Counter()
    for row in rows:
        if row["variant"] == tool:
            out.update({key: value for key, value in row.items() if isinstance(value, (int, float))})
    return out


def percent(rows: Sequence[Row], tool: str) -> float:
    found = total(rows, tool)
    return 100 * found["applied_rightly"] / found["edits"]


def best_other(rows: Sequence[Row]) -> str:
    others = dict.fromkeys(row["variant"] for row in rows if row["variant"] != NEAPTIDE)
    return max(others, key=lambda tool: percent(rows, tool))


def _line(*cells: object) -> str:
    return "| " + " | ".join(str(c) for c in cells) + " |"


def _rule(columns: int) -> str:
    return "|" + "---|" * columns
