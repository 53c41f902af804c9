"""The ``bench engine`` command: variants from the series, rows from engines, a table, JSON and a plot."""

from __future__ import annotations

import argparse
import datetime
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from neaptide.bench import indexer, workspace
from neaptide.bench.engine import UPSTREAM, Bench, Variant, check_model, choose_scenarios, interpreter, outcome_code
from neaptide.bench.results import plot, show, without_steps
from neaptide.bench.scenarios import SCENARIOS
from neaptide.disk import check_writable, write_bytes
from neaptide.errors import ExitCode, NeaptideError
from neaptide.installed import InstalledPlace
from neaptide.jsonfile import encode
from neaptide.plotting import check_plot
from neaptide.session import Options, Session, Work

TARGET = "vllm"


def add_options(sub: argparse.ArgumentParser) -> None:
    """Options of ``neaptide bench engine``."""
    add = sub.add_argument
    add("what", choices=["engine", "indexer", "workspace"],
        help="the real engine, or functions of the indexer or the workspace, upstream against patched")  # fmt: skip
    add(
        "--case",
        action="append",
        default=[],
        metavar="CASE",
        help="indexer, workspace: one of its cases (repeatable; default: all)",
    )
    add("--scenario", action="append", default=[], help=f"one of {', '.join(SCENARIOS)} (repeatable; default: all)")
    add("--with", dest="patch", action="append", default=[], metavar="PATCH", help="only this patch (repeatable)")
    add("--without", action="append", default=[], metavar="PATCH", help="all but this patch (repeatable)")
    add("--each", action="store_true", help="also one variant for each patch alone")
    add("--tree", type=Path, default=None, help="also the patched package in this tree")
    add("--model", default=None, help="a model's folder or name instead of the built-in tiny ones")
    add("--python", default=None, help="the interpreter that has vLLM (default: this one)")
    add("--repeat", type=int, default=1, help="runs of every variant")
    add("--near-limit", nargs=2, type=float, default=None, metavar=("LOW", "HIGH"),
        help="find, in steps of 0.005, the highest utilisation at which each scenario survives")  # fmt: skip
    add("--steps", action="store_true", help="keep every step in the output, not only their sum")
    add("--no-history", action="store_true", help="do not name the largest allocations: undistorted step times")
    add("--timeout", type=int, default=900, help="seconds for one engine")
    add("--output", type=Path, default=None, help="write the result as JSON here")
    add("--plot", type=Path, default=None, help="plot reserved memory over the run (PNG or SVG)")


def run(args: argparse.Namespace, options: Options, session: Session) -> tuple[ExitCode, dict[str, Any]]:
    """Run every scenario of the engine, or every case of a part of vLLM, with every variant."""
    check_plot(args.plot)
    check_writable(args.output, "--output")
    if args.what == "engine":
        return _run_engine(args, options, session)
    return _run_part(indexer if args.what == "indexer" else workspace, args, options, session)


def _run_part(
    part: Any, args: argparse.Namespace, options: Options, session: Session
) -> tuple[ExitCode, dict[str, Any]]:
    """Run the cases of a module that has ``choose_cases``, ``measure`` and ``show``, and ``plot`` if it has curves."""
    if args.plot and not hasattr(part, "plot"):
        raise NeaptideError(
            f"--plot with bench {args.what}", wanted="a bench that has curves: engine or indexer",
            todo="Leave --plot out.", where="--plot",
        )  # fmt: skip
    cases = part.choose_cases(args.case)
    work = session.places(create=False)[0]
    assert isinstance(work.place, InstalledPlace)
    upstream, patched = _variants(args, session, work)[:2]
    with tempfile.TemporaryDirectory(prefix="neaptide-bench-") as scratch:
        bench = Bench(
            python=interpreter(options.python), package=work.place.package, scratch=Path(scratch),
            progress=session.progress, timeout_seconds=args.timeout,
        )  # fmt: skip
        bench.probe()
        found = part.measure(bench, upstream, patched, cases)
    result = {
        "command": _command(sys.argv[1:]), "date": datetime.date.today().isoformat(), "schema_version": 1, **found,
    }  # fmt: skip
    if args.output:
        write_bytes(args.output, encode(result))
    part.show(result["rows"], session.progress)
    if args.plot:
        part.plot(result["rows"], args.plot)
    return outcome_code(result["rows"]), result


