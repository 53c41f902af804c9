"""The stand-ins of one test."""

from __future__ import annotations

import pytest
from direct_calls import Kernels


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    monkeypatch.delenv("B12X_MSA_DECODE_PAGEMAX", raising=False)
    return Kernels(monkeypatch)
