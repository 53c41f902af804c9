"""Plans as JSON and as text."""

from __future__ import annotations

from typing import Any

from neaptide.outcomes import EditOutcome, Plan, Status, drift_key
from neaptide.output import Progress
from neaptide.places import Accepted


def plan_dict(plan: Plan, accepted: Accepted) -> dict[str, Any]:
    return {
        "patches": [
            {
                "detail": p.detail,
                "edits": [edit_dict(o, accepted) for o in p.outcomes],
                "id": p.patch.id,
                "status": p.status.value,
            }
            for p in plan.patches
        ],
        "version": plan.subject.version,
    }


def edit_dict(outcome: EditOutcome, accepted: Accepted) -> dict[str, Any]:
    """One edit as JSON."""
    out: dict[str, Any] = {
        "detail": outcome.detail,
        "file": outcome.file,
        "key": outcome.key,
        "status": outcome.status.value,
        "symbol": outcome.symbol,
    }
    if outcome.upstream_change:
        out["upstream_change"] = outcome.upstream_change
    if outcome.status is Status.DRIFT:
        out["accepted"] = drift_key(outcome) in accepted
    return out


def patch_rows(plan: Plan) -> list[list[str]]:
    """Outcome, name and detail of every patch, as people read them."""
    rows = []
    for patch in plan.patches:
        placed = sum(o.status is not Status.CONFLICT for o in patch.outcomes)
        text = patch.detail or f"{placed} of {len(patch.outcomes)} edits placed"
        rows.append([patch.status.value, patch.patch.id, text])
    return rows


def show_plan(plan: Plan, label: str, accepted: Accepted, progress: Progress) -> None:
    """Every patch on a line; every edit that is not clean with its reason and upstream's change."""
    progress.table(label, ("outcome", "patch", ""), patch_rows(plan))
    shown: set[str] = set()
    for outcome in plan.outcomes:
        if outcome.status is Status.CLEAN:
            continue
        read = " (accepted)" if drift_key(outcome) in accepted else ""
        progress.note(
            f"{outcome.status.value}{read}: {plan.subject.target}/{outcome.patch}: "
            f"{outcome.file} {outcome.symbol}: {outcome.detail}"
        )
        if outcome.upstream_change and outcome.upstream_change not in shown:
            shown.add(outcome.upstream_change)
            progress.note(outcome.upstream_change)
        elif outcome.upstream_change:
            progress.note("(upstream's change: as shown above)")
        elif outcome.status in (Status.DRIFT, Status.MOVED):
            progress.note("(the pin's own text is not at hand, so upstream's change cannot be shown)")
