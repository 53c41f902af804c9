"""The switches: their values, what vLLM knows of them, and that all ranks have the same."""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

POLICY = "VLLM_NEAPTIDE_INDEXER_LOGITS_POLICY"
FIXED = "VLLM_SPARSE_INDEXER_FIXED_LOGITS_WIDTH"
BUDGET = "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB"
JOINING = "VLLM_ELASTIC_EP_SCALE_UP_LAUNCH"
POLICIES = ("constant_bytes", "fixed_width", "upstream")
OVERFLOW = "VLLM_NEAPTIDE_WORKSPACE_OVERFLOW"
WARMUP = "VLLM_NEAPTIDE_PROFILE_WARMUP"
LEDGER = "VLLM_NEAPTIDE_LEDGER_FILE"
BUDGETS = {"VLLM_NEAPTIDE_WORKSPACE_OVERFLOW_MB": 1024, "VLLM_NEAPTIDE_MLA_SPLITS_MB": None}
PCIE = {
    f"VLLM_NEAPTIDE_PCIE_{name}"
    for name in ("COLLECTIVES", "ARCHITECTURES", "ONESHOT_KB", "RING_KB", "RING_MB", "DCP_ROWS")
}
ALL = {POLICY, FIXED, OVERFLOW, WARMUP, LEDGER, *BUDGETS, *PCIE}
# What each of two ranks has set.
SCENARIOS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "default": ({}, {}),
    "set": ({POLICY: "upstream"}, {POLICY: "upstream"}),
    "policy": ({POLICY: "upstream"}, {POLICY: "fixed_width"}),
    "budget": ({BUDGET: "512"}, {BUDGET: "256"}),
    "replicas": ({BUDGET: "512"}, {BUDGET: "256"}),
    "replicas-warm-up": ({WARMUP: "0"}, {}),
    "joining": ({POLICY: "upstream", JOINING: "1"}, {POLICY: "fixed_width", JOINING: "1"}),
    "garbage-on-0": ({POLICY: "garbage"}, {POLICY: "upstream"}),
    "garbage-on-1": ({}, {FIXED: "garbage"}),
    "garbage-on-both": ({POLICY: "garbage"}, {POLICY: "garbage"}),
}
# One process of a gloo group; argv: file of the rendezvous, rank, environments by scenario. Writes JSON at the end.
RANK = """
import json, os, sys
from datetime import timedelta
from types import SimpleNamespace
import torch
import vllm.distributed
from vllm import neaptide_switches

where, rank, scenarios = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
torch.distributed.init_process_group(
    "gloo", init_method=f"file://{where}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
)
group = SimpleNamespace(world_size=2, cpu_group=torch.distributed.group.WORLD)
vllm.distributed.get_world_group = lambda: group
said = {}
for name, environments in scenarios.items():
    os.environ.update(environments[rank])
    parallel_config = SimpleNamespace(data_parallel_rank=rank if name.startswith("replicas") else 0)
    try:
        said[name] = neaptide_switches.check_ranks_agree(parallel_config) or "agreed"
    except ValueError as error:
        said[name] = f"refused: {error}"
    for variable in environments[rank]:
        del os.environ[variable]
print("said" + json.dumps(said))
torch.distributed.barrier()
"""


def switches() -> Any:
    return importlib.import_module("vllm.neaptide_switches")


