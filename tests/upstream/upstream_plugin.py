"""pytest plug-in for upstream's tests on a machine without an accelerator.

Changes no module of upstream: an alias for a module that is not installed, a no-op where torch has no
accelerator to act on, and a fixture that upstream keeps in a conftest which needs one.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator

import pytest
import torch

sys.modules.setdefault("multiprocess", multiprocessing)
if not torch.accelerator.is_available():
    torch.accelerator.empty_cache = lambda: None


@pytest.fixture
def default_vllm_config() -> Iterator[None]:
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        yield
