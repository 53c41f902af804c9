"""A process group of one rank, captures with nothing registered, and a b12x that needs no device."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pcie_standins import Machine, install

PACKAGE = "vllm.distributed.device_communicators"
# On a pristine tree test_applied_pcie.py alone fails; the others could not be set up.
if importlib.util.find_spec(f"{PACKAGE}.pcie_choice") is None:
    collect_ignore_glob = ["test_pcie_*.py"]


@pytest.fixture
def scopes(scopes: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Without a device to wait for."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    return scopes


@pytest.fixture
def machine(scopes: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """The stand-in b12x; its session is a new one."""
    channels = importlib.import_module(f"{PACKAGE}.pcie_channels")
    channels._session.cache_clear()
    found = Machine()
    install(found, monkeypatch)
    yield found
    channels._session.cache_clear()


@pytest.fixture
def collectives() -> Iterator[Any]:
    """``pcie_collectives`` with no exchange made."""
    module = importlib.import_module(f"{PACKAGE}.pcie_collectives")
    made = module.pcie_exchange_of
    made.cache_clear()
    yield module
    made.cache_clear()
