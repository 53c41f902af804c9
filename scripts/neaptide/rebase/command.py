"""``neaptide rebase TARGET==VERSION``: the series on a release that no pin names, and the new pin if it holds."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from neaptide import jsonfile
from neaptide.commands import Result
from neaptide.disk import write_bytes
from neaptide.errors import ExitCode, NeaptideError
from neaptide.git import Repo
from neaptide.outcomes import Status
from neaptide.output import Progress
from neaptide.pins import DEFAULT_PIN, TargetPin, load_pin, pin_names
from neaptide.places import Accepted, accepted_in
from neaptide.rebase import describe, releases, state
from neaptide.rebase.newpin import Written, check_new_name, write_pin
from neaptide.rebase.planning import Library, Planned, plan_on
from neaptide.rebase.rangediff import range_diff
from neaptide.rebase.releases import Asked
from neaptide.report import patch_rows
from neaptide.series import check_known, load_series
from neaptide.session import Options


def add_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("release", metavar="TARGET==VERSION", help="or TARGET==newest, or TARGET@REVISION of a checkout")
    sub.add_argument("--accept", action="store_true", help="write the release into the pin, and its lock")
    sub.add_argument(
        "--as", dest="new_pin", default=None, metavar="NAME", help="with --accept: a new pin, not this one"
    )


def artefact_of(asked: Asked, options: Options, pin: str) -> TargetPin:
    """What was asked for, as an entry of a pin."""
    like = load_pin(options.root, pin).target(asked.target, where=asked.text)
    if not asked.commit:
        return releases.release(asked, like, frozen=options.frozen)
    if asked.target not in options.checkouts:
        raise NeaptideError(
            f"{asked.text} without a checkout", wanted=f"--checkout {asked.target}=DIR", todo="Give its folder.",
            where=asked.text,
        )  # fmt: skip
    pinned = [load_pin(options.root, name).targets.get(asked.target) for name in pin_names(options.root)]
    names = dict.fromkeys((one.package, one.prefix) for one in (like, *pinned) if one is not None)
    return releases.revision(asked, Repo(options.checkouts[asked.target]), list(names))


def run(args: argparse.Namespace, options: Options, progress: Progress) -> Result:
    """Plan, report, and with ``--accept`` write the pin; what was accepted is kept for the next run."""
    asked = releases.parse(args.release)
    if args.new_pin is not None and not args.accept:
        raise NeaptideError("--as without --accept", wanted="both", todo="Add --accept.", where="--as")
    if args.new_pin is not None:
        check_new_name(options.root, args.new_pin)
    pin = options.pin or DEFAULT_PIN
    artefact = artefact_of(asked, options, pin)
    library = Library(options.root, options.checkouts, progress, frozen=options.frozen)
    patches = load_series(options.root, asked.target)
    planned = plan_on(library, asked.target, artefact, patches, pin)
    folder = options.build / "rebase" / f"{asked.target}-{(artefact.commit or artefact.version)[:40]}"
    before = state.load(folder / "state.json", artefact.sha256 or artefact.commit or "")
    accepted = _accepted(options, planned, before.accepted, progress)
    _show(planned, accepted, progress)
    code = code_of(planned, accepted)
    out: dict[str, Any] = {"plan": describe.plan_dict(planned, accepted), "written": []}
    if said := state.since(before, planned.plan):
        progress.note(said)
    if not options.dry_run:
        out["written"] += _keep(folder, planned, accepted, progress)
    if args.accept:
        written = _accept(args, options, planned, code, progress)
        out["pin"], code = written.as_dict(), max(code, written.code)
        out["written"] += written.files
    progress.note(_next(code, args, asked))
    return code, out


def _accepted(options: Options, planned: Planned, before: Accepted, progress: Progress) -> Accepted:
    target = planned.plan.subject.target
    check_known(options.accept, [p.patch for p in planned.plan.patches], "--accept-drift")
    return accepted_in(planned.plan, [n.removeprefix(f"{target}/") for n in options.accept], before)


def _show(planned: Planned, accepted: Accepted, progress: Progress) -> None:
    base = planned.base
    label = f"{planned.artefact.described}, compared with pin {base.pin} ({base.lock.artefact.described})"
    progress.table(label, ("outcome", "patch", ""), patch_rows(planned.plan))
    for line in describe.lines(planned, accepted):
        progress.note(line)
    progress.note(f"{label}: " + ", ".join(f"{n} {name}" for name, n in describe.counts(planned).items() if n))


def code_of(planned: Planned, accepted: Accepted) -> ExitCode:
    """Findings, if nothing is wrong and a patch was retired or superseded: somebody should read why."""
    code = planned.plan.exit_code(accepted)
    over = any(planned.plan.with_status(status) for status in describe.OVER)
    return ExitCode.FINDINGS if code is ExitCode.DONE and over else code


def _keep(folder: Path, planned: Planned, accepted: Accepted, progress: Progress) -> list[str]:
    """State, ``report.md`` and ``report.json`` in the rebase's folder."""
    no_conflict = not planned.plan.with_status(Status.CONFLICT)
    difference = range_diff(planned) if no_conflict else ""
    state.save(folder / "state.json", planned.artefact.sha256 or planned.artefact.commit or "", accepted, planned.plan)
    write_bytes(folder / "report.md", describe.markdown(planned, accepted, difference).encode())
    report = {"range_diff": difference, "schema_version": 1, **describe.plan_dict(planned, accepted)}
    write_bytes(folder / "report.json", jsonfile.encode(report))
    progress.note(f"report: {folder / 'report.md'}")
    return [f"{folder.name}/{name}" for name in ("report.json", "report.md", "state.json")]


def _accept(
    args: argparse.Namespace, options: Options, planned: Planned, code: ExitCode, progress: Progress
) -> Written:
    if code not in (ExitCode.DONE, ExitCode.FINDINGS):
        raise NeaptideError(
            "the series does not hold on this release", wanted="no conflict, no unmet condition, no drift to read",
            todo="Mend or accept what is listed above, then run the same again.", where="--accept", code=code,
        )  # fmt: skip
    return write_pin(replace(options, pin=options.pin or DEFAULT_PIN), planned, args.new_pin, progress)


def _next(code: ExitCode, args: argparse.Namespace, asked: Asked) -> str:
    if code is ExitCode.CONFLICT:
        return "next: mend the patches in conflict and run the same again"
    if code is ExitCode.UNVERIFIED:
        return "next: a post-condition does not hold; mend the patch and run the same again"
    if code is ExitCode.DRIFT:
        return "next: read the drift, then run again with --accept-drift PATCH for each that holds"
    return "done" if args.accept else f"next: `neaptide rebase {asked.text} --accept` writes the pin and its lock"
