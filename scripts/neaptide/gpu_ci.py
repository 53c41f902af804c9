"""``scripts/gpu-ci``: the GPU tests of one pin on a CUDA host, with what a reader needs beside their outcome.

Exit codes: 0 all that this host can run has passed; 1 a test or a step failed, or a test was skipped that this host
could have run; 2 a bad call, or a host without CUDA. docs/gpu-ci.md describes variables and artefacts.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from neaptide import gpu_host, jsonfile
from neaptide.disk import write_bytes
from neaptide.doctor.machine import Machine
from neaptide.doctor.probe import Probe
from neaptide.errors import ExitCode, NeaptideError
from neaptide.gpu_skips import Host, read_outcome
from neaptide.output import Progress
from neaptide.pins import DEFAULT_PIN, load_pin
from neaptide.session import Options

BENCHES = ("indexer", "workspace")
# Where the image's test stage has the repository.
IN_IMAGE = "/opt/neaptide/scripts/gpu-ci"


@dataclass(frozen=True)
class Step:
    """One command of a run.

    Attributes:
        output: takes its stdout; None to let it through.
        accepts: exit codes that are no failure of the run.
    """

    name: str
    command: tuple[str, ...]
    output: Path | None = None
    accepts: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Run:
    """A run that is settled: on which devices, with which variables, and what it calls."""

    pin: str
    machine: Machine
    seen: Probe
    files: tuple[str, ...]
    environment: Mapping[str, str]
    steps: tuple[Step, ...]
    trees: gpu_host.Trees

    @property
    def host(self) -> Host:
        """What its tests have."""
        capability = min(one.capability for one in self.machine.devices)
        return Host(len(self.machine.devices), capability, self.seen.modules, self.environment)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="gpu-ci", description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False)
    add = made.add_argument
    add("--root", type=Path, required=True, help=argparse.SUPPRESS)
    add("--pin", default=DEFAULT_PIN, help="the pin (default: %(default)s)")
    add("--world", type=int, choices=gpu_host.WORLDS, help="devices of the run (default: the most that are there)")
    add("--output", type=Path, metavar="DIR", help="new folder of artefacts (default: ROOT/build/gpu-ci/PIN)")
    add("--build", type=Path, help="folder of built trees (default: ROOT/build)")
    add("--python", type=Path, help="the interpreter with torch, vLLM and pytest (default: this one)")
    add("--image", metavar="REF", help="run the same inside this image of the test stage")
    add("--topology", action="store_true", help="only check the devices and what lies between them")
    add("--no-bench", action="store_true", help="tests only")
    add("--dry-run", action="store_true", help="print variables and commands, run nothing")
    return made


def settled(args: argparse.Namespace, machine: Machine, seen: Probe, progress: Progress) -> Run:
    """What a run on this host does.

    Raises:
        NeaptideError: no pytest, or a vLLM that is not the pin's where its tests need one.
    """
    python = str(args.python or sys.executable)
    missing = [name for name in ("torch", "pytest") if not seen.modules[name]]
    if missing:
        raise NeaptideError(
            f"{' and '.join(missing)} not installed", wanted="an interpreter that can run tests/gpu",
            todo="Name it with --python, or use --image.", where=f"--python {python}",
        )  # fmt: skip
    output, build = args.output, (args.build or args.root / "build").resolve()
    options = Options(root=args.root, build=build, pin=args.pin, python=args.python)
    there = gpu_host.patches_at(args.root, load_pin(args.root, args.pin))
    files = gpu_host.files_for(args.root, there)
    wanted = gpu_host.needs_engine(files) and seen.modules["vllm"]
    engine = gpu_host.installed_engine(options, progress) if wanted else None
    trees = gpu_host.Trees(options, progress, output / "trees", engine)
    environment = {
        **trees.environment(),
        "CUDA_VISIBLE_DEVICES": gpu_host.visible(len(machine.devices), os.environ),
        "NEAPTIDE_TEST_RESULTS": str(output / "results"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    steps = _steps(args, python, files, machine, output, build)
    if engine is not None and not args.no_bench:
        steps += _benches(args, python, output, build, ledger="vllm/live-ledger" in there)
    return Run(args.pin, machine, seen, tuple(files), environment, tuple(steps), trees)


def _steps(
    args: argparse.Namespace, python: str, files: Sequence[str], machine: Machine, output: Path, build: Path
) -> list[Step]:
    tool, at = _tool(args, python, build)
    blackwell = all(one.capability[0] == 12 for one in machine.devices)
    tests = [str(args.root / "tests" / "gpu" / name) for name in files]
    pytest = (python, "-m", "pytest", *tests, "-ra", "-p", "no:cacheprovider", f"--junitxml={output / 'junit.xml'}")
    return [
        Step("apply", (*tool, "apply", *at)),
        Step("doctor", (*tool, "doctor", *at, "--json"), output / "doctor.json", (0, 1)),
        Step("pytest", pytest if blackwell else (*pytest, "-m", "not sm120")),
    ]


def _tool(args: argparse.Namespace, python: str, build: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """neaptide by an interpreter, and the options of the run's place."""
    return (python, "-m", "neaptide"), ("--root", str(args.root), "--build", str(build), "--pin", args.pin)


