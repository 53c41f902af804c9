"""Whether the tree has the patch at all."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import torch


def test_a_communicator_of_the_cpu_gets_no_pcie_all_reduce() -> None:
    module = importlib.import_module("vllm.distributed.device_communicators.pcie_collectives")
    communicator = SimpleNamespace(unique_name="tp:0", world_size=4, device=torch.device("cpu"))
    module.attach_pcie_all_reduce(communicator)
    assert communicator.pcie_ar_comm is None
