"""For each patch whether what it promises is in force here, and if not, why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from neaptide.doctor.facts import Facts
from neaptide.doctor.rules import RULES, Answer, Reason, no, unknown
from neaptide.model import Patch
from neaptide.outcomes import Status
from neaptide.places import State
from neaptide.series import applies_to


@dataclass(frozen=True)
class Saving:
    """The row of one patch."""

    patch: str
    promised: tuple[dict[str, Any], ...]
    in_force: Answer
    reasons: tuple[str, ...]
    finding: bool

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "in_force": self.in_force.value}


def judge_all(patches: Iterable[Patch], facts: Facts) -> list[Saving]:
    """A row for each patch, in the order of the series."""
    known = {patch.id: patch for patch in patches}
    return [judge(patch, facts, known) for patch in known.values()]


def judge(patch: Patch, facts: Facts, known: Mapping[str, Patch]) -> Saving:
    reasons = list(_reasons(patch, facts, known))
    answers = {reason.answer for reason in reasons}
    verdict = Answer.NO if Answer.NO in answers else Answer.UNKNOWN if answers else Answer.YES
    fixed = any(not reason.mendable for reason in reasons)
    promised = tuple(
        {"bytes": r.bytes, "configuration": " ".join(r.configuration.split()), "reached": r.reached.get(facts.pin)}
        for r in patch.header.recovers
    )
    return Saving(patch.id, promised, verdict, tuple(r.text for r in reasons), bool(reasons) and not fixed)


def _reasons(patch: Patch, facts: Facts, known: Mapping[str, Patch]) -> Iterator[Reason]:
    rule, target = RULES.get(patch.id), facts.applied[patch.target]
    if not applies_to(patch, target.version):
        yield no(f"not for {target.package} {target.version}", mendable=False)
        return
    missing = _not_there(patch, facts)
    if missing is not None:
        yield missing
        return
    if target.altered:
        yield unknown(f"files were altered since: {', '.join(target.altered)}")
    if rule is None:
        yield unknown("the doctor has no rule for this patch")
        return
    if not any(recovery.reached.get(facts.pin) for recovery in patch.header.recovers):
        yield from _reached_by(rule.caller, facts, known)
    for check in rule.checks:
        yield from check(facts)


def _not_there(patch: Patch, facts: Facts) -> Reason | None:
    """Why the code of a patch is not what this interpreter runs; None if it is."""
    target = facts.applied[patch.target]
    status = target.statuses.get(patch.id)
    if target.state is State.ABSENT:
        return no(f"not applied: {target.place}")
    if status in (Status.RETIRED, Status.SUPERSEDED):
        return no(f"{status} here: upstream needs it no more", mendable=False)
    if not facts.has(patch.id):
        return no(f"not applied to {target.place}")
    imported = facts.probe.packages[target.package]["folder"]
    if target.folder is not None and (not imported or Path(imported).resolve() != target.folder.resolve()):
        return no(f"applied to {target.folder}, and this interpreter imports {imported or 'none'}")
    return None


def _reached_by(caller: str, facts: Facts, known: Mapping[str, Patch]) -> Iterator[Reason]:
    """Nothing, if the caller is in force; else why no engine comes here."""
    if caller not in known:
        yield no("no engine of this pin reaches it", mendable=False)
        return
    row = judge(known[caller], facts, known)
    if row.in_force is not Answer.YES:
        how = "not in force" if row.in_force is Answer.NO else "not known to be in force"
        yield Reason(row.in_force, f"reached through {caller} only, which is {how}", mendable=row.finding)
