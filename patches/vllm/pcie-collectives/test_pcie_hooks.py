"""Upstream's own code with the hooks in it: with PCIe collectives, and as before without."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.device_communicators import cuda_communicator
from vllm.v1.attention.ops import dcp

HEADS, DIM, QUERY = 3, 8, 16


def communicator(**options: Any) -> Any:
    """Upstream's, with NCCL only."""
    made = object.__new__(cuda_communicator.CudaCommunicator)
    pynccl = SimpleNamespace(world_size=4, disabled=False, all_reduce=lambda tensor: tensor * 4)
    absent = dict.fromkeys(
        ("fi_ar_comm", "qr_comm", "fi_pcie_ipc_ar_comm", "aiter_ar_comm", "ca_comm", "symm_mem_comm")
    )
    vars(made).update(absent, pynccl_comm=pynccl, use_aiter_allreduce=False, **options)
    return made


@pytest.fixture(autouse=True)
def no_symmetric_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_communicator, "should_nccl_symm_mem_allreduce", lambda *args: False)


@pytest.mark.parametrize("options", [{}, {"pcie_ar_comm": None}])
def test_without_pcie_an_all_reduce_is_as_before(options: dict[str, Any]) -> None:
    assert torch.equal(communicator(**options).all_reduce(torch.ones(2)), torch.full((2,), 4.0))


def test_pcie_comes_first_and_what_it_leaves_is_nccls() -> None:
    pcie = SimpleNamespace(all_reduce=lambda tensor: tensor * 9 if tensor.numel() == 1 else None)
    given = communicator(pcie_ar_comm=pcie)
    assert given.all_reduce(torch.ones(1)).tolist() == [9.0]
    assert given.all_reduce(torch.ones(2)).tolist() == [4.0, 4.0]


