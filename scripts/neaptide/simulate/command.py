"""The ``simulate`` command: what a trace or a prefill ladder makes PyTorch's allocator reserve, without a device."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from neaptide.bench.results import headed_table
from neaptide.disk import check_writable
from neaptide.errors import ExitCode, NeaptideError
from neaptide.output import Progress
from neaptide.plotting import check_plot, plot_bytes
from neaptide.simulate import view
from neaptide.simulate.ladders import POLICIES, ladder_trace, overlay_sizes, parse_ladder
from neaptide.simulate.replay import Run, run_trace
from neaptide.simulate.settings import MIB, parse_settings
from neaptide.simulate.snapshots import read_snapshot
from neaptide.simulate.traces import Trace, read_trace
from neaptide.simulate.viewer import write_snapshot


@dataclass(frozen=True)
class Request:
    """What is simulated, and what is written of it.

    Attributes:
        source: a trace (``.json``, ``.json.xz``), a pickle of PyTorch's snapshot, or a ladder ``CHUNK:TOTAL``.
        root: the repository, whose overlay decides the sizes of ladders.
        settings: a value of ``PYTORCH_ALLOC_CONF``; None for those of the trace, or the default ones.
        limit_bytes: most that may be reserved; None for no limit.
        of_ladder: ``policies`` (all by default), and arguments of :class:`~neaptide.simulate.ladders.Ladder`.
        of_snapshot: ``device`` and ``total_bytes`` of :func:`~neaptide.simulate.snapshots.read_snapshot`.
    """

    source: str
    root: Path
    settings: str | None = None
    limit_bytes: int | None = None
    of_ladder: Mapping[str, Any] = field(default_factory=dict)
    of_snapshot: Mapping[str, Any] = field(default_factory=dict)
    plot: Path | None = None
    snapshot: Path | None = None


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", metavar="TRACE|LADDER", help="a trace, a pickle of torch.cuda.memory._snapshot(), or CHUNK:TOTAL")
    add("--settings", default=None, help="PYTORCH_ALLOC_CONF to run under (default: the trace's, else PyTorch's)")
    add("--limit-bytes", type=int, default=None, help="most that may be reserved")
    add("--total-bytes", type=int, default=None, help="snapshot: memory of the device (default: 80 GiB)")
    add("--policy", action="append", default=None, choices=POLICIES, help="ladder: only this one (repeatable)")
    add("--columns", type=int, default=None, help="ladder: max_model_len (default: its end)")
    add("--layers", type=int, default=None, help="ladder: layers with an indexer (default: 2)")
    add("--heads", type=int, default=None, help="ladder: index heads (default: 32)")
    add("--budget-mib", type=int, default=None, help="ladder: VLLM_SPARSE_INDEXER_MAX_LOGITS_MB (default: 512)")
    add("--sm100", action="store_true", default=None, help="ladder: BF16 logits and an FP32 copy")
    add("--device", type=int, default=None, help="snapshot: the device (default: the first with a history)")
    add("--plot", type=Path, default=None, metavar="FILE", help="reserved and allocated bytes, as SVG or PNG")
    add("--snapshot", type=Path, default=None, metavar="FILE", help="a pickle for PyTorch's memory viewer")


def request_of(args: argparse.Namespace, root: Path) -> Request:
    """The request of a command line that :func:`add_options` described."""
    budget = None if args.budget_mib is None else args.budget_mib * MIB
    of_ladder = {
        "policies": args.policy, "columns": args.columns, "layers": args.layers, "heads": args.heads,
        "budget_bytes": budget, "sm100": args.sm100,
    }  # fmt: skip
    of_snapshot = {"device": args.device, "total_bytes": args.total_bytes}
    return Request(
        source=args.source, root=root, settings=args.settings, limit_bytes=args.limit_bytes,
        of_ladder=_given(of_ladder), of_snapshot=_given(of_snapshot), plot=args.plot, snapshot=args.snapshot,
    )  # fmt: skip


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def run(request: Request, progress: Progress) -> tuple[ExitCode, dict[str, Any]]:
    """Runs what was asked for, shows and writes it.

    Returns:
        ``FINDINGS`` if a limit was given and an operation ran out of it; the rows, one a run.

    Raises:
        NeaptideError: a source, setting or number that cannot be simulated.
    """
    _check(request)
    runs = [
        (run_trace(trace, request.settings, request.limit_bytes, history=request.snapshot is not None), first)
        for trace, first in _traces(request)
    ]
    rows = [view.summary(run, first, request.limit_bytes) for run, first in runs]
    headed_table("simulation", view.COLUMNS, [view.table_row(row) for row in rows], progress)
    headed_table("growth", view.GROWTH_COLUMNS, [line for row in rows for line in view.growth_rows(row)], progress)
    for row in rows:
        for note in view.notes(row):
            progress.note(note)
    _write(request, [run for run, _ in runs])
    out_of_limit = request.limit_bytes is not None and any(row["failed"] for row in rows)
    return ExitCode.FINDINGS if out_of_limit else ExitCode.DONE, {"source": request.source, "rows": rows}


def _check(request: Request) -> None:
    check_plot(request.plot)
    check_writable(request.snapshot, "--snapshot")
    parse_settings(request.settings or "")
    numbers = {"limit_bytes": request.limit_bytes, **request.of_ladder, **request.of_snapshot}
    for name in ("layers", "heads", "budget_bytes", "total_bytes", "limit_bytes"):
        value, least = numbers.get(name), 0 if name == "limit_bytes" else 1
        if value is not None and value < least:
            raise NeaptideError(str(value), wanted=f"{least} or more", todo="Give another.", where=_option(name))


def _traces(request: Request) -> list[tuple[Trace, int]]:
    """Traces, and the operations of the first chunk; 0 for a trace that is no ladder."""
    of_ladder = dict(request.of_ladder)
    policies = of_ladder.pop("policies", POLICIES)
    ladder = parse_ladder(request.source, **of_ladder)
    if ladder is not None:
        _refuse_others("a ladder", request.of_snapshot)
        sizes = overlay_sizes(request.root / "overlay")
        if request.snapshot is not None and len(policies) > 1:
            raise NeaptideError(
                f"{len(policies)} policies", wanted="one run in a snapshot", todo="Choose one with --policy.",
                where="--snapshot",
            )  # fmt: skip
        return [ladder_trace(ladder, policy, sizes) for policy in policies]
    path = Path(request.source)
    if not path.is_file():
        raise NeaptideError(
            "no such file, and no ladder", wanted="a trace, a pickle of a snapshot, or CHUNK:TOTAL",
            todo="For example: neaptide simulate 8192:98304.", where=request.source,
        )  # fmt: skip
    _refuse_others("a file", request.of_ladder)
    if path.suffix in (".json", ".xz"):
        _refuse_others("a trace", request.of_snapshot)
        return [(read_trace(path), 0)]
    return [(read_snapshot(path, **request.of_snapshot), 0)]


OPTIONS = {"policies": "--policy", "budget_bytes": "--budget-mib"}


def _option(name: str) -> str:
    return OPTIONS.get(name, f"--{name.replace('_', '-')}")


def _refuse_others(source: str, options: Mapping[str, Any]) -> None:
    """Options that are about another kind of source."""
    for name in options:
        raise NeaptideError(
            f"{_option(name)} with {source}", wanted="options of that source alone",
            todo="Leave it out; see `neaptide simulate --help`.", where="simulate",
        )  # fmt: skip


def _write(request: Request, runs: list[Run]) -> None:
    if request.plot is not None:
        plot_bytes(view.panels(runs), "operation", "GiB", request.plot, light=("allocated",))
    if request.snapshot is not None:
        write_snapshot(runs[0], request.snapshot)
