"""What each patch needs beside being applied, so that its saving is in force: one table, and the checks that it names.

A reason says no or unknown. What somebody here could mend is a finding; what the pin or the machine lacks is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from neaptide.doctor.facts import Facts


class Answer(StrEnum):
    YES = "yes"
    NO = "no"
    UNKNOWN = "cannot be told here"


@dataclass(frozen=True)
class Reason:
    """Why not: ``mendable`` if it is neither the pin's nor the machine's nature."""

    answer: Answer
    text: str
    mendable: bool = True


Check = Callable[[Facts], Iterable[Reason]]


@dataclass(frozen=True)
class Rule:
    """What a patch needs beside being applied.

    Attributes:
        checks: each gives its reasons.
        caller: the patch that brings an engine to it where the pin's own engine does not reach it.
    """

    checks: tuple[Check, ...] = ()
    caller: str = ""


def no(text: str, *, mendable: bool = True) -> Reason:
    return Reason(Answer.NO, text, mendable)


def unknown(text: str) -> Reason:
    return Reason(Answer.UNKNOWN, text)


# Checks


def cuda(facts: Facts) -> Iterator[Reason]:
    """A CUDA device; on other platforms the code is upstream's."""
    if not facts.machine.devices:
        yield unknown("no CUDA device is seen here")


def own_logits_policy(facts: Facts) -> Iterator[Reason]:
    policy = facts.switch("INDEXER_LOGITS_POLICY")
    if policy.error:
        yield no(policy.error)
    elif policy.value == facts.declared.UPSTREAM:
        yield no(f"switched off: {policy.name} is {policy.value}")
    elif policy.value == facts.declared.FIXED_WIDTH:
        yield no(f"in part: {policy.name} is {policy.value}, prefill only, and decode as upstream")


def ledger_file(facts: Facts) -> Iterator[Reason]:
    """Off by default, which is no finding."""
    file = facts.switch("LEDGER_FILE")
    if file.error or not file.value:
        yield no(file.error or f"{file.name} is not set", mendable=bool(file.error))


def split_bound(facts: Facts) -> Iterator[Reason]:
    bound = facts.switch("MLA_SPLITS_MB")
    if bound.error or bound.value == 0:
        yield no(bound.error or f"switched off: {bound.name} is 0, no bound")


def flash_attention_3(facts: Facts) -> Iterator[Reason]:
    """The backend FLASH_ATTN_MLA_SPARSE takes devices of compute capability 9.x alone."""
    if facts.machine.devices and all(one.capability[0] != 9 for one in facts.machine.devices):
        yield no("FLASH_ATTN_MLA_SPARSE needs compute capability 9.x", mendable=False)


def counted_estimate(facts: Facts) -> Iterator[Reason]:
    """Upstream's own variable leaves the estimate out."""
    name = "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS"
    if not facts.on(name) and name in facts.environment:
        yield no(f"switched off: {name} is {facts.environment[name]}")
    warmup = facts.switch("PROFILE_WARMUP")
    if warmup.error or warmup.value is False:
        yield no(warmup.error or f"in part: {warmup.name} is 0, kernels are warmed up after the KV cache is sized")


def compressed_ring(_facts: Facts) -> Iterator[Reason]:
    """The only caller makes its ring with ``fp8=""``."""
    yield no("the ring that vllm/pcie-collectives makes sends bf16, whose slots are as before", mendable=False)


def pcie(facts: Facts) -> Iterator[Reason]:
    """As the overlay's own rules choose, with one rank on each device that is seen here."""
    asked, architectures = facts.switch("PCIE"), facts.switch("PCIE_ARCHITECTURES")
    wrong = [switch.error for switch in (asked, architectures) if switch.error]
    yield from map(no, wrong)
    if not wrong and asked.value == facts.choice.OFF:
        yield no(f"switched off: {asked.name} is {'set to' if asked.set_to else 'by default'} {asked.value}")
    yield from _pcie_obstacles(facts, asked.value)
    yield from cuda(facts)
    if facts.machine.devices:
        yield from _pcie_machine(facts, asked.value, architectures.value or "listed")


def _pcie_machine(facts: Facts, asked: str | None, architectures: str) -> Iterator[Reason]:
    """What the devices have against it, asked as ``auto`` where it is switched off."""
    machine, choice = facts.machine, facts.choice
    asked = choice.AUTO if asked in (None, choice.OFF) else asked
    found = choice.Found(asked, architectures, len(machine.devices))
    for one in machine.devices:
        seen = replace(
            found, capability=one.capability, mig=one.mig, peers=machine.peers is not False,
            nvlink=machine.nvlink is True,
        )  # fmt: skip
        if why := choice.refusal(seen):
            yield no(why, mendable=False)
            return
    if machine.peers is None:
        yield unknown("peer access can be asked with torch only")
    if machine.nvlink is None and asked == choice.AUTO:
        yield unknown("whether there is NVLink is not known without nvidia-smi")


def _pcie_obstacles(facts: Facts, asked: str | None) -> Iterator[Reason]:
    if facts.on("VLLM_BATCH_INVARIANT"):
        yield no("VLLM_BATCH_INVARIANT wants one order of summation for all sizes")
    if asked == facts.choice.AUTO and facts.on("VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC"):
        yield no("VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC chooses another")
    missing = [name for name in ("b12x/channel-pool", "b12x/exact-slabs") if not facts.has(name)]
    if missing:
        yield no(f"{' and '.join(missing)} not applied")
    for name, why in facts.probe.imports.items():
        if why:
            yield no(f"{name} cannot be imported ({why})")


# The table

_POOLS = Rule(caller="vllm/pcie-collectives")
_ON_CUDA = Rule((cuda,))
RULES: dict[str, Rule] = {
    "b12x/oneshot-rank-data": _POOLS,
    "b12x/no-replay-groups": Rule(),
    "b12x/channel-pool": _POOLS,
    "b12x/exact-slabs": _POOLS,
    "b12x/dma-wire-slots": Rule((compressed_ring,), caller="vllm/pcie-collectives"),
    "b12x/indexer-regions": Rule(),
    "b12x/indexer-plan-budget": Rule(),
    "b12x/indexer-direct-outputs": Rule(),
    "b12x/oneshot-rank-order": _POOLS,
    "vllm/neaptide-switches": Rule(),
    "vllm/indexer-drop-previous-logits": _ON_CUDA,
    "vllm/indexer-logits": Rule((own_logits_policy, cuda)),
    "vllm/indexer-prefill-wide-keys": Rule((own_logits_policy, cuda)),
    "vllm/disposable-captures": Rule((cuda,), caller="vllm/pcie-collectives"),
    "vllm/workspace-manager": _ON_CUDA,
    "vllm/workspace-lanes": _ON_CUDA,
    "vllm/graph-estimate": Rule((counted_estimate, cuda)),
    "vllm/mla-profile-transients": _ON_CUDA,
    "vllm/mla-split-budget": Rule((split_bound, flash_attention_3, cuda)),
    "vllm/pcie-collectives": Rule((pcie,)),
    "vllm/live-ledger": Rule((ledger_file, cuda)),
}
