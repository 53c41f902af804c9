"""What the doctor finds apart from the savings."""

from __future__ import annotations

from typing import Any

import pytest
from doctor_facts import FOUR, changed, facts
from neaptide.doctor import surroundings
from neaptide.doctor.facts import Facts
from neaptide.doctor.findings import findings
from neaptide.doctor.machine import Machine
from neaptide.doctor.probe import Probe

WELL: dict[str, Any] = {"library": "libnccl.so.2", "error": "", "version": "2.29.7", "missing": []}


def seen(nccl: dict[str, Any] | None = None, shm_bytes: int = 1 << 34, **changes: Any) -> Facts:
    environment = changes.pop("environment", {})
    changes = {"machine": FOUR, **changes}
    return facts(
        environment=environment, probe=Probe({}, nccl=nccl or WELL), container={"shm_bytes": shm_bytes},
        allocator=surroundings.allocator(environment), **changes,
    )  # fmt: skip


def texts(found: Facts) -> str:
    return "\n".join(f"{area}: {text}" for area, text in findings(found))


def test_a_sound_machine_has_no_findings() -> None:
    assert findings(seen()) == []


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (seen({**WELL, "version": "2.28.9", "missing": ["ncclCommSuspend"]}), "2.28.9 lacks ncclCommSuspend"),
        (seen({**WELL, "error": "cannot open"}), "VLLM_NCCL_SO_PATH"),
        (seen(shm_bytes=64 << 20), "/dev/shm has 64 MiB"),
        (seen(machine=Machine(why_not="not installed")), "no device seen (torch: not installed)"),
        (seen(machine=Machine(FOUR.devices, "nvidia-smi", why_not="not installed")), "--python"),
        (seen(environment={"VLLM_NEAPTIDE_PCIE_COLLECTIVE": "1"}), "no switch has that name"),
        (seen(environment={"VLLM_NEAPTIDE_PCIE_COLLECTIVES": "on"}), "is 'on', wanted one of"),
        (seen(environment={"PYTORCH_ALLOC_CONF": "a:1", "PYTORCH_CUDA_ALLOC_CONF": "a:2"}), "differ"),
    ],
)
def test_what_is_not_sound_is_said(found: Facts, says: str) -> None:
    assert says in texts(found)
    assert len(findings(found)) == 1


def test_one_device_needs_neither_nccl_nor_shared_memory() -> None:
    alone = Machine(FOUR.devices[:1], "torch")
    assert findings(seen({**WELL, "missing": ["ncclCommSuspend"]}, shm_bytes=1, machine=alone)) == []


def test_targets_that_are_not_as_the_repository_has_them() -> None:
    found = changed("vllm", seen(), stale=("vllm/workspace-manager",), lock=("pcie-collectives is not applied",))
    assert "other sources than the repository's: vllm/workspace-manager" in texts(found)
    assert "not what the pin's lock holds: pcie-collectives is not applied" in texts(found)
