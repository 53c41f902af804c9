"""A startup plan that only some ranks have, with ranks that meet in upstream's own call of the worker."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

GIVEN, PLANNED = None, 5 << 30


def decided(
    monkeypatch: pytest.MonkeyPatch, mine: bool, others: list[bool], *, enabled: bool = True, joins: bool = False
) -> tuple[int | None, int]:
    """The KV-cache bytes after the worker's own start, and how often ranks met."""
    module = importlib.import_module("vllm.v1.worker.startup_plan_agreement")
    worker_module = importlib.import_module("vllm.v1.worker.gpu_worker")
    met: list[bool] = []

    def gather(everyone: list[Any], value: bool, group: Any) -> None:
        met.append(value)
        everyone[:] = [value, *others]

    def plan(worker: Any) -> None:
        if mine:
            worker.cache_config.kv_cache_memory_bytes = PLANNED

    monkeypatch.setattr(module, "maybe_apply_startup_plan", plan)
    world = SimpleNamespace(world_size=1 + len(others), cpu_group=None)
    monkeypatch.setattr(module, "get_world_group", lambda: world)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    monkeypatch.setenv("VLLM_ENABLE_STARTUP_PLAN", str(int(enabled)))
    monkeypatch.setenv("VLLM_ELASTIC_EP_SCALE_UP_LAUNCH", str(int(joins)))
    cache = SimpleNamespace(kv_cache_memory_bytes=GIVEN)
    worker = SimpleNamespace(cache_config=cache)
    with pytest.raises(AttributeError):  # Nothing else of the worker stands.
        worker_module.Worker.determine_available_memory(worker)
    return cache.kv_cache_memory_bytes, len(met)


@pytest.mark.parametrize("mine", [True, False])
@pytest.mark.parametrize("others", [[], [True], [False], [False, True], [True, True]])
def test_all_ranks_apply_a_plan_or_none(monkeypatch: pytest.MonkeyPatch, mine: bool, others: list[bool]) -> None:
    """What another rank says is whether it profiles, which is that it has no plan."""
    found, meetings = decided(monkeypatch, mine, [not other for other in others])
    assert found == (PLANNED if mine and all(others) else GIVEN)
    assert meetings == (1 if others else 0)


def test_ranks_without_plans_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    assert decided(monkeypatch, False, [True], enabled=False) == (GIVEN, 0)


def test_workers_that_join_decide_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert decided(monkeypatch, True, [True], joins=True) == (PLANNED, 0)
