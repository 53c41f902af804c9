"""The patches' own tests may use the helpers of ``tests``, and those of captures these fixtures."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))


@pytest.fixture(scope="session")
def group() -> Iterator[Any]:
    """The default group, of this process only."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def scopes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``capture_scopes`` of the patched vLLM with nothing registered."""
    module = importlib.import_module("vllm.distributed.capture_scopes")
    monkeypatch.setattr(module, "_registry", module._Registry())
    return module
