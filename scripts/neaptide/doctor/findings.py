"""What a reader should do something about, apart from the savings."""

from __future__ import annotations

from collections.abc import Iterator

from neaptide.doctor.applied import Applied
from neaptide.doctor.facts import Facts
from neaptide.doctor.machine import MIB
from neaptide.doctor.overlay_code import undeclared
from neaptide.doctor.surroundings import LEAST_SHM_BYTES
from neaptide.errors import ExitCode
from neaptide.places import State

Finding = tuple[str, str]


def findings(facts: Facts) -> list[Finding]:
    """Area and text of each, in the order of the report."""
    found: list[Finding] = []
    for target in facts.applied.values():
        found += [("applied", f"{target.target}: {text}") for text in _of_target(target)]
    found += [("switches", switch.error) for switch in facts.switches.values() if switch.error]
    if facts.switches:
        names = undeclared(facts.switches, facts.environment)
        found += [("switches", f"{name} is set, and no switch has that name; check the spelling") for name in names]
    found += [("device", text) for text in _of_machine(facts)]
    found += [("allocator", text) for text in facts.allocator["wrong"]]
    return found


def exit_code(facts: Facts, found: bool) -> ExitCode:
    """5 where something applied was altered or left half written, 1 for anything else to read."""
    broken = any(target.altered or target.state is State.INTERRUPTED for target in facts.applied.values())
    return ExitCode.UNVERIFIED if broken else ExitCode.FINDINGS if found else ExitCode.DONE


def _of_target(target: Applied) -> Iterator[str]:
    if target.state is State.INTERRUPTED:
        yield "a write was interrupted; the next `neaptide apply` or `revert` recovers it"
    elif target.altered:
        yield (
            f"altered since it was applied: {', '.join(target.altered)}; put the files back (git checkout in a tree, a "
            "reinstallation of a package), then apply"
        )
    elif target.state is State.MODIFIED:
        yield f"{target.place} is neither as upstream has it nor as the series leaves it"
    elif target.state is State.PRISTINE:
        yield f"nothing is applied to {target.place}; run `neaptide apply` there"
    elif target.state is State.ABSENT:
        yield target.place
    if target.stale:
        yield f"applied from other sources than the repository's: {', '.join(target.stale)}; apply again"
    if target.lock:
        yield f"not what the pin's lock holds: {', '.join(target.lock)}"


def _of_machine(facts: Facts) -> Iterator[str]:
    machine, nccl = facts.machine, facts.probe.nccl
    if not machine.devices:
        yield f"no device seen (torch: {machine.why_not}); what needs one cannot be told here"
    if machine.devices and machine.source != "torch":
        yield f"this interpreter sees no device by torch ({machine.why_not}); give the engine's with --python"
    if len(machine.devices) < 2:
        return
    if nccl["error"]:
        yield f"PyNccl does not load its library ({nccl['error']}); set VLLM_NCCL_SO_PATH"
    if nccl["missing"]:
        yield (
            f"vLLM switches PyNccl off without an error, and reduce-scatter then writes nothing: {nccl['library']} "
            f"{nccl['version']} lacks {', '.join(nccl['missing'])}; name a newer one in VLLM_NCCL_SO_PATH"
        )
    shm = facts.container["shm_bytes"]
    if shm is not None and shm < LEAST_SHM_BYTES:
        yield f"/dev/shm has {shm / MIB:,.0f} MiB, and NCCL wants 1 GiB or more; start the container with --ipc=host"
