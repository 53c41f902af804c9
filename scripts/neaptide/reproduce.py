"""``neaptide reproduce FINDING``: the verification of each finding that the patches answer, as commands that are run.

A command that needs hardware which this machine has not got is named, not run; tests that skip show nothing, and are
named, too.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neaptide.doctor.machine import Machine
from neaptide.errors import ExitCode, NeaptideError
from neaptide.gpu_host import look
from neaptide.gpu_skips import Host, read_outcome
from neaptide.output import Progress


@dataclass(frozen=True)
class Needs:
    """Hardware of a command.

    Attributes:
        major: of the compute capability of each device; 0 for any.
    """

    name: str
    devices: int = 0
    major: int = 0

    def has(self, machine: Machine) -> bool:
        return sum(self.major in (0, one.capability[0]) for one in machine.devices) >= self.devices


CPU, ONE, TWO = Needs("a CPU"), Needs("one CUDA device", 1), Needs("two CUDA devices", 2)
BLACKWELL = Needs("one CUDA device of compute capability 12.x", 1, 12)
FOUR = Needs("four CUDA devices of compute capability 12.x", 4, 12)


@dataclass(frozen=True)
class Step:
    """A command, what it shows, and what it needs.

    Attributes:
        command: ``neaptide ...`` or ``pytest ...``.
        shows: the claim that its output is held against.
    """

    command: str
    shows: str
    needs: Needs = CPU


@dataclass(frozen=True)
class Finding:
    """A finding or pull request that started a patch."""

    title: str
    steps: tuple[Step, ...]


FINDINGS: dict[str, Finding] = {
    "channels": Finding("000, 1: a slab for every capture", (
        Step("neaptide slabs --pin r12", "a channel, and those of the gate and of turnkey, upstream against shared"),
        Step("pytest tests/gpu/test_pcie_pools.py", "channels through captures, and replays in a group", TWO),
    )),
    "fold": Finding("000, 2: a fold slab for every call", (
        Step("neaptide plans --pin r12", "the fold of a decode plan, by rows"),
        Step("pytest tests/gpu/test_indexer_topk.py", "allocations of a call", ONE),
    )),
    "dma": Finding("000, 3: ring slots sized for bf16", (
        Step("neaptide slabs --pin r12", "slab and stage of a ring by wire mode"),
        Step("pytest tests/gpu/test_pcie_pools.py", "the ring on a device", TWO),
    )),
    "direct": Finding("000, 4: whole-context logits", (
        Step("neaptide plans --pin r12", "the direct route's logits"),
        Step("pytest tests/gpu/test_indexer_sm120.py", "the scorer, which compiles for 12.x alone", BLACKWELL),
    )),
    "tile-logits": Finding("000, 5: tile logits and the shared arena", (
        Step("neaptide plans --pin r12", "prefill and decode plans, region by region"),
        Step("neaptide bench workspace", "lanes, growth and the lock", ONE),
    )),
    "rank-data": Finding("000, 6: 8 MiB of rank data a channel", (
        Step("neaptide slabs --pin r12", "rank data of four and of three channels"),
    )),
    "prefill-logits": Finding("002: prefill logits that never reuse a block", (
        Step("neaptide simulate 8192:98304", "growth after the first chunk by policy"),
        Step("neaptide bench indexer", "the same through vLLM's own functions", ONE),
    )),
    "decode-logits": Finding("003: decode logits in no reservation", (
        Step("neaptide ledger v41-flash-ep4", "decode logits of a rank, upstream against tiles"),
        Step("neaptide bench engine --scenario decode-wide --no-history", "an engine near its limit", ONE),
    )),
    "graphs": Finding("004: graph profiling and speculators' lanes", (
        Step("neaptide bench engine --scenario graphs-v2-full --no-history", "estimate against what graphs took", ONE),
        Step("pytest tests/gpu/test_vllm_pcie.py -m sm120", "channels of a group over PCIe", FOUR),
    )),
}  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("finding", metavar="FINDING", help=f"one of {', '.join(FINDINGS)}, or list")
    parser.add_argument("--python", default=None, help="for what needs torch: an interpreter that has it")


def machine_here(python: Path | None) -> Machine:
    """The devices that the interpreter of the tests would see."""
    return look(python or Path(sys.executable))[0]


def arguments_of(step: Step, root: Path, python: Path | None) -> list[str]:
    """The command with this tool's interpreter, or with ``python`` where it runs tests or asks upstream's code."""
    program, *rest = step.command.split()
    if program == "pytest":
        return [str(python or sys.executable), "-m", "pytest", "-q", *rest]
    asks_upstream = rest[0] in ("slabs", "plans", "ledger", "bench")
    more = ["--python", str(python)] if python is not None and asks_upstream else []
    return [sys.executable, "-m", "neaptide", *rest, "--root", str(root), *more]


def run(
    name: str,
    root: Path,
    python: Path | None,
    progress: Progress,
    machine: Callable[[Path | None], Machine] = machine_here,
) -> tuple[ExitCode, dict[str, Any]]:
    """Run what this machine can of a finding's commands; findings where one failed, was not run, or skipped tests."""
    if name == "list":
        rows = [[key, found.title, "; ".join(step.command for step in found.steps)] for key, found in FINDINGS.items()]
        progress.table("findings", ("name", "finding", "commands"), rows)
        return ExitCode.DONE, {"findings": {key: found.title for key, found in FINDINGS.items()}}
    if name not in FINDINGS:
        raise NeaptideError(
            f"no finding {name!r}", wanted=f"one of {', '.join(FINDINGS)}, or list", todo="Check the spelling.",
            where="reproduce",
        )  # fmt: skip
    steps = FINDINGS[name].steps
    here = machine(python) if any(step.needs.devices for step in steps) else Machine()
    done = [_ran(step, root, python, progress) if step.needs.has(here) else _named(step, here, progress)
            for step in steps]  # fmt: skip
    whole = all(row["exit_code"] == 0 and not row["skipped"] for row in done)
    return ExitCode.DONE if whole else ExitCode.FINDINGS, {"finding": name, "steps": done}


