"""What a rank finds: from its platform, its devices and its b12x, and that whatever it finds is an answer."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from pcie_standins import Machine
from vllm.distributed.device_communicators.pcie_choice import refusal

DEVICE = torch.device("cuda:1")
SWITCH = "VLLM_NEAPTIDE_PCIE_COLLECTIVES"


class Host:
    """Four cards of one node without NVLink, unless a test says otherwise."""

    cuda, nvlink, same_node, cards, name, ubatches = True, False, True, 4, "NVIDIA RTX PRO 6000", False
    unreachable = (-1, -1)


@pytest.fixture
def host(machine: Machine, collectives: Any, monkeypatch: pytest.MonkeyPatch) -> Host:
    import vllm.distributed.parallel_state as state
    import vllm.envs as envs

    for name in (SWITCH, "VLLM_NEAPTIDE_PCIE_ARCHITECTURES", "VLLM_BATCH_INVARIANT"):
        monkeypatch.delitem(vars(envs), name, raising=False)
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(SWITCH, "auto")
    found = Host()
    platform = SimpleNamespace(
        is_cuda=lambda: found.cuda,
        is_fully_connected=lambda devices: found.nvlink,
        visible_device_id_to_physical_device_id=lambda index: index,
    )
    monkeypatch.setattr(collectives, "current_platform", platform)
    monkeypatch.setattr(state, "in_the_same_node_as", lambda *args, **options: [found.same_node] * 4)
    config = SimpleNamespace(parallel_config=found)
    monkeypatch.setattr(type(found), "use_ubatching", property(lambda self: self.ubatches), raising=False)
    monkeypatch.setattr(collectives, "get_current_vllm_config_or_none", lambda: config)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *args: 4)
    cuda = torch.cuda
    monkeypatch.setattr(
        cuda, "get_device_properties", lambda device: SimpleNamespace(major=12, minor=0, name=found.name)
    )
    monkeypatch.setattr(cuda, "device_count", lambda: found.cards)

    def access(device: Any, peer: Any) -> bool:
        indices = [torch.device("cuda", at).index if isinstance(at, int) else at.index for at in (device, peer)]
        return tuple(sorted(indices)) != found.unreachable

    monkeypatch.setattr(cuda, "can_device_access_peer", access)
    return found


def reason(collectives: Any) -> str:
    """Of rank 1 of four on four cards."""
    found = collectives.found_here(None, DEVICE, "sums")
    if refusal(found):
        return refusal(found)
    ranks = [replace(found, device=rank, physical=rank) for rank in range(4)]
    return refusal(collectives.reached(found, ranks, None, DEVICE))


def test_four_cards_are_served(host: Host, collectives: Any) -> None:
    assert reason(collectives) == ""


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"cuda": False}, "not the CUDA platform"), ({"same_node": False}, "several nodes"),
        ({"nvlink": True}, "without NVLink"), ({"name": "NVIDIA H200 MIG 1g.18gb"}, "MIG"),
        ({"unreachable": (1, 3)}, "no peer access"), ({"cards": 1}, "no peer access"), ({"ubatches": True}, "DBO"),
    ],
)  # fmt: skip
def test_what_is_missing_is_found(changes: dict[str, Any], word: str, host: Host, collectives: Any) -> None:
    vars(host).update(changes)
    assert word in reason(collectives)


def test_pairs_of_other_ranks_are_theirs(host: Host, collectives: Any) -> None:
    host.unreachable = (2, 3)
    assert reason(collectives) == ""


def test_ranks_that_see_their_own_device_only(host: Host, collectives: Any) -> None:
    """Each calls it by the same number, and which peers it has cannot be asked."""
    found = collectives.found_here(None, DEVICE, "sums")
    assert "one device each" in refusal(collectives.reached(found, [found] * 4, None, DEVICE))


def test_batch_invariance_wants_one_order(host: Host, collectives: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert "VLLM_BATCH_INVARIANT" in reason(collectives)


def test_switched_off_asks_no_device(host: Host, collectives: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    for name in ("get_device_properties", "can_device_access_peer"):
        monkeypatch.setattr(torch.cuda, name, lambda *args: pytest.fail("the device was asked"))
    assert reason(collectives) == "switched off"


def test_outside_of_a_config_there_are_no_ubatches(
    host: Host, collectives: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives, "get_current_vllm_config_or_none", lambda: None)
    assert reason(collectives) == ""


@pytest.mark.parametrize("name", ["b12x.comm.pcie", "b12x.comm.pcie.slab_sizes"])
def test_b12x_that_is_not_there(name: str, host: Host, collectives: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    assert "b12x" in reason(collectives)


@pytest.mark.parametrize("lacks", ["transient_captures", "owned_oneshot_bytes"])
def test_b12x_without_the_patches(lacks: str, host: Host, collectives: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pcie = sys.modules["b12x.comm.pcie"]
    if lacks == "transient_captures":
        monkeypatch.setattr(pcie, "OneshotAllReducePool", type("Upstreams", (), {}))
    else:
        monkeypatch.delattr(sys.modules["b12x.comm.pcie.slab_sizes"], lacks)
    assert "apply the b12x series" in reason(collectives)


@pytest.mark.parametrize("error", [ImportError("no module named cuda"), OSError("no libcudart"), AttributeError("api")])
def test_b12x_whose_names_cannot_be_resolved(
    error: Exception, host: Host, collectives: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its package resolves them on first use: importing it says nothing yet. An exception here leaves peers waiting."""
    lazy = ModuleType("b12x.comm.pcie")

    def resolve(name: str) -> Any:
        if name == "slab_sizes":
            return sys.modules["b12x.comm.pcie.slab_sizes"]
        raise error

    monkeypatch.setattr(lazy, "__getattr__", resolve, raising=False)
    monkeypatch.setitem(sys.modules, "b12x.comm.pcie", lazy)
    monkeypatch.setattr(sys.modules["b12x.comm"], "pcie", lazy)
    assert "b12x" in reason(collectives)


def test_a_device_that_cannot_be_asked_is_an_answer_too(
    host: Host, collectives: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any) -> bool:
        raise RuntimeError("driver says no")

    monkeypatch.setattr(torch.cuda, "can_device_access_peer", fails)
    assert reason(collectives) != ""
