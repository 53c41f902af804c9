"""The commands. Each takes a session and returns its exit code and its JSON object."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from neaptide import verify
from neaptide.errors import ExitCode, NeaptideError, worst
from neaptide.export import check_applied, export_place
from neaptide.gitplace import GitPlace
from neaptide.outcomes import IN_FORCE, Plan, Status
from neaptide.places import Accepted, State, accepted_in, described, file_hashes
from neaptide.report import plan_dict, show_plan
from neaptide.session import Session, Work, trees_only

Result = tuple[ExitCode, dict[str, Any]]


def apply(session: Session) -> Result:
    """Plan every target, and write only if nothing stands against any of them."""
    options = session.options
    chosen = {target: session.chosen(target) for target in session.targets}
    works = session.places(create=True)
    with session.locked(works):
        session.recover(works)
        for work in works:
            work.place.require_clean()
        plans = [(w, session.plan(w, chosen[w.place.target])) for w in works]
        accepted = {w.place.target: _accepted(session, w, p) for w, p in plans}
        for work, plan in plans:
            show_plan(plan, work.place.label, accepted[work.place.target], session.progress)
            _show_taken_out(session, work, plan)
        out = {w.place.target: plan_dict(p, accepted[w.place.target]) for w, p in plans}
        _show_skipped(session)
        result: dict[str, Any] = {"skipped": session.skipped, "targets": out, "written": []}
        code = worst(p.exit_code(accepted[w.place.target]) for w, p in plans)
        if code is not ExitCode.DONE:
            session.progress.note(_what_now(code, plans, accepted))
            return code, result
        for work, plan in plans:
            verify.check_plan(plan, work.place)
            if options.frozen:
                _check_frozen(work, plan)
            work.place.precheck(plan)
        if not options.dry_run:
            result["written"] = _write_all(session, plans, accepted, out)
        _say_written(session, works, result["written"])
        return _gone(session, plans), result


def _write_all(
    session: Session, plans: Sequence[tuple[Work, Plan]], accepted: dict[str, Accepted], out: dict[str, Any]
) -> list[str]:
    """Write every target; if one does not hold what was written, all are put back."""
    written: list[str] = []
    undo: list[Callable[[], None]] = []
    try:
        for work, plan in plans:
            before = work.place.undo_point()
            smoke = verify.Smoke("skipped", "nothing was written")
            if work.place.write(plan, accepted[work.place.target]):
                undo.append(before)
                written.append(work.place.target)
                smoke = verify.import_smoke(plan, work.place, session.options.python)
                session.progress.note(f"{work.place.label}: import smoke {smoke.result}: {smoke.detail}")
            out[work.place.target]["smoke"] = {"detail": smoke.detail, "result": smoke.result}
            if smoke.result == "failed":
                raise NeaptideError(
                    f"the patched package does not import ({smoke.detail})", wanted="every touched module to import",
                    todo="All targets were put back; mend the patch.", where=work.place.label,
                    code=ExitCode.UNVERIFIED,
                )  # fmt: skip
    except NeaptideError:
        for step in reversed(undo):
            step()
        raise
    finally:
        if trees_only(session.options):
            session.write_tree_record()
    return written


def _show_taken_out(session: Session, work: Work, plan: Plan) -> None:
    """Name the patches that are applied now and not in the plan."""
    record = work.place.record()
    planned = {p.patch.id for p in plan.patches}
    gone = [p["id"] for p in record.patches if p["id"] not in planned] if record is not None else []
    if gone:
        session.progress.note(f"{work.place.label}: takes out {', '.join(gone)}")


def _gone(session: Session, plans: Sequence[tuple[Work, Plan]]) -> ExitCode:
    """Findings, if a patch that the pin's lock holds was retired or superseded: somebody should read why."""
    over = (Status.RETIRED, Status.SUPERSEDED)
    names = [
        f"{p.patch.id} ({p.status.value}: {p.detail})"
        for work, plan in plans
        for p in plan.patches
        if p.status in over and work.lock is not None and p.patch.name in work.lock.patches
    ]
    if names:
        session.progress.note(f"to read: the pin's lock holds patches that no longer apply: {'; '.join(names)}")
    return ExitCode.FINDINGS if names else ExitCode.DONE


