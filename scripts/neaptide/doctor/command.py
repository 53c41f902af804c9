"""The ``doctor`` command: look, judge, report."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from neaptide.doctor import machine, surroundings
from neaptide.doctor.applied import Applied, at_installed_pin, look_at_target
from neaptide.doctor.facts import Facts
from neaptide.doctor.findings import exit_code, findings
from neaptide.doctor.nccl import wanted_symbols
from neaptide.doctor.overlay_code import CHOICE, SWITCHES, read_switches, run_module
from neaptide.doctor.probe import probe
from neaptide.doctor.savings import judge_all
from neaptide.doctor.show import show
from neaptide.errors import ExitCode
from neaptide.places import State
from neaptide.session import Options, Session

ENGINE, KERNELS = "vllm", "b12x"


def add_options(sub: argparse.ArgumentParser) -> None:
    """Options of ``neaptide doctor`` beside those that name a place."""
    sub.add_argument("--trees", action="store_true", help="the trees under build, whatever is installed")


def run(session: Session, options: Options, *, trees: bool = False) -> tuple[ExitCode, dict[str, Any]]:
    """What is applied, active and seen here, and which promised saving is not in force."""
    asked = trees or options.installed or bool(options.checkouts)
    session = session if asked else at_installed_pin(session)
    facts = look(session, asked=asked, environment=os.environ)
    savings = judge_all((patch for target in session.targets for patch in session.series(target)), facts)
    found = findings(facts)
    show(facts, savings, found, session.progress)
    code = exit_code(facts, bool(found) or any(saving.finding for saving in savings))
    return code, {
        "allocator": dict(facts.allocator),
        "applied": {name: target.as_dict() for name, target in facts.applied.items()},
        "container": dict(facts.container),
        "findings": [{"area": area, "text": text} for area, text in found],
        "imports": dict(facts.probe.imports),
        "machine": facts.machine.as_dict(),
        "nccl": dict(facts.probe.nccl),
        "packages": {name: dict(one) for name, one in facts.probe.packages.items()},
        "pin": facts.pin,
        "savings": [saving.as_dict() for saving in savings],
        "switches": [asdict(switch) for switch in facts.switches.values()],
    }


def look(session: Session, *, asked: bool, environment: Mapping[str, str]) -> Facts:
    """Everything that can be seen from here; at the session's places if ``asked``, else at what is installed."""
    applied = {target: look_at_target(session, target, asked=asked) for target in session.targets}
    declared = run_module(_overlay_file(session, applied, SWITCHES))
    engine = applied.get(ENGINE)
    folder = engine.folder if engine is not None else None
    kernels = session.pin.targets.get(KERNELS)
    seen = probe(
        session.options.python,
        packages=[target.package for target in session.pin.targets.values()],
        imports=[f"{kernels.package}.comm.pcie.api"] if kernels is not None else [],
        symbols=wanted_symbols(folder) if folder is not None else [],
    )
    return Facts(
        pin=session.pin.name, applied=applied, declared=declared, switches=read_switches(declared, environment),
        choice=run_module(_overlay_file(session, applied, CHOICE)), environment=environment,
        machine=machine.look_at_machine(seen, environment), probe=seen,
        container=surroundings.container(), allocator=surroundings.allocator(environment),
    )  # fmt: skip


def _overlay_file(session: Session, applied: Mapping[str, Applied], name: str) -> Path:
    """A module of the overlay as it is applied; where it is not, or may have been altered, as the repository has it."""
    engine = applied.get(ENGINE)
    if engine is not None and engine.state is State.APPLIED and engine.folder is not None:
        if (engine.folder / name).is_file():
            return engine.folder / name
    return session.options.root / "overlay" / ENGINE / name