def _benches(args: argparse.Namespace, python: str, output: Path, build: Path, *, ledger: bool) -> list[Step]:
    """What needs a whole engine; with ``ledger`` one that writes its own, and what that says."""
    tool, at = _tool(args, python, build)
    steps = [
        Step(f"bench {name}", (*tool, "bench", name, *at, "--output", str(output / "bench" / f"{name}.json")))
        for name in BENCHES
    ]
    if ledger:
        kept = output / "results" / "ledger"
        bench = (*tool, "bench", "engine", *at, "--scenario", "graphs-v2-full", "--no-history")
        written = ("--output", str(output / "bench" / "ledger-engine.json"))
        steps += [
            Step("engine", ("env", f"VLLM_NEAPTIDE_LEDGER_FILE={kept}", *bench, *written)),
            Step(
                "ledger",
                (*tool, "ledger", "--root", str(args.root), "--live", f"{kept}.rank0.json", "--json"),
                output / "ledger.json",
            ),
        ]
    return steps


def carry_out(run: Run, output: Path, progress: Progress) -> ExitCode:
    """Every step, also behind one that failed, but for what cannot go on without the trees; then the skips."""
    if output.exists() and any(output.iterdir()):
        raise NeaptideError("not empty", wanted="a new folder", todo="Name another with --output.", where=str(output))
    (output / "results").mkdir(parents=True)
    environment = {**os.environ, **run.environment}
    failed: list[str] = []
    for step in run.steps:
        progress.note(f"{step.name}: {shlex.join(step.command)}")
        if _call(step, environment) not in step.accepts:
            failed.append(step.name)
        if step.name == "apply":
            if failed:
                raise NeaptideError(
                    "the series was not applied", wanted="patched trees", todo="Read what apply says above.",
                    where=f"pin {run.pin}", code=ExitCode.FINDINGS,
                )  # fmt: skip
            run.trees.make()
    outcome = read_outcome(output / "junit.xml", run.host)
    for skip in outcome.skips:
        progress.note(f"{'WRONGLY ' if skip.fault else ''}skipped {skip.test}: {skip.reason}" + _because(skip.fault))
    for name in failed:
        progress.note(f"failed: {name}")
    code = ExitCode.FINDINGS if failed or outcome.faults else ExitCode.DONE
    _write_summary(run, asdict(outcome), failed, code, output)
    progress.note(f"{outcome.tests} tests, {len(outcome.failed)} failed, {len(outcome.skips)} skipped, "
                  f"{len(outcome.faults)} of them wrongly; artefacts in {output}")  # fmt: skip
    return code


def _because(fault: str) -> str:
    return f" ({fault})" if fault else ""


def _call(step: Step, environment: Mapping[str, str]) -> int:
    if step.output is None:
        return subprocess.run(step.command, env=environment, check=False).returncode
    with open(step.output, "wb") as handle:
        return subprocess.run(step.command, env=environment, stdout=handle, check=False).returncode