def _accepted(session: Session, work: Work, plan: Plan) -> Accepted:
    """Drift that may be written: remembered, or named on the command line now."""
    names = [n.removeprefix(f"{work.place.target}/") for n in session.options.accept]
    drifted = {o.patch for o in plan.outcomes if o.status is Status.DRIFT}
    for name in sorted({p.patch.name for p in plan.patches} & set(names) - drifted):
        session.progress.note(f"{work.place.label}: {name} has no drift to accept")
    return accepted_in(plan, names, work.place.accepted())


def _what_now(code: ExitCode, plans: Sequence[tuple[Work, Plan]], accepted: dict[str, Accepted]) -> str:
    if code is ExitCode.DRIFT:
        names = sorted(
            {
                f"--accept-drift {w.place.target}/{o.patch}"
                for w, p in plans
                for o in p.open_drift(accepted[w.place.target])
            }
        )
        return f"nothing was written: read the drift above, then go on with {' '.join(names)}"
    if code is ExitCode.UNVERIFIED:
        return "nothing was written: a post-condition does not hold; mend the patch"
    return "nothing was written: mend the patches above for this upstream, or leave them out with --without"


def _check_frozen(work: Work, plan: Plan) -> None:
    """The plan must be exactly what the pin's lock records."""
    lock = work.lock
    problems = []
    if lock is None:
        problems.append("the pin's lock says nothing of this target")
    else:
        digests = {p.patch.name: p.patch.digest for p in plan.patches if p.files}
        problems += [f"patch {n} differs from the lock" for n in digests if lock.patches.get(n) != digests[n]]
        problems += [f"patch {n} of the lock is missing" for n in lock.patches if n not in digests]
        for path, hashes in file_hashes(plan).items():
            if hashes["after"] != lock.after.get(path) or hashes["before"] != lock.before.get(path):
                problems.append(f"{path} differs from the lock")
        if isinstance(work.place, GitPlace):
            trees = [work.place.repo.tree(c) for c in (work.place.base(), work.place.build(plan)[0])]
            if trees != [lock.tree_before, lock.tree_after]:
                problems.append(f"the trees {trees[0]} and {trees[1]} are not those of the lock")
    if problems:
        raise NeaptideError(
            "; ".join(problems), wanted="the lock to match, since --frozen was given",
            todo="Use the series that the lock was made with, or make it anew with `neaptide pins --lock`.",
            where=work.place.label, code=ExitCode.UNVERIFIED,
        )  # fmt: skip


def _show_skipped(session: Session) -> None:
    for target, why in session.skipped.items():
        session.progress.note(f"skipped {target}: {why}")


def _say_written(session: Session, works: Sequence[Work], written: Sequence[str]) -> None:
    for work in works:
        if session.options.dry_run:
            session.progress.note(f"{work.place.label}: nothing written (--dry-run)")
        elif work.place.target in written:
            session.progress.note(f"{work.place.label}: applied")
        else:
            session.progress.note(f"{work.place.label}: already applied, nothing changed")


def status(session: Session) -> Result:
    """What is on disk at each target."""
    rows, out, code = [], {}, ExitCode.DONE
    for work in session.places(create=False):
        state, record = work.place.state(), work.place.record()
        applied = [p["id"] for p in record.patches if p["status"] in IN_FORCE] if record is not None else []
        out[work.place.target] = {
            "accepted_drift": sorted({d[0] for d in work.place.accepted()}),
            "patches": applied if state is not State.PRISTINE else [],
            "place": work.place.label,
            "state": state.value,
        }
        rows.append(
            [described(work.place), work.place.label, ", ".join(applied) if state is not State.PRISTINE else ""]
        )
        if state is State.INTERRUPTED:
            code = ExitCode.UNVERIFIED
        elif state is State.MODIFIED and code is ExitCode.DONE:
            code = ExitCode.FINDINGS
    for target, why in session.skipped.items():
        out[target] = {"accepted_drift": [], "patches": [], "place": why, "state": State.ABSENT.value}
        rows.append([State.ABSENT.value, target, why])
    session.progress.table("status", ("state", "place", "patches"), rows)
    if code is ExitCode.UNVERIFIED:
        session.progress.note("a write was interrupted: the next `neaptide apply` or `revert` recovers it")
    return code, {"pin": session.pin.name, "targets": out}


