"""The ``pins`` command: what is pinned, and recording what was checked against a pin."""

from __future__ import annotations

from neaptide import verify
from neaptide.commands import Result
from neaptide.disk import write_bytes
from neaptide.errors import ExitCode, NeaptideError
from neaptide.gitplace import GitPlace
from neaptide.outcomes import Status
from neaptide.pins import TargetLock, encode_lock, load_pin, lock_path, pin_names, recorded_guards
from neaptide.places import file_hashes
from neaptide.report import plan_dict, show_plan
from neaptide.session import Session


def pins(session: Session) -> Result:
    """The pins of the repository."""
    root, rows, out = session.options.root, [], {}
    for name in pin_names(root):
        pin = load_pin(root, name)
        out[name] = {
            "description": pin.description,
            "locked": lock_path(root, name).is_file(),
            "targets": {t: a.described for t, a in sorted(pin.targets.items())},
        }
        rows.append([name, ", ".join(a.described for a in pin.targets.values()), pin.description])
    session.progress.table("pins", ("pin", "artefacts", ""), rows)
    return ExitCode.DONE, {"pins": out}


def lock_pin(session: Session) -> Result:
    """Record guards, file hashes and tree ids of the whole series on the pin's own artefacts."""
    series = {target: session.series(target) for target in session.targets}
    works = session.places(create=True)
    locks = dict(session.locks)
    with session.locked(works):
        for work in works:
            place = work.place
            if not isinstance(place, GitPlace) or (
                work.artefact.commit is not None and place.base() != work.artefact.commit
            ):
                raise NeaptideError(
                    "not the pin's own artefact", wanted=work.artefact.described, todo="Check that commit out.",
                    where=place.label,
                )  # fmt: skip
            place.require_clean()
            plan = session.plan(work, series[place.target], recording=True)
            show_plan(plan, place.label, frozenset(), session.progress)
            code = plan.exit_code()
            if code is not ExitCode.DONE:
                return code, {"targets": {place.target: plan_dict(plan, frozenset())}, "written": []}
            verify.check_plan(plan, place)
            hashes = file_hashes(plan)
            end, _ = place.build(plan)
            locks[place.target] = TargetLock(
                guards=recorded_guards(plan),
                before={p: h["before"] for p, h in hashes.items()},
                after={p: h["after"] or "" for p, h in hashes.items()},
                tree_before=place.repo.tree(place.base()),
                tree_after=place.repo.tree(end),
                patches={p.patch.name: p.patch.digest for p in plan.patches if p.status is Status.CLEAN},
                artefact=work.artefact,
            )
    path, data = lock_path(session.options.root, session.pin.name), encode_lock(session.pin.name, locks)
    changed = not path.is_file() or path.read_bytes() != data
    if changed and not session.options.dry_run:
        write_bytes(path, data)
    how = "unchanged" if not changed else "would change" if session.options.dry_run else "written"
    session.progress.note(f"{path.name}: {how}")
    code = ExitCode.FINDINGS if how == "would change" else ExitCode.DONE
    return code, {"lock": path.name, "skipped": session.skipped, "written": [path.name] if how == "written" else []}
