"""``neaptide check --against TARGET==VERSION ...``: the series on many releases, touched files only."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from neaptide.commands import Result
from neaptide.disk import check_writable, write_bytes
from neaptide.errors import ExitCode, NeaptideError, worst
from neaptide.fetch import sdist_path
from neaptide.output import Progress
from neaptide.pins import DEFAULT_PIN, TargetPin, load_pin
from neaptide.rebase import describe, releases
from neaptide.rebase.command import artefact_of, code_of
from neaptide.rebase.planning import Library, plan_on
from neaptide.series import load_series
from neaptide.session import Options

WORTH_A_PROCESS = 4
COLUMNS = ("release", "compared with", *(s.value for s in describe.OF_EDITS), "patches not applicable, retired", "s")


def add_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--against", action="extend", nargs="+", default=[], metavar="TARGET==VERSION",
        help="releases (TARGET==newest, too) or TARGET@REVISION of a checkout",
    )  # fmt: skip
    sub.add_argument("--report", type=Path, default=None, metavar="FILE.md", help="write the details as Markdown")


@dataclass(frozen=True)
class Job:
    """A release to plan on; with ``report`` in Markdown, too."""

    target: str
    text: str
    artefact: TargetPin
    options: Options
    report: bool


@dataclass(frozen=True)
class Checked:
    """The series on one release; of one that cannot be planned on ``out`` has the error alone."""

    asked: str
    code: ExitCode
    seconds: float
    out: dict[str, Any]
    markdown: str

    @property
    def row(self) -> list[str]:
        if "error" in self.out:
            cells = ["not planned", *("" for _ in describe.OF_EDITS), ""]
            return [self.asked, *cells, f"{self.seconds:.1f}"]
        edits, patches = self.out["edits"], self.out["patches"]
        beside = [sum(p["status"] == s for p in patches) for s in ("not-applicable", "retired", "superseded")]
        cells = [self.out["compared_with"]["pin"], *(str(edits[s.value]) for s in describe.OF_EDITS)]
        return [self.asked, *cells, f"{beside[0]}, {beside[1] + beside[2]}", f"{self.seconds:.1f}"]


def run(args: argparse.Namespace, options: Options, progress: Progress) -> Result:
    """Plan on every release; the exit code is the worst of theirs, bad input for one that cannot be planned on."""
    if not args.against:
        raise NeaptideError("nothing to check against", wanted="--against TARGET==VERSION ...", todo="Name releases.")
    check_writable(args.report, "--report")
    asked = [releases.parse(text) for text in args.against]
    pin = options.pin or DEFAULT_PIN
    report, jobs, lacking = args.report is not None, list[Job](), dict[str, Checked]()
    for one in asked:
        # A target or a pin that is not there is a slip; a release that is not there is an answer.
        load_pin(options.root, pin).target(one.target, where=one.text)
        begun = time.monotonic()
        try:
            artefact = artefact_of(one, options, pin)
            if artefact.commit is None:
                sdist_path(artefact, frozen=options.frozen, progress=progress)
            jobs.append(Job(one.target, one.text, artefact, options, report))
        except NeaptideError as error:
            lacking[one.text] = _not_planned(one.text, error, begun)
    begun = time.monotonic()
    planned = iter(_all(jobs) if jobs else ())
    found = [lacking[one.text] if one.text in lacking else next(planned) for one in asked]
    progress.table("the series on each release: edits", COLUMNS, [one.row for one in found])
    for row in found:
        if "error" in row.out:
            progress.note(f"{row.asked} was not planned: {row.out['error']['text']}")
    progress.note(f"{len(found)} releases in {time.monotonic() - begun:.1f} s, after the downloads")
    if args.report is not None:
        write_bytes(args.report.resolve(), "\n".join(one.markdown for one in found).encode())
        progress.note(f"report: {args.report}")
    details = [
        {"asked": one.asked, "exit_code": int(one.code), "seconds": round(one.seconds, 3), **one.out} for one in found
    ]
    return worst(one.code for one in found), {"releases": details}


def _all(jobs: Sequence[Job]) -> list[Checked]:
    """At most a process a core, one for each few releases; those of one target go to the same worker in turn, which
    then reads its pins once.
    """
    # A few plans take no longer than processes take to start.
    workers = max(1, min(os.cpu_count() or 1, len(jobs) // WORTH_A_PROCESS))
    if workers == 1:
        return _lot(jobs)
    groups: dict[str, list[int]] = {}
    for index, job in enumerate(jobs):
        groups.setdefault(job.target, []).append(index)
    lots = [part for indices in groups.values() for part in _dealt(indices, workers)]
    out: dict[int, Checked] = {}
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for lot, found in zip(lots, pool.map(_lot, [[jobs[i] for i in lot] for lot in lots]), strict=True):
            out.update(zip(lot, found, strict=True))
    return [out[i] for i in range(len(jobs))]


def _dealt(indices: Sequence[int], workers: int) -> list[list[int]]:
    return [part for w in range(workers) if (part := list(indices[w::workers]))]


def _lot(jobs: Sequence[Job]) -> list[Checked]:
    options = jobs[0].options
    library = Library(options.root, options.checkouts, Progress(), frozen=options.frozen)
    return [_one(library, job) for job in jobs]


def _one(library: Library, job: Job) -> Checked:
    begun = time.monotonic()
    try:
        code, out, report = _planned(library, job)
    except NeaptideError as error:
        return _not_planned(job.text, error, begun)
    finally:
        library.forget(job.target, job.artefact)
    return Checked(job.text, code, time.monotonic() - begun, out, report)


def _not_planned(text: str, error: NeaptideError, begun: float) -> Checked:
    out = {"error": {**error.as_dict(), "text": str(error)}}
    return Checked(text, error.code, time.monotonic() - begun, out, f"# {text}\n\nNot planned: {error}\n")


def _planned(library: Library, job: Job) -> tuple[ExitCode, dict[str, Any], str]:
    planned = plan_on(library, job.target, job.artefact, load_series(job.options.root, job.target), job.options.pin)
    report = describe.markdown(planned, frozenset(), "") if job.report else ""
    return code_of(planned, frozenset()), describe.plan_dict(planned, frozenset()), report