def _write_summary(run: Run, outcome: Mapping[str, Any], failed: Sequence[str], code: ExitCode, output: Path) -> None:
    own = {"failed_steps": list(failed), "exit_code": int(code), "files": list(run.files), "outcome": outcome}
    told = {"machine": run.machine.as_dict(), "pin": run.pin, "schema_version": 1, "world": run.host.devices}
    write_bytes(output / "summary.json", jsonfile.encode({**own, **told}))


def in_image(args: argparse.Namespace) -> list[str]:
    """The same run inside an image, as this user, so that the artefacts are this user's."""
    kept = ["CUDA_VISIBLE_DEVICES"] if "CUDA_VISIBLE_DEVICES" in os.environ else []
    set_there = ["HOME=/tmp", "USER=gpu-ci", "TRITON_CACHE_DIR=/tmp/triton", "PYTHON=python"]
    return [
        "docker", "run", "--rm", "--gpus", "all", "--ipc=host", "--ulimit", "memlock=-1",
        "--user", f"{os.getuid()}:{os.getgid()}",
        *(part for name in (*set_there, *kept) for part in ("--env", name)),
        "--volume", f"{args.output}:/out", "--entrypoint", IN_IMAGE, args.image,
        "--pin", args.pin, "--output", "/out/run", "--build", "/out/build", *(("--topology",) if args.topology else ()),
        *(("--world", str(args.world)) if args.world else ()), *(("--no-bench",) if args.no_bench else ()),
    ]  # fmt: skip


def _run_in_image(args: argparse.Namespace, progress: Progress) -> int:
    command = in_image(args)
    if args.dry_run:
        print(shlex.join(command))
        return ExitCode.DONE
    if shutil.which("docker") is None:
        raise NeaptideError("no docker on PATH", wanted="docker with NVIDIA's container toolkit",
                            todo="Install it, or leave --image out.", where="--image")  # fmt: skip
    args.output.mkdir(parents=True, exist_ok=True)
    progress.note(shlex.join(command))
    code = subprocess.run(command, check=False).returncode
    if code not in (ExitCode.DONE, ExitCode.FINDINGS, ExitCode.BAD_INPUT):
        raise NeaptideError(f"docker ended with {code}", wanted="a run that ends by itself",
                            todo="Read its output above.", where=f"--image {args.image}")  # fmt: skip
    return code


def _gpu_ci(args: argparse.Namespace, progress: Progress) -> int:
    args.root = args.root.resolve()
    args.output = (args.output or args.root / "build" / "gpu-ci" / args.pin).resolve()
    if args.image:
        return _run_in_image(args, progress)
    python = args.python or Path(sys.executable)
    world = gpu_host.chosen_world(gpu_host.look(python)[0], args.world)
    machine, seen = gpu_host.look(python, {**os.environ, "CUDA_VISIBLE_DEVICES": gpu_host.visible(world, os.environ)})
    problems = gpu_host.topology_problems(machine)
    progress.note(f"{world} x {machine.devices[0].name}: {machine.bus}; {'; '.join(problems) or 'as it is made for'}")
    if args.topology:
        return ExitCode.FINDINGS if problems else ExitCode.DONE
    run = settled(args, machine, seen, progress)
    if args.dry_run:
        for name, value in sorted(run.environment.items()):
            print(f"export {name}={shlex.quote(value)}")
        for step in run.steps:
            print(shlex.join(step.command) + (f" > {shlex.quote(str(step.output))}" if step.output else ""))
        return ExitCode.DONE
    return carry_out(run, args.output, progress)


def main(argv: Sequence[str] | None = None) -> int:
    progress = Progress()
    args = parser().parse_args(argv)
    try:
        return int(_gpu_ci(args, progress))
    except (NeaptideError, OSError) as error:
        progress.note(f"error: {error}")
        bad_input = isinstance(error, OSError) or error.code is ExitCode.BAD_INPUT
        return ExitCode.BAD_INPUT if bad_input else ExitCode.FINDINGS


if __name__ == "__main__":
    sys.exit(main())
