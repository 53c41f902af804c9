"""The profiling run in two passes, and the line beside the KV-cache summary."""

from __future__ import annotations

import importlib
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from workspace_device import MIB, Rig


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the accelerator was asked for, in order."""
    found: list[str] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.accelerator, name, lambda *args, name=name: found.append(name))
    return found


def profiled(monkeypatch: pytest.MonkeyPatch, events: list[str], name: str) -> tuple[Rig, list[dict[str, Any]]]:
    """Run a function of the module on a worker whose forward asks for 3 and 5 MiB."""
    rig, given = Rig(monkeypatch, total_bytes=1 << 30), []
    module = importlib.import_module("vllm.v1.worker.workspace_profile")
    monkeypatch.setattr(rig.module, "_manager", rig.manager)

    def profile_run(**kwargs: Any) -> None:
        given.append(kwargs)
        for size in (3 * MIB, 5 * MIB):
            rig.get(size)
        events.append(f"pass in {rig.slot().committed_bytes // MIB} MiB")

    worker = SimpleNamespace(model_runner=SimpleNamespace(profile_run=profile_run), device=torch.device("cpu"))
    getattr(module, name)(worker, randomize_inputs=True)
    return rig, given


def test_the_second_pass_is_measured_with_the_committed_workspace(
    monkeypatch: pytest.MonkeyPatch, events: list[str]
) -> None:
    rig, given = profiled(monkeypatch, events, "committed_profile_run")
    assert given == [{"randomize_inputs": True}] * 2
    # The plan took 6 MiB, twice its first storage.
    assert events[0] == "pass in 6 MiB"
    assert events[-4:] == ["synchronize", "empty_cache", "reset_peak_memory_stats", "pass in 5 MiB"]
    assert rig.slot().growths == 0


def test_a_given_cache_size_is_planned_and_not_measured(monkeypatch: pytest.MonkeyPatch, events: list[str]) -> None:
    rig, given = profiled(monkeypatch, events, "planning_profile_run")
    assert len(given) == 1
    assert "reset_peak_memory_stats" not in events
    assert rig.slot().committed_bytes == 5 * MIB


def test_one_line_says_what_the_slots_hold(monkeypatch: pytest.MonkeyPatch, events: list[str]) -> None:
    module = importlib.import_module("vllm.v1.worker.workspace_profile")
    said: list[str] = []
    monkeypatch.setattr(logging.getLogger(module.__name__), "info_once", lambda text, *args: said.append(text % args))
    profiled(monkeypatch, events, "planning_profile_run")
    module.log_workspace()
    assert len(said) == 1
    assert "5.00 MiB committed" in said[0]