def _row(step: Step, exit_code: int | None, skipped: Sequence[str]) -> dict[str, Any]:
    own = {"command": step.command, "needs": step.needs.name, "shows": step.shows}
    return {**own, "exit_code": exit_code, "skipped": list(skipped)}


def _named(step: Step, here: Machine, progress: Progress) -> dict[str, Any]:
    seen = ", ".join("{} ({}.{})".format(one.name, *one.capability) for one in here.devices) or "none"
    progress.note(f"not run: {step.command}: it needs {step.needs.name}; seen here: {seen}")
    return _row(step, None, ())


def _ran(step: Step, root: Path, python: Path | None, progress: Progress) -> dict[str, Any]:
    progress.note(f"{step.command}: {step.shows}")
    arguments = arguments_of(step, root, python)
    if not step.command.startswith("pytest "):
        return _row(step, _called(arguments, root), ())
    with tempfile.TemporaryDirectory(prefix="neaptide-reproduce-") as folder:
        file = Path(folder) / "junit.xml"
        code = _called([*arguments, f"--junitxml={file}"], root)
        # What the host could have run is a question of gpu-ci's.
        skips = read_outcome(file, Host(0, (0, 0), {}, {})).skips if file.is_file() else ()
    for skip in skips:
        progress.note(f"not shown, skipped: {skip.test}: {skip.reason}")
    return _row(step, code, [skip.test for skip in skips])


def _called(arguments: Sequence[str], root: Path) -> int:
    """The exit code; what the command prints goes to stderr, for people."""
    return subprocess.run(arguments, cwd=root, stdout=sys.stderr, check=False).returncode
