"""A replay group is refused, with the reason, before a channel is made. Runs on a CPU."""

from __future__ import annotations

import importlib
from importlib.util import find_spec

import pytest
import torch

PACKAGE = "b12x" if find_spec("b12x") and find_spec("b12x.comm") else "sparkinfer"
POOLS = {"pcie_dcp_a2a": "PCIeDCPA2APool", "pcie_oneshot": "PCIeOneshotAllReducePool"}


@pytest.mark.parametrize("name", POOLS)
def test_a_group_is_refused_and_nothing_is_made(name: str) -> None:
    module = importlib.import_module(f"{PACKAGE}.comm.pcie.{name}")
    pool = object.__new__(getattr(module, POOLS[name]))
    vars(pool).update(
        device=torch.device("cpu"), single_channel=False, _closed=False, _channels={}, _all_channels=[],
        _capture_channel_stack=[], _channel_factory=lambda key: pytest.fail("a channel was made"),
    )  # fmt: skip
    reason = "chooses a channel's staging slot on the host"
    with pytest.raises(RuntimeError, match=reason), pool.capture(replay_group="decode"):
        pytest.fail("the scope was entered")
    assert pool._all_channels == []
