"""Fixtures that every kind of test shares."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from toy import ToyRepository


@pytest.fixture
def toy(tmp_path: Path) -> ToyRepository:
    """An empty toy repository; add patches, then ``lock`` and ``run``."""
    return ToyRepository(tmp_path / "repository")
