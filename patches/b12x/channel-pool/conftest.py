"""Fixtures of the pool tests: both pools on a machine without devices, and what two gloo ranks logged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from b12x_pools import POOLS, Machine, alone, run_ranks


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return alone(monkeypatch)


@pytest.fixture(params=POOLS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pool(machine: Machine, kind: str) -> Any:
    return machine.pool(kind, object())


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """The logs of both ranks by scenario, of the module's own scenarios."""
    return run_ranks(Path(request.path), tmp_path_factory.mktemp("ranks"))
