"""Plans are made without upstream's variables."""

from __future__ import annotations

import pytest
from budget_plans import plans


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in plans.VARIABLES:
        monkeypatch.delenv(name, raising=False)