def _run_engine(args: argparse.Namespace, options: Options, session: Session) -> tuple[ExitCode, dict[str, Any]]:
    scenarios = choose_scenarios(args.scenario)
    model = check_model(args.model)
    work = session.places(create=False)[0]
    assert isinstance(work.place, InstalledPlace)
    variants = _variants(args, session, work)
    with tempfile.TemporaryDirectory(prefix="neaptide-bench-") as scratch:
        bench = Bench(
            python=interpreter(options.python), package=work.place.package, scratch=Path(scratch),
            progress=session.progress, model=model, timeout_seconds=args.timeout, history=not args.no_history,
        )  # fmt: skip
        device = bench.probe()
        with_steps = args.steps

        def keep(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
            """The result so far; written after every engine, so that a stop loses nothing."""
            result: dict[str, Any] = {
                "command": _command(sys.argv[1:]), "date": datetime.date.today().isoformat(), "device": device,
                "rows": [r if with_steps else without_steps(r) for r in rows], "schema_version": 1,
                "versions": next((r["versions"] for r in rows if "versions" in r), {}),
            }  # fmt: skip
            if args.output:
                write_bytes(args.output, encode(result))
            return result

        if args.near_limit:
            low, high = args.near_limit
            rows = bench.highest_utilisations(scenarios, variants, low, high, keep)
        else:
            rows = bench.matrix(scenarios, variants, args.repeat, keep)
    show(rows, session.progress)
    if args.plot:
        plot(rows, args.plot)
    return outcome_code(rows), keep(rows)


def _command(arguments: Sequence[str]) -> str:
    """The command line without the places of its output."""
    kept, skip = [], False
    for argument in arguments:
        if skip or argument in ("--output", "--plot"):
            skip = not skip
        elif not argument.startswith(("--output=", "--plot=")):
            kept.append(argument)
    return shlex.join(["neaptide", *kept])


def _variants(args: argparse.Namespace, session: Session, work: Work) -> list[Variant]:
    """Upstream's own first, then the series as chosen, each patch alone, and a tree, as asked for."""
    assert isinstance(work.place, InstalledPlace)
    applied = work.place.record()
    own = {p: work.place.read(p) for p in applied.files} if applied is not None else {}
    pristine = {path: data for path, data in own.items() if data is not None}
    chosen = session.chosen(TARGET)
    variants = [Variant(UPSTREAM, pristine), Variant("patched", _planned(session, work, [p.name for p in chosen]))]
    if args.each:
        variants += [Variant(p.name, _planned(session, work, [p.name, *p.header.after])) for p in chosen]
    if args.tree is not None:
        variants.append(Variant("tree", _changed_files(args.tree, work.place)))
    return variants


def _planned(session: Session, work: Work, names: Sequence[str]) -> dict[str, bytes]:
    plan = session.plan(work, [p for p in session.series(TARGET) if p.name in names])
    if plan.exit_code() is not ExitCode.DONE:
        raise NeaptideError(
            "the series does not plan clean on the installed vLLM", wanted="a series that `neaptide apply` takes",
            todo="Run `neaptide apply --installed --dry-run` and read what it says.", code=plan.exit_code(),
        )  # fmt: skip
    return plan.files


def _changed_files(tree: Path, place: InstalledPlace) -> dict[str, bytes]:
    """Python files of ``tree`` that differ from the installed package's own."""
    top = tree / place.artefact.package
    if not top.is_dir():
        raise NeaptideError(
            f"no folder {top}", wanted="a tree that `neaptide apply` made", todo="Check the path.", where="--tree"
        )
    files = {f.relative_to(top).as_posix(): f.read_bytes() for f in sorted(top.rglob("*.py"))}
    return {path: data for path, data in files.items() if place.read(path) != data}


def options_for(args: argparse.Namespace, options: Options) -> Options:
    """The installed vLLM alone."""
    return replace(options, installed=True, targets=(TARGET,))