def envs(monkeypatch: pytest.MonkeyPatch, environment: Mapping[str, str]) -> Any:
    """``vllm.envs`` under an environment in which no other switch is set."""
    module = importlib.import_module("vllm.envs")
    for name in (*ALL, BUDGET):
        # A test that set the attribute itself may have left it behind.
        monkeypatch.delitem(vars(module), name, raising=False)
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return module


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, "constant_bytes"),
        *(({POLICY: policy}, policy) for policy in POLICIES),
        ({FIXED: "1"}, "fixed_width"),
        ({FIXED: "0"}, "upstream"),
        ({FIXED: "1", POLICY: "fixed_width"}, "fixed_width"),
        ({FIXED: "0", POLICY: "upstream"}, "upstream"),
    ],
)
def test_policy(environment: dict[str, str], wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert switches().indexer_logits_policy(environment) == wanted
    assert getattr(envs(monkeypatch, environment), POLICY) == wanted


@pytest.mark.parametrize("value", ["", "constant", "CONSTANT_BYTES", "upstream "])
def test_a_wrong_policy_names_the_allowed_ones(value: str) -> None:
    with pytest.raises(ValueError, match=POLICY) as caught:
        switches().indexer_logits_policy({POLICY: value})
    assert repr(value) in str(caught.value)
    assert all(policy in str(caught.value) for policy in POLICIES)


@pytest.mark.parametrize("value", ["", "true", "2", "01", "-1"])
def test_a_wrong_fixed_width_names_the_allowed_values(value: str) -> None:
    for read in (switches().fixed_logits_width, switches().indexer_logits_policy):
        with pytest.raises(ValueError, match=rf"{FIXED} is {value!r}, wanted 1 \(fixed_width\) or 0 \(upstream\)"):
            read({FIXED: value})


@pytest.mark.parametrize(
    ("fixed", "policy"),
    [("1", "constant_bytes"), ("1", "upstream"), ("0", "constant_bytes"), ("0", "fixed_width")],
)
def test_contradicting_variables_name_both(fixed: str, policy: str) -> None:
    with pytest.raises(ValueError, match="wanted them to agree") as caught:
        switches().indexer_logits_policy({FIXED: fixed, POLICY: policy})
    assert all(text in str(caught.value) for text in (FIXED, POLICY, policy))


@pytest.mark.parametrize(("environment", "wanted"), [({}, None), ({FIXED: "1"}, True), ({FIXED: "0"}, False)])
def test_fixed_width(environment: dict[str, str], wanted: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert switches().fixed_logits_width(environment) is wanted
    assert getattr(envs(monkeypatch, environment), FIXED) is wanted


@pytest.mark.parametrize("name", sorted(BUDGETS))
def test_a_budget_is_a_whole_number_of_mib(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert getattr(envs(monkeypatch, {}), name) == BUDGETS[name]
    assert getattr(envs(monkeypatch, {name: "0"}), name) == 0
    assert getattr(envs(monkeypatch, {name: "64"}), name) == 64
    for value in ("", "-1", "1.5", "1e3", "many", "1_0", " 1"):
        with pytest.raises(ValueError, match=f"{name} is {value!r}"):
            getattr(envs(monkeypatch, {name: value}), name)


@pytest.mark.parametrize(
    ("name", "default", "others", "wrong"),
    [(OVERFLOW, "transient", {"error": "error"}, ("", "off", "ERROR")), (WARMUP, True, {"0": False}, ("", "2", "yes"))],
)
def test_a_switch_of_few_values(
    name: str, default: object, others: dict[str, object], wrong: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert getattr(envs(monkeypatch, {}), name) == default
    for value, meant in others.items():
        assert getattr(envs(monkeypatch, {name: value}), name) == meant
    for value in wrong:
        with pytest.raises(ValueError, match=f"{name} is {value!r}"):
            getattr(envs(monkeypatch, {name: value}), name)


def test_vllm_knows_the_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """In its table, by which it validates names and chooses what Ray workers get."""
    module = envs(monkeypatch, {})
    assert switches().NAMES == ALL
    assert set(module.environment_variables) >= switches().NAMES
    copied = importlib.import_module("vllm.ray.ray_env").get_env_vars_to_copy()
    assert copied >= switches().NAMES


def test_a_wrong_value_is_an_error_when_vllm_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module = envs(monkeypatch, {POLICY: "garbage"})
    switches()
    with pytest.raises(ValueError, match="garbage"):
        getattr(module, POLICY)


@pytest.mark.parametrize("environment", [{POLICY: "upstream"}, {POLICY: "fixed_width", FIXED: "1"}])
def test_the_compile_hash_leaves_the_switches_out(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    unset = envs(monkeypatch, {}).compile_factors()
    assert envs(monkeypatch, environment).compile_factors() == unset
    assert BUDGET in unset
    assert not switches().NAMES & set(unset)


def test_values_of_this_process_have_the_budget_and_errors_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    envs(monkeypatch, {POLICY: "garbage", BUDGET: "256"})
    found = switches().current_values()
    assert set(found) == {*ALL, BUDGET, "VLLM_ENABLE_STARTUP_PLAN", "accounting"}
    assert found[BUDGET] == "256"
    assert found[POLICY].startswith("error: ")
    assert "garbage" in found[POLICY]


def test_an_error_of_upstreams_own_gets_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    envs(monkeypatch, {BUDGET: "many"})
    assert switches().current_values()[BUDGET].startswith(f"error: {BUDGET}: ")


def test_equal_values_agree() -> None:
    assert switches().disagreement([{"a": "1", "b": "2"}]) is None
    assert switches().disagreement([{"a": "1", "b": "2"}] * 3) is None


def test_different_values_are_named_with_their_ranks() -> None:
    found = switches().disagreement([{"a": "1", "b": "x"}, {"a": "1", "b": "y"}, {"a": "1", "b": "x"}])
    assert found.startswith("b differs across ranks")
    assert all(text in found for text in ("x on rank 0", "y on rank 1", "x on rank 2"))


@pytest.mark.parametrize("lacks", [0, 1])
def test_a_name_that_one_rank_lacks_is_a_difference(lacks: int) -> None:
    values = [{"a": "1"}, {"a": "1"}]
    del values[lacks]["a"]
    assert f"absent on rank {lacks}" in str(switches().disagreement(values))


def test_a_wrong_value_of_any_rank_is_found() -> None:
    assert switches().wrong_value([{"a": "1"}, {"a": "1", "b": "error: b is 7"}]) == "b is 7"
    assert switches().wrong_value([{"a": "1"}] * 2) is None


@functools.cache
def outputs() -> list[str]:
    """Output of two gloo ranks that go through the scenarios; one that does not end in time is an error."""
    base = {name: value for name, value in os.environ.items() if name not in {*ALL, BUDGET}}
    with tempfile.TemporaryDirectory() as folder:
        started = [
            subprocess.Popen(
                [sys.executable, "-c", RANK, f"{folder}/rendezvous", str(rank), json.dumps(SCENARIOS)],
                env=base, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for rank in range(2)
        ]  # fmt: skip
        try:
            return [process.communicate(timeout=240)[0] for process in started]
        finally:
            for process in started:
                process.kill()


def ranks() -> list[dict[str, str]]:
    """What each rank says in each scenario."""
    said = [re.search(r"^said(.*)$", text, re.MULTILINE) for text in outputs()]
    assert all(said), "\n".join(outputs())
    return [json.loads(found[1]) for found in said if found]


@pytest.mark.parametrize("scenario", ["default", "set", "replicas", "joining"])
def test_ranks_that_agree_go_on(scenario: str) -> None:
    """Replicas may differ, and workers that join a running engine are not compared."""
    assert [said[scenario] for said in ranks()] == ["agreed", "agreed"]


@pytest.mark.parametrize(
    ("scenario", "name", "values"),
    [
        ("policy", POLICY, ["'upstream' on rank 0", "'fixed_width' on rank 1"]),
        ("budget", BUDGET, ["512 on rank 0", "256 on rank 1"]),
        # It decides whether a rank enters collectives of the whole world.
        ("replicas-warm-up", WARMUP, ["False on rank 0", "True on rank 1"]),
    ],
)
def test_ranks_that_differ_all_refuse(scenario: str, name: str, values: list[str]) -> None:
    first, second = (said[scenario] for said in ranks())
    assert first == second
    assert first.startswith(f"refused: {name} differs across ranks")
    assert all(value in first for value in values)


@pytest.mark.parametrize("scenario", ["garbage-on-0", "garbage-on-1", "garbage-on-both"])
def test_a_wrong_value_on_any_rank_is_refused_on_all_by_its_own_message(scenario: str) -> None:
    """No rank is left waiting for one that cannot read its value."""
    first, second = (said[scenario] for said in ranks())
    assert first == second
    assert first.startswith(f"refused: {FIXED if scenario == 'garbage-on-1' else POLICY} is 'garbage', wanted ")


def test_envs_loads_by_its_path_without_a_vllm() -> None:
    """As vLLM's own setup.py does before anything is installed."""
    path = importlib.import_module("vllm.envs").__file__
    code = (
        "import importlib.util as u\n"
        f"spec = u.spec_from_file_location('envs', {path!r})\n"
        "module = u.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        f"print({POLICY!r} in module.environment_variables)\n"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "True\n", done.stderr


def test_a_startup_plan_is_another_under_another_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its KV size was measured with what profiling reserved."""
    plans = importlib.import_module("vllm.v1.worker.startup_plan")
    platform = SimpleNamespace(
        get_device_capability=lambda: None, get_device_name=lambda: "one", get_device_total_memory=lambda: 1
    )
    monkeypatch.setattr(plans, "current_platform", platform)
    config = SimpleNamespace(compute_hash=lambda: "hash")
    found = []
    for policy in POLICIES:
        envs(monkeypatch, {POLICY: policy})
        found.append(plans.compute_plan_fingerprint(config, 0, 1))
    assert len(set(found)) == len(POLICIES)
