"""Facts for the doctor to judge: the whole series of a pin applied, on a machine that it is made for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from neaptide.doctor.applied import Applied
from neaptide.doctor.facts import Facts
from neaptide.doctor.machine import Device, Machine
from neaptide.doctor.overlay_code import CHOICE, SWITCHES, read_switches, run_module
from neaptide.doctor.probe import Probe
from neaptide.doctor.savings import Saving, judge_all
from neaptide.model import Patch
from neaptide.pins import load_pin
from neaptide.places import State
from neaptide.series import applies_to, load_series

ROOT = Path(__file__).resolve().parents[1]
SERIES: list[Patch] = [patch for target in ("b12x", "vllm") for patch in load_series(ROOT, target)]
DECLARED = run_module(ROOT / "overlay" / "vllm" / SWITCHES)
CHOSEN = run_module(ROOT / "overlay" / "vllm" / CHOICE)
BLACKWELL = Device(0, "RTX PRO 6000", (12, 0), 96 << 30, False)
FOUR = Machine(tuple(replace(BLACKWELL, index=i) for i in range(4)), "torch", peers=True, nvlink=False)
HOPPER = Machine((replace(BLACKWELL, capability=(9, 0), name="H200"),), "torch", peers=True, nvlink=False)


def facts(pin: str = "current", environment: dict[str, str] | None = None, **changes: Any) -> Facts:
    """A machine of four Blackwells with the whole series of a pin applied to what is imported, or with ``changes``."""
    targets = load_pin(ROOT, pin).targets
    environment = environment or {}
    applied = {
        name: Applied(
            name, one.package, one.version, f"{name} in site", Path(f"/site/{one.package}"), State.APPLIED,
            {p.id: "clean" for p in SERIES if p.target == name and applies_to(p, one.version)}, locked=True,
        )
        for name, one in targets.items()
    }  # fmt: skip
    packages = {one.package: {"folder": f"/site/{one.package}", "version": one.version} for one in targets.values()}
    whole = Facts(
        pin=pin, applied=applied, switches=read_switches(DECLARED, environment), declared=DECLARED, choice=CHOSEN,
        environment=environment, machine=FOUR, probe=Probe({}, packages=packages, imports={"b12x.comm.pcie.api": ""}),
    )  # fmt: skip
    return replace(whole, **changes)


def rows(found: Facts) -> dict[str, Saving]:
    series = [patch for patch in SERIES if patch.target in found.applied]
    return {row.patch: row for row in judge_all(series, found)}


def changed(name: str, whole: Facts | None = None, **changes: Any) -> Facts:
    """The same with a target changed."""
    whole = whole or facts()
    return replace(whole, applied={**whole.applied, name: replace(whole.applied[name], **changes)})


def without(whole: Facts, patch: str) -> Facts:
    """The same with a patch not applied."""
    name = patch.split("/")[0]
    statuses = {one: status for one, status in whole.applied[name].statuses.items() if one != patch}
    return changed(name, whole, statuses=statuses)