def verify_places(session: Session) -> Result:
    """Plan again from the pristine bytes and compare with what is on disk; then all checks."""
    out, problems = {}, []
    works = session.places(create=False)
    for work in works:
        place = work.place
        found = _verify_one(session, work)
        out[place.target] = found
        problems += [f"{place.label}: {p}" for p in found["problems"]]
        session.progress.note(f"{place.label}: {'; '.join(found['problems']) or 'verified'}; smoke {found['smoke']}")
    _show_skipped(session)
    if not works:
        problems.append("nothing to verify")
    return ExitCode.UNVERIFIED if problems else ExitCode.DONE, {"problems": problems, "targets": out}


def _verify_one(session: Session, work: Work) -> dict[str, Any]:
    place = work.place
    state, record = place.state(), place.record()
    if state is not State.APPLIED or record is None:
        found = f"the target is {described(place)}, wanted {State.APPLIED.value}"
        return {"problems": [found], "smoke": "not run"}
    names = {p["id"] for p in record.patches}
    plan = session.plan(work, [p for p in session.series(place.target) if p.id in names])
    problems = [
        f"{p['id']} differs from what was applied"
        for p in record.patches
        if p["digest"] not in {q.patch.digest for q in plan.patches}
    ]
    if file_hashes(plan) != record.files:
        problems.append("planning again gives other bytes than the record")
    if isinstance(place, GitPlace):
        tree = place.repo.tree("HEAD")
        if tree != record.result["tree"]:
            problems.append(f"HEAD's tree is {tree}, the record says {record.result['tree']}")
        if trees_only(session.options):
            problems += [f"{path} is not in the tree" for path in _added(place)]
    try:
        verify.check_plan(plan, place)
    except NeaptideError as error:
        problems.append(error.found)
    smoke = verify.import_smoke(plan, place, session.options.python)
    if smoke.result == "failed":
        problems.append(f"import smoke: {smoke.detail}")
    return {"problems": problems, "smoke": f"{smoke.result}: {smoke.detail}"}


def _added(place: GitPlace) -> list[str]:
    """Files of the package that somebody put into a tree of ours, but for bytecode."""
    inside = f"{place.artefact.package}/"
    return [p for p in place.repo.untracked() if p.startswith(inside) and "__pycache__" not in p]


def revert(session: Session) -> Result:
    """Put back the bytes that were there before the series."""
    works = session.places(create=False)
    reverted = []
    with session.locked(works):
        session.recover(works)
        for work in works:
            work.place.require_clean()
        for work in works if session.options.dry_run else ():
            there = work.place.record()
            what = "would be reverted" if there is not None and there.patches else "nothing to revert"
            session.progress.note(f"{work.place.label}: {what} (--dry-run)")
        for work in works if not session.options.dry_run else ():
            done = work.place.revert()
            reverted += [work.place.target] if done else []
            session.progress.note(f"{work.place.label}: {'reverted' if done else 'nothing to revert'}")
        if trees_only(session.options) and works and not session.options.dry_run:
            session.write_tree_record()
    _show_skipped(session)
    return ExitCode.DONE, {"reverted": reverted, "skipped": session.skipped}


def export(session: Session, output: Path | None) -> Result:
    """Write the applied series of each tree or checkout as files."""
    folder = output or session.options.build / session.pin.name / "export"
    out, works = {}, session.places(create=False)
    for work in works:
        check_applied(work.place)
    for work in works:
        assert isinstance(work.place, GitPlace)
        out[work.place.target] = export_place(work.place, folder / work.place.target)
        done = out[work.place.target]
        session.progress.note(f"{work.place.label}: {len(done['files'])} files in {done['folder']}")
        session.progress.note(f"{work.place.label}: integration.lock.json {done['lab_lock']}")
    _show_skipped(session)
    if not out:
        raise NeaptideError("nothing is applied", wanted="an applied series", todo="Run `neaptide apply` first.")
    return ExitCode.DONE, {"targets": out}
