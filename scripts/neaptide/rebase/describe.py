"""A plan on a new release for people and programs: per edit the outcome, upstream's fate of its symbol, what to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from neaptide import report
from neaptide.outcomes import EditOutcome, Status, drift_key
from neaptide.places import Accepted
from neaptide.rebase.planning import Planned
from neaptide.rebase.whereabouts import described

OVER = (Status.RETIRED, Status.SUPERSEDED)
OF_EDITS = (Status.CLEAN, Status.MOVED, Status.DRIFT, Status.UNMET, Status.CONFLICT)


def counts(planned: Planned) -> dict[str, int]:
    """Edits by outcome."""
    found = Counter(o.status for o in planned.plan.outcomes)
    return {status.value: found[status] for status in OF_EDITS}


def todo(planned: Planned, outcome: EditOutcome, accepted: Accepted) -> str:
    """The next step for an edit that is not clean; nothing for one that is, or that somebody accepted."""
    where = planned.about(outcome)
    if outcome.status is Status.CLEAN or drift_key(outcome) in accepted:
        return ""
    if outcome.status is Status.MOVED:
        return "read upstream's change; nothing has to be mended"
    if outcome.status is Status.DRIFT:
        target = planned.plan.subject.target
        return f"read upstream's change; if the edit still holds, --accept-drift {target}/{outcome.patch}"
    if outcome.status is Status.UNMET:
        return "what the edit is written for is not there as before: read upstream's change and mend the edit"
    if where is None:
        return "read upstream's change of the file and mend the patch"
    return where.todo()


def edit_dict(planned: Planned, outcome: EditOutcome, accepted: Accepted) -> dict[str, Any]:
    """What a plan's report says of an edit, and its next step and whereabouts."""
    where = planned.about(outcome)
    out = {**report.edit_dict(outcome, accepted), "todo": todo(planned, outcome, accepted)}
    if where is not None:
        out |= {"fate": where.fate.value, "candidates": described(where.candidates)}
    return out


def plan_dict(planned: Planned, accepted: Accepted) -> dict[str, Any]:
    """Everything about the plan on one release."""
    artefact = planned.artefact
    return {
        "artefact": {
            k: v for k, v in (("commit", artefact.commit), ("package", artefact.package), ("sdist", artefact.sdist),
                              ("sha256", artefact.sha256), ("version", artefact.version)) if v
        },
        "compared_with": {"pin": planned.base.pin, "version": planned.base.lock.artefact.version},
        "edits": counts(planned),
        "patches": [
            {
                "detail": p.detail, "id": p.patch.id, "status": p.status.value,
                "edits": [edit_dict(planned, o, accepted) for o in p.outcomes],
            }
            for p in planned.plan.patches
        ],
    }  # fmt: skip


def not_clean(planned: Planned) -> list[EditOutcome]:
    return [o for o in planned.plan.outcomes if o.status is not Status.CLEAN]


def lines(planned: Planned, accepted: Accepted) -> list[str]:
    """Each edit that is not clean on a line or two, then upstream's change, shown once."""
    out, shown = [], set()
    for outcome in not_clean(planned):
        where = planned.about(outcome)
        fate = f" ({where.fate.value})" if where is not None else ""
        read = " (accepted)" if drift_key(outcome) in accepted else ""
        target = planned.plan.subject.target
        out.append(
            f"{outcome.status.value}{read}: {target}/{outcome.patch}: {outcome.file} {outcome.symbol}{fate}: "
            f"{outcome.detail}"
        )
        next_step = todo(planned, outcome, accepted)
        if next_step:
            out.append(f"  {next_step}")
        if outcome.upstream_change and outcome.upstream_change not in shown:
            shown.add(outcome.upstream_change)
            out.append(outcome.upstream_change)
    return out


def markdown(planned: Planned, accepted: Accepted, range_diff: str) -> str:
    """A report for a pull request."""
    target, version = planned.plan.subject.target, planned.artefact.described
    base = planned.base
    out = [
        f"# {target}: the series on {version}", "",
        f"Compared with the pin `{base.pin}` ({base.lock.artefact.described}). Edits: "
        + ", ".join(f"{n} {name}" for name, n in counts(planned).items() if n) + ".", "",
        "| outcome | patch | |", "|---|---|---|",
        *(f"| {a} | `{b}` | {_cell(c)} |" for a, b, c in report.patch_rows(planned.plan)),
    ]  # fmt: skip
    unclean = not_clean(planned)
    if unclean:
        out += ["", "## To read", ""]
    shown: set[str] = set()
    for outcome in unclean:
        where = planned.about(outcome)
        fate = f", symbol {where.fate.value}" if where is not None else ""
        out.append(
            f"- **{outcome.status.value}** `{outcome.patch}`: `{outcome.file}` `{outcome.symbol}`{fate}: "
            f"{outcome.detail}. {todo(planned, outcome, accepted)}".rstrip()
        )
        if outcome.upstream_change and outcome.upstream_change not in shown:
            shown.add(outcome.upstream_change)
            out += ["", *_fenced("diff", outcome.upstream_change), ""]
    if range_diff:
        out += ["", "## Range-diff of the two series", "", *_fenced("diff", range_diff)]
    return "\n".join(out).rstrip() + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _fenced(kind: str, text: str) -> Sequence[str]:
    fence = "```"
    while fence in text:
        fence += "`"
    return [f"{fence}{kind}", text.rstrip("\n"), fence]
