"""The savings that a doctor reports: every rule of the table, in force and not, and what counts as a finding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from doctor_facts import FOUR, HOPPER, SERIES, changed, facts, rows, without
from neaptide.doctor.machine import Machine
from neaptide.doctor.probe import Probe
from neaptide.doctor.rules import RULES, Answer
from neaptide.doctor.savings import judge_all
from neaptide.places import State
from neaptide.series import applies_to

YES, NO, UNKNOWN = Answer.YES, Answer.NO, Answer.UNKNOWN
PCIE_ON = {"VLLM_NEAPTIDE_PCIE_COLLECTIVES": "auto"}
POOLS = (
    "b12x/oneshot-rank-data", "b12x/channel-pool", "b12x/exact-slabs", "b12x/oneshot-rank-order",
    "vllm/disposable-captures",
)  # fmt: skip


def test_every_patch_of_both_series_has_a_rule() -> None:
    assert set(RULES) == {patch.id for patch in SERIES}


def test_names_and_values_come_from_the_overlay() -> None:
    for constant in ("INDEXER_LOGITS_POLICY", "MLA_SPLITS_MB", "PROFILE_WARMUP", "PCIE", "PCIE_ARCHITECTURES"):
        assert facts().switch(constant).name.startswith("VLLM_NEAPTIDE_")


def test_a_machine_that_it_is_made_for_has_all_that_its_pin_can_have() -> None:
    found = rows(facts(environment=PCIE_ON))
    assert not [row for row in found.values() if row.finding]
    in_force = {name for name, row in found.items() if row.in_force is YES}
    assert {"vllm/pcie-collectives", "vllm/workspace-manager", "vllm/indexer-logits", *POOLS} <= in_force
    assert found["b12x/indexer-regions"].reasons == ("no engine of this pin reaches it",)
    assert found["b12x/no-replay-groups"].reasons == ("not for b12x 1.5.1",)
    assert "bf16" in found["b12x/dma-wire-slots"].reasons[0]
    assert "9.x" in found["vllm/mla-split-budget"].reasons[0]


def test_r12_has_its_own_patches() -> None:
    found = rows(facts("r12", PCIE_ON))
    assert found["vllm/indexer-prefill-wide-keys"].in_force is YES
    assert found["vllm/indexer-logits"].reasons == ("not for vllm 0.27.1",)
    assert not any(row.finding for row in found.values())
    assert found["b12x/channel-pool"].in_force is NO


@pytest.mark.parametrize("patch", [p.id for p in SERIES if applies_to(p, "0.33.0" if p.target == "vllm" else "1.5.1")])
def test_a_patch_that_is_not_applied_is_a_finding(patch: str) -> None:
    row = rows(without(facts(environment=PCIE_ON), patch))[patch]
    assert (row.in_force, row.finding) == (NO, True)
    assert row.reasons[0].startswith("not applied to")


@pytest.mark.parametrize("patch", [p.id for p in SERIES if p.target == "vllm"])
def test_what_needs_a_device_cannot_be_told_without_one(patch: str) -> None:
    row = rows(facts(environment=PCIE_ON, machine=Machine()))[patch]
    if patch == "vllm/neaptide-switches":
        assert row.in_force is YES
    elif patch in ("vllm/indexer-prefill-wide-keys", "vllm/live-ledger"):
        # Not for this pin; not asked for.
        assert (row.in_force, row.finding) == (NO, False)
    else:
        assert (row.in_force, row.finding) == (UNKNOWN, True)


def test_files_that_were_altered_make_it_unknown() -> None:
    row = rows(changed("vllm", altered=("a.py",)))["vllm/workspace-manager"]
    assert (row.in_force, row.finding) == (UNKNOWN, True)
    assert "a.py" in row.reasons[0]


def test_a_target_that_is_absent_or_not_imported() -> None:
    absent = rows(changed("vllm", state=State.ABSENT, place="vllm is not installed"))
    assert absent["vllm/workspace-manager"].reasons == ("not applied: vllm is not installed",)
    tree = rows(changed("vllm", folder=Path("/build/current/vllm/vllm")))
    assert "this interpreter imports /site/vllm" in tree["vllm/workspace-manager"].reasons[0]
    assert tree["vllm/workspace-manager"].finding
    nowhere = replace(facts(), probe=Probe({}, packages={n: {"folder": "", "version": ""} for n in ("vllm", "b12x")}))
    assert "imports none" in rows(nowhere)["vllm/workspace-manager"].reasons[0]


def test_a_retired_patch_is_no_finding() -> None:
    statuses = {**facts().applied["vllm"].statuses, "vllm/workspace-manager": "retired"}
    row = rows(changed("vllm", statuses=statuses))["vllm/workspace-manager"]
    assert (row.in_force, row.finding) == (NO, False)


SWITCHED = [
    ("vllm/indexer-logits", {"VLLM_NEAPTIDE_INDEXER_LOGITS_POLICY": "upstream"}, "is upstream"),
    ("vllm/indexer-logits", {"VLLM_NEAPTIDE_INDEXER_LOGITS_POLICY": "fixed_width"}, "in part"),
    ("vllm/indexer-logits", {"VLLM_SPARSE_INDEXER_FIXED_LOGITS_WIDTH": "0"}, "is upstream"),
    ("vllm/indexer-logits", {"VLLM_NEAPTIDE_INDEXER_LOGITS_POLICY": "x"}, "wanted one of"),
    ("vllm/graph-estimate", {"VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS": "0"}, "ESTIMATE_CUDAGRAPHS is 0"),
    ("vllm/graph-estimate", {"VLLM_NEAPTIDE_PROFILE_WARMUP": "0"}, "in part"),
    ("vllm/graph-estimate", {"VLLM_NEAPTIDE_PROFILE_WARMUP": "2"}, "wanted one of"),
]


@pytest.mark.parametrize(("patch", "environment", "says"), SWITCHED)
def test_switches_take_a_saving_away(patch: str, environment: dict[str, str], says: str) -> None:
    assert rows(facts())[patch].in_force is YES
    row = rows(facts(environment=environment))[patch]
    assert (row.in_force, row.finding) == (NO, True)
    assert says in row.reasons[0]


@pytest.mark.parametrize(
    ("file", "devices", "answer", "finding", "says"),
    [
        (None, True, NO, False, "VLLM_NEAPTIDE_LEDGER_FILE is not set"),
        ("", True, NO, False, "VLLM_NEAPTIDE_LEDGER_FILE is not set"),
        ("ledger", True, YES, False, ""),
        ("nowhere/ledger", True, NO, True, "wanted a file in a folder that exists; make"),
        ("ledger", False, UNKNOWN, True, "no CUDA device"),
    ],
)
def test_the_live_ledger_is_for_those_who_ask(
    tmp_path: Path, file: str | None, devices: bool, answer: Answer, finding: bool, says: str
) -> None:
    environment = {} if file is None else {"VLLM_NEAPTIDE_LEDGER_FILE": file and str(tmp_path / file)}
    row = rows(facts(environment=environment, machine=FOUR if devices else Machine()))["vllm/live-ledger"]
    assert (row.in_force, row.finding) == (answer, finding)
    assert says in "; ".join(row.reasons)


@pytest.mark.parametrize(("value", "answer"), [("0", NO), ("x", NO), ("256", YES)])
def test_the_split_bound_on_a_device_that_has_the_backend(value: str, answer: Answer) -> None:
    environment = {"VLLM_NEAPTIDE_MLA_SPLITS_MB": value}
    assert rows(facts(environment=environment, machine=HOPPER))["vllm/mla-split-budget"].in_force is answer
    assert rows(facts(machine=HOPPER))["vllm/mla-split-budget"].in_force is YES


def four(**changes: Any) -> Machine:
    """Four devices, each changed, or their machine."""
    of_device = {name: value for name, value in changes.items() if name in ("capability", "mig")}
    of_machine = {name: value for name, value in changes.items() if name not in of_device}
    devices = tuple(replace(one, **of_device) for one in FOUR.devices)
    return replace(FOUR, **{"devices": devices, **of_machine})


MACHINES = [
    (four(capability=(9, 0)), NO, False, "compute capability 9.0"),
    (four(mig=True), NO, False, "MIG"),
    (four(peers=False), NO, False, "no peer access"),
    (four(nvlink=True), NO, False, "not more than two GPUs without NVLink"),
    (four(devices=FOUR.devices[:2]), NO, False, "not more than two GPUs"),
    (four(devices=FOUR.devices[:3]), NO, False, "3 ranks"),
    (four(devices=FOUR.devices[:1]), NO, False, "1 ranks"),
    (four(peers=None), UNKNOWN, True, "with torch only"),
    (four(nvlink=None), UNKNOWN, True, "nvidia-smi"),
    (FOUR, YES, False, ""),
]


@pytest.mark.parametrize(("machine", "answer", "finding", "says"), MACHINES)
def test_pcie_collectives_by_machine(machine: Machine, answer: Answer, finding: bool, says: str) -> None:
    found = rows(facts(environment=PCIE_ON, machine=machine))
    row = found["vllm/pcie-collectives"]
    assert (row.in_force, row.finding) == (answer, finding)
    assert says in "; ".join(row.reasons)
    for name in POOLS:
        assert (found[name].in_force, found[name].finding) == (answer, finding), name


ASKED = [
    ({}, FOUR, NO, True, "by default 0"),
    ({"VLLM_NEAPTIDE_PCIE_COLLECTIVES": "0"}, FOUR, NO, True, "set to 0"),
    # What the machine could not have anyway is no finding, switched off or not.
    ({}, HOPPER, NO, False, "1 ranks"),
    ({"VLLM_NEAPTIDE_PCIE_COLLECTIVES": "x"}, FOUR, NO, True, "wanted one of"),
    ({"VLLM_NEAPTIDE_PCIE_COLLECTIVES": "1"}, four(nvlink=True), YES, False, ""),
    ({"VLLM_NEAPTIDE_PCIE_COLLECTIVES": "1"}, four(devices=FOUR.devices[:2], nvlink=None), YES, False, ""),
    ({**PCIE_ON, "VLLM_NEAPTIDE_PCIE_ARCHITECTURES": "any"}, four(capability=(9, 0)), YES, False, ""),
    ({**PCIE_ON, "VLLM_BATCH_INVARIANT": "1"}, FOUR, NO, True, "order of summation"),
    ({**PCIE_ON, "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC": "1"}, FOUR, NO, True, "chooses another"),
    ({"VLLM_NEAPTIDE_PCIE_COLLECTIVES": "1", "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC": "1"}, FOUR, YES, False, ""),
]


@pytest.mark.parametrize(("environment", "machine", "answer", "finding", "says"), ASKED)
def test_pcie_collectives_by_what_is_asked(
    environment: dict[str, str], machine: Machine, answer: Answer, finding: bool, says: str
) -> None:
    row = rows(facts(environment=environment, machine=machine))["vllm/pcie-collectives"]
    assert (row.in_force, row.finding) == (answer, finding)
    assert says in "; ".join(row.reasons)


@pytest.mark.parametrize("patch", ["b12x/channel-pool", "b12x/exact-slabs"])
def test_pcie_collectives_need_the_patched_b12x(patch: str) -> None:
    row = rows(without(facts(environment=PCIE_ON), patch))["vllm/pcie-collectives"]
    assert (row.in_force, row.finding, row.reasons) == (NO, True, (f"{patch} not applied",))


def test_pcie_collectives_need_a_b12x_that_can_be_imported() -> None:
    probe = replace(facts().probe, imports={"b12x.comm.pcie.api": "ModuleNotFoundError: No module named 'cutlass'"})
    found = rows(facts(environment=PCIE_ON, probe=probe))
    assert "cutlass" in found["vllm/pcie-collectives"].reasons[0]
    assert found["b12x/channel-pool"].reasons == ("reached through vllm/pcie-collectives only, which is not in force",)
    assert found["b12x/channel-pool"].finding


def test_without_the_engine_no_pool_is_reached() -> None:
    whole = facts("sparkinfer-de04")
    found = {row.patch: row for row in judge_all([p for p in SERIES if p.target == "b12x"], whole)}
    assert found["b12x/no-replay-groups"].in_force is YES
    assert found["b12x/oneshot-rank-data"].in_force is YES
    alone = replace(facts(), applied={"b12x": facts().applied["b12x"]})
    only = {row.patch: row for row in judge_all([p for p in SERIES if p.target == "b12x"], alone)}
    assert only["b12x/channel-pool"].reasons == ("no engine of this pin reaches it",)


def test_a_patch_without_a_rule_is_said_to_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    # Another table: one that lost a row and got it back has it in another place.
    rest = {patch: rule for patch, rule in RULES.items() if patch != "vllm/workspace-manager"}
    monkeypatch.setattr("neaptide.doctor.savings.RULES", rest)
    row = rows(facts())["vllm/workspace-manager"]
    assert (row.in_force, row.finding, row.reasons) == (UNKNOWN, True, ("the doctor has no rule for this patch",))
