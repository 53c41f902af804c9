"""The exchanges of decode context parallelism: what goes over PCIe, and that everything else is upstream's."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from pcie_standins import Machine
from vllm.distributed.device_communicators.pcie_exchange import PcieExchange, combine_over, gather_over
from vllm.v1.attention.ops.dcp import mask_dcp_empty_shards_, reserve_query_head_storage

CPU = torch.device("cpu")
ROWS, HEADS, DIM, QUERY = 4, 6, 8, 16
BF16 = torch.bfloat16


@pytest.fixture
def exchange(machine: Machine, group: Any, monkeypatch: pytest.MonkeyPatch) -> PcieExchange:
    """Of two ranks, as far as this one sees."""
    with monkeypatch.context() as patched:
        patched.setattr(torch.distributed, "get_world_size", lambda *args: 2)
        return PcieExchange(group, CPU, rows=ROWS, heads=HEADS, head_dim=DIM, query_head_dim=QUERY)


class Otherwise:
    """Upstream's, which writes down what it gets."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, *args: Any, **options: Any) -> str:
        self.calls.append((args, options))
        return "otherwise"


def query(rows: int = 2, heads: int = HEADS // 2, dim: int = QUERY, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.rand(rows, heads, dim).to(dtype)


def partial(
    rows: int = 2, heads: int = HEADS, dim: int = DIM, dtype: torch.dtype = BF16
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(rows, heads, dim).to(dtype), torch.zeros(rows, heads)


def test_the_pool_has_the_shape_of_the_layers(exchange: PcieExchange, machine: Machine) -> None:
    (pool,) = machine.named("pool")
    assert (pool["max_batch_size"], pool["total_heads"]) == (ROWS, HEADS)
    assert (pool["head_dim"], pool["query_head_dim"]) == (DIM, QUERY)
    assert exchange.held_bytes() == 70


@pytest.mark.parametrize("rows", [1, ROWS])
@pytest.mark.parametrize("dtype", [torch.float16, BF16, torch.float8_e4m3fn])
def test_a_query_is_gathered(rows: int, dtype: torch.dtype, exchange: PcieExchange) -> None:
    given = query(rows, dtype=dtype)
    gathered = exchange.gathered(given)
    assert gathered is not None
    assert (tuple(gathered.shape), gathered.dtype) == ((rows, HEADS, QUERY), dtype)
    assert torch.equal(gathered[:, : HEADS // 2].float(), given.float())


REFUSED_QUERIES = {
    "no rows": query(0),
    "over capacity": query(ROWS + 1),
    "fp32": query(dtype=torch.float32),
    "fp8 of the other kind": query(dtype=torch.float8_e5m2),
    "all heads": query(heads=HEADS),
    "another width": query(dim=DIM),
    "two dimensions": query()[0],
    "four dimensions": query()[None],
    "strides": torch.rand(HEADS // 2, 2, QUERY).to(BF16).transpose(0, 1),
}


@pytest.mark.parametrize("name", REFUSED_QUERIES)
@pytest.mark.parametrize("padded", [None, 8])
def test_a_query_that_is_upstreams(name: str, padded: int | None, exchange: PcieExchange, machine: Machine) -> None:
    otherwise = Otherwise()
    given = REFUSED_QUERIES[name]
    assert gather_over(exchange, otherwise, padded, reserve_query_head_storage)(given) == "otherwise"
    assert otherwise.calls == [((given,), {})]
    assert machine.named("gather") == []


@pytest.mark.parametrize("padded", [HEADS, 8])
def test_padded_heads_have_storage_behind_them(padded: int, exchange: PcieExchange) -> None:
    otherwise, given = Otherwise(), query()
    plain = gather_over(exchange, otherwise, None, reserve_query_head_storage)(given)
    found = gather_over(exchange, otherwise, padded, reserve_query_head_storage)(given)
    assert otherwise.calls == []
    assert torch.equal(found, plain)
    assert found.untyped_storage().nbytes() >= 2 * padded * QUERY * 2


@pytest.mark.parametrize("natural", [False, True])
@pytest.mark.parametrize("rows", [1, ROWS])
@pytest.mark.parametrize("dtype", [torch.float16, BF16])
def test_outputs_are_reduced(
    natural: bool, rows: int, dtype: torch.dtype, exchange: PcieExchange, machine: Machine
) -> None:
    otherwise = Otherwise()
    output, lse = partial(rows, dtype=dtype)
    found = combine_over(exchange, otherwise, natural=natural, mask=mask_dcp_empty_shards_)(output, lse)
    assert (tuple(found.shape), found.dtype) == ((rows, HEADS // 2, DIM), dtype)
    assert [call["natural"] for call in machine.named("reduce")] == [natural]
    assert otherwise.calls == []


def test_one_row_of_a_wider_tensor(exchange: PcieExchange, machine: Machine) -> None:
    """Of a backend with padded heads. It counts as contiguous, with the stride of the wider rows."""
    wide, lse = torch.rand(1, 2 * HEADS, DIM).to(BF16), torch.rand(1, 2 * HEADS)
    output = wide[:, :HEADS]
    assert output.is_contiguous()
    assert output.stride(0) == 2 * HEADS * DIM
    assert exchange.reduced(output, lse[:, :HEADS], natural=True) is not None
    assert torch.equal(machine.named("reduce")[0]["output"], output)
    asked = torch.rand(1, HEADS, QUERY).to(BF16)[:, : HEADS // 2]
    assert exchange.gathered(asked) is not None


def test_an_lse_of_other_strides_is_packed(exchange: PcieExchange, machine: Machine) -> None:
    lse = torch.rand(HEADS, 2).t()
    assert exchange.reduced(partial()[0], lse, natural=True) is not None
    assert torch.equal(machine.named("reduce")[0]["lse"], lse)


REFUSED_OUTPUTS = {
    "no rows": partial(0),
    "over capacity": partial(ROWS + 1),
    "fp32": partial(dtype=torch.float32),
    "fp8": partial(dtype=torch.float8_e4m3fn),
    "a rank's heads": partial(heads=HEADS // 2),
    "another width": partial(dim=QUERY),
    "four dimensions": (partial()[0][None], torch.zeros(1, 2)),
    "lse of half": (partial()[0], partial()[1].half()),
    "lse of fp64": (partial()[0], partial()[1].double()),
    "lse with a dimension more": (partial()[0], partial()[1][..., None]),
    "lse of more rows": (partial()[0], partial(3)[1]),
    "lse of fewer heads": (partial()[0], partial(heads=3)[1]),
}


@pytest.mark.parametrize("name", REFUSED_OUTPUTS)
def test_an_output_that_is_upstreams(name: str, exchange: PcieExchange, machine: Machine) -> None:
    otherwise = Otherwise()
    output, lse = REFUSED_OUTPUTS[name]
    combine = combine_over(exchange, otherwise, natural=True, mask=mask_dcp_empty_shards_)
    assert combine(output, lse, seq_lens=None, query_start_loc=None) == "otherwise"
    ((args, options),) = otherwise.calls
    assert args[0] is output
    assert args[1] is lse
    assert options == {"seq_lens": None, "query_start_loc": None}
    assert machine.named("reduce") == []


def test_an_output_of_other_strides_is_packed(exchange: PcieExchange, machine: Machine) -> None:
    """Backends with padded heads put out a part of a wider tensor."""
    wide, lse = torch.rand(2, 2 * HEADS, DIM).to(BF16), partial()[1]
    exchange.reduced(wide[:, :HEADS], lse, natural=True)
    (call,) = machine.named("reduce")
    assert call["output"].is_contiguous()
    assert torch.equal(call["output"], wide[:, :HEADS])


def test_empty_shards_are_masked_before_they_are_weighed(exchange: PcieExchange, machine: Machine) -> None:
    """Of sequences of 1 and 2 rows the second has nothing here; the fourth row is padding."""
    output, lse = partial(4)
    combine = combine_over(exchange, Otherwise(), natural=False, mask=mask_dcp_empty_shards_)
    combine(output, lse, seq_lens=torch.tensor([7, 0]), query_start_loc=torch.tensor([0, 1, 3]))
    (seen,) = machine.named("reduce")
    assert seen["lse"].isneginf().all(dim=1).tolist() == [False, True, True, True]
    assert torch.equal(seen["lse"][0], torch.zeros(HEADS))


def test_more_rows_go_to_upstream_untouched(exchange: PcieExchange, machine: Machine) -> None:
    otherwise = Otherwise()
    output, lse = partial(ROWS + 1)
    seq_lens, starts = torch.tensor([0]), torch.tensor([0, ROWS + 1])
    combine = combine_over(exchange, otherwise, natural=True, mask=mask_dcp_empty_shards_)
    assert combine(output, lse, seq_lens=seq_lens, query_start_loc=starts) == "otherwise"
    ((args, options),) = otherwise.calls
    assert args == (output, lse)
    assert options["seq_lens"] is seq_lens
    assert options["query_start_loc"] is starts
    assert torch.equal(lse, torch.zeros(ROWS + 1, HEADS))


def test_one_plan_for_all_rows_of_a_kind(exchange: PcieExchange, machine: Machine) -> None:
    for rows in (1, 2, 3, 1):
        exchange.gathered(query(rows))
        exchange.gathered(query(rows, dtype=torch.float8_e4m3fn))
        for natural in (False, True):
            exchange.reduced(*partial(rows), natural=natural)
    surfaces = sorted(plan.query["surface"].split(".")[1] for plan in machine.plans)
    assert surfaces == ["all_gather_heads"] * 2 + ["lse_reduce_scatter"] * 2
    assert {call["natural"] is call["plan"].query["call"]["is_lse_base_on_e"] for call in machine.named("reduce")} == {
        True
    }


def test_streams_threads_and_captures(exchange: PcieExchange, machine: Machine) -> None:
    with machine.captured():
        assert exchange.gathered(query()) is None
        assert exchange.reduced(*partial(), natural=True) is None
    assert exchange.gathered(query()) is not None
    with machine.on_stream(2):
        assert exchange.gathered(query()) is None
        assert exchange.reduced(*partial(), natural=True) is None
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(exchange.gathered(query())))
    thread.start()
    thread.join()
    assert found == [None]
    with machine.captured():
        assert exchange.gathered(query(3)) is not None
        assert exchange.reduced(*partial(), natural=True) is None


def test_without_an_exchange_there_is_only_upstreams() -> None:
    otherwise = Otherwise()
    assert combine_over(None, otherwise, natural=True, mask=mask_dcp_empty_shards_) is otherwise
    assert gather_over(None, otherwise, 8, reserve_query_head_storage) is otherwise
