"""Fixtures that every kind of test shares."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from toy import ToyRepository, Upstream


@pytest.fixture
def toy(tmp_path: Path) -> ToyRepository:
    """An empty toy repository; add patches, then ``lock`` and ``run``."""
    return ToyRepository(tmp_path / "repository")


@pytest.fixture
def upstream(toy: ToyRepository, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Upstream:
    """A checkout of toy that a test can change."""
    return Upstream(toy, tmp_path / "upstream", capsys)