@pytest.mark.parametrize(
    ("name", "world_size", "device"),
    [
        ("tp:0", 1, "cuda"), ("tp:0", 4, "cpu"), ("dcp:0", 4, "cuda"), ("etp:0", 4, "cuda"), ("pp:0", 4, "cuda"),
        ("ep:0", 4, "cuda"), ("world:0", 4, "cuda"), ("", 4, "cuda"),
    ],
)  # fmt: skip
def test_what_is_attached_to_nothing(
    name: str, world_size: int, device: str, collectives: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(collectives, "made_together", lambda *args: pytest.fail("nobody is asked"))
    given = SimpleNamespace(unique_name=name, world_size=world_size, device=torch.device(device), cpu_group=None)
    collectives.attach_pcie_all_reduce(given)
    assert given.pcie_ar_comm is None


def test_a_tensor_parallel_group_is_asked(collectives: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(collectives, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    asked: list[Any] = []
    monkeypatch.setattr(collectives, "made_together", lambda *args: asked.append(args) or "made")
    given = SimpleNamespace(unique_name="tp:0", world_size=2, device=torch.device("cuda:1"), cpu_group="group")
    collectives.attach_pcie_all_reduce(given)
    assert given.pcie_ar_comm == "made"
    assert [args[:3] for args in asked] == [("tp:0", "group", torch.device("cuda:1"))]


class Group:
    world_size, rank_in_group, unique_name, cpu_group, device_group = 2, 0, "dcp:0", "cpu group", "device group"

    def all_gather(self, query: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat([query] * 2, dim=dim)


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which of upstream's symmetric workspaces were asked for; none can be made."""
    asked: list[str] = []
    monkeypatch.setattr(dcp, "get_dcp_group", Group)
    monkeypatch.setattr(dcp, "get_dcp_workspace_max_num_tokens", lambda config: 128)
    monkeypatch.setattr(dcp, "get_direct_dcp_a2a_workspace", lambda *args: asked.append("a2a"))
    monkeypatch.setattr(dcp, "get_direct_dcp_q_gather_workspace", lambda *args: asked.append("gather"))
    return asked


def manager(backend: str = "a2a", *, use_pcp: bool = False, padded: int | None = None, natural: bool = True) -> Any:
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(num_ubatches=0, dcp_comm_backend=backend),
        kernel_config=SimpleNamespace(enable_jit_warmup=False),
    )
    return dcp.MLADCPManager(
        config, torch.device("cuda"), HEADS, QUERY, DIM, torch.bfloat16, torch.bfloat16, padded, natural, use_pcp
    )


@pytest.mark.parametrize(
    ("backend", "use_pcp", "combine", "asked"),
    [
        ("a2a", False, "dcp_a2a_lse_reduce", ["a2a", "gather"]),
        ("ag_rs", False, "cp_lse_ag_out_rs", ["gather"]),
        ("ag_rs", True, "cp_lse_ag_out_ar", []),
    ],
)
def test_without_pcie_a_manager_has_upstreams_own(
    backend: str, use_pcp: bool, combine: str, asked: list[str], direct: list[str]
) -> None:
    made = manager(backend, use_pcp=use_pcp)
    assert made.pcie is None
    assert isinstance(made.combine, functools.partial)
    assert made.combine.func is getattr(dcp, combine)
    assert made.combine.keywords == {"cp_group": made.group, "is_lse_base_on_e": True}
    assert made.query_gather == (None if use_pcp else made._gather_query)
    assert direct == asked


class Exchange:
    rows = 4

    def __init__(self) -> None:
        self.natural: list[bool] = []

    def gathered(self, query: torch.Tensor) -> torch.Tensor | None:
        return torch.cat([query * 2] * 2, dim=1) if len(query) <= self.rows else None

    def reduced(self, output: torch.Tensor, lse: torch.Tensor, *, natural: bool) -> torch.Tensor:
        self.natural.append(natural)
        return output[:, :HEADS] * 2


@pytest.fixture
def exchange(collectives: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Exchange, list[Any]]:
    """What every shape gets, and the shapes that were asked for."""
    made, asked = Exchange(), []
    monkeypatch.setattr(collectives, "_on_cuda", lambda device: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(collectives, "pcie_exchange_of", lambda *args: asked.append(args) or made)
    return made, asked


@pytest.mark.parametrize("backend", ["a2a", "ag_rs"])
def test_with_an_exchange_upstreams_workspaces_are_not_made(
    backend: str, direct: list[str], exchange: tuple[Exchange, list[Any]]
) -> None:
    made = manager(backend)
    assert made.pcie is exchange[0]
    assert direct == []
    wanted = ("cpu group", "dcp:0", torch.device("cuda:1"), 128, 2 * HEADS, DIM, QUERY)
    assert exchange[1] == [wanted]


@pytest.mark.parametrize("natural", [False, True])
def test_a_manager_uses_its_exchange(natural: bool, direct: list[str], exchange: tuple[Exchange, list[Any]]) -> None:
    made = manager(natural=natural, padded=8)
    few, many = torch.ones(4, HEADS, QUERY), torch.ones(5, HEADS, QUERY)
    assert torch.equal(made.query_gather(few), torch.full((4, 2 * HEADS, QUERY), 2.0))
    assert torch.equal(made.query_gather(many), torch.ones(5, 2 * HEADS, QUERY))
    assert made.query_gather(few).untyped_storage().nbytes() == 4 * 8 * QUERY * 4
    lse = torch.zeros(4, 2 * HEADS)
    found = made.combine(
        torch.ones(4, 2 * HEADS, DIM), lse, seq_lens=torch.tensor([0]), query_start_loc=torch.tensor([0, 4])
    )
    assert torch.equal(found, torch.full((4, HEADS, DIM), 2.0))
    assert exchange[0].natural == [natural]
    assert lse.isneginf().all()


def test_prefill_context_parallelism_asks_for_none(direct: list[str], exchange: tuple[Exchange, list[Any]]) -> None:
    made = manager("ag_rs", use_pcp=True)
    assert made.pcie is None
    assert exchange[1] == []
    assert made.combine.func is dcp.cp_lse_ag_out_ar


@pytest.mark.parametrize(("rows", "switch", "most"), [(128, "64", 64), (16, "64", 16), (128, "0", 0)])
def test_an_exchange_has_the_rows_of_a_step_and_of_the_switch(
    rows: int, switch: str, most: int, collectives: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_NEAPTIDE_PCIE_DCP_ROWS", switch)
    made: list[Any] = []
    monkeypatch.setattr(collectives, "PcieExchange", lambda *args, **options: made.append(options["rows"]) or "made")
    monkeypatch.setattr(
        collectives, "made_together", lambda name, group, device, make, serves, wrong: None if wrong else make()
    )
    for _ in range(2):
        found = collectives.pcie_exchange_of("group", "dcp:0", torch.device("cuda:1"), rows, 6, DIM, QUERY)
        assert found == ("made" if most else None)
    assert made == ([most] if most else []), "the layers of one shape share one"
