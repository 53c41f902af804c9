"""The report as people read it."""

from __future__ import annotations

from collections.abc import Sequence

from neaptide.doctor.facts import Facts
from neaptide.doctor.findings import Finding
from neaptide.doctor.machine import MIB
from neaptide.doctor.savings import Saving
from neaptide.output import Progress


def show(facts: Facts, savings: Sequence[Saving], found: Sequence[Finding], progress: Progress) -> None:
    progress.table(f"applied ({facts.pin})", ("target", "state", "place", "lock"), [
        [t.target, t.state.value, t.place, "no lock" if not t.locked else "; ".join(t.lock) or "as locked"]
        for t in facts.applied.values()
    ])  # fmt: skip
    progress.table("switches", ("variable", "set to", "in force", "what it decides"), [
        [s.name, "(default)" if s.set_to is None else s.set_to, "refused" if s.error else str(s.value),
         s.effect.split(". ")[0]]
        for s in facts.switches.values()
    ])  # fmt: skip
    progress.table("machine", ("what", "found"), _machine(facts))
    progress.table("savings", ("in force", "patch", "promised, MiB", "why not"), [
        [s.in_force.value, s.patch, _promised(s), "; ".join(s.reasons)] for s in savings
    ])  # fmt: skip
    for area, text in found:
        progress.note(f"{area}: {text}")
    open_rows = sum(saving.finding for saving in savings)
    in_force = sum(not saving.reasons for saving in savings)
    progress.note(f"{in_force} of {len(savings)} patches in force; {len(found) + open_rows} findings")


def _promised(saving: Saving) -> str:
    return " or ".join(f"{row['bytes'] / MIB:,.1f}" for row in saving.promised if row["bytes"]) or "no fixed amount"


def _machine(facts: Facts) -> list[list[str]]:
    machine, nccl, container, allocator = facts.machine, facts.probe.nccl, facts.container, facts.allocator
    devices = [
        [f"device {one.index}", f"{one.name}, {one.total_bytes / MIB:,.0f} MiB, compute capability "
         f"{one.capability[0]}.{one.capability[1]}{', MIG' if one.mig else ''}"]
        for one in machine.devices
    ] or [["device", "no device seen"]]  # fmt: skip
    packages = [
        [name, f"{one['version'] or 'no version'} in {one['folder']}" if one["folder"] else "not installed"]
        for name, one in facts.probe.packages.items()
    ]
    lacks = f", lacks {', '.join(nccl['missing'])}" if nccl["missing"] else ""
    lock, shm = container["memlock_bytes"], container["shm_bytes"]
    return [
        *devices,
        ["between them", machine.bus],
        ["driver", machine.driver or "none seen"],
        ["CUDA", f"driver {machine.cuda_driver or 'none'}, torch {machine.torch_cuda or 'none'}"],
        ["torch", machine.torch or "none"],
        *packages,
        *([f"import {name}", why or "works"] for name, why in facts.probe.imports.items()),
        ["NCCL", nccl["error"] or f"{nccl['library']} {nccl['version']}{lacks}"],
        ["/dev/shm", "none" if shm is None else f"{shm / MIB:,.0f} MiB"],
        ["namespaces", f"IPC {container['ipc_namespace'] or 'unknown'}, PID {container['pid_namespace'] or 'unknown'}"],
        ["memlock", "unlimited" if lock is None else f"{lock / MIB:,.0f} MiB"],
        ["allocator", f"expandable segments {'on' if allocator['expandable_segments'] else 'off'}"
         f"{' by ' + allocator['variable'] if allocator['variable'] else ''}"],
    ]  # fmt: skip
