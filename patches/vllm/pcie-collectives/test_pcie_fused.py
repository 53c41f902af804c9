"""The all-reduce with residual add and RMSNorm: what goes over PCIe, and when its plans are made."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pcie_standins import FUSED, Machine
from vllm.config import CompilationMode
from vllm.distributed.device_communicators.pcie_all_reduce import PcieAllReduce
from vllm.distributed.device_communicators.pcie_limits import Limits

CPU = torch.device("cpu")
EPSILON = 1e-6
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture
def reduce(machine: Machine, group: Any) -> PcieAllReduce:
    """Oneshot to 1,024 bytes, a ring from 2,048 to 4,096."""
    made = PcieAllReduce(group, CPU, Limits(1024, 2048, 4096))
    made.join_captures()
    return made


def operands(rows: int, width: int, dtype: torch.dtype = torch.float32) -> Operands:
    torch.manual_seed(0)
    return torch.randn(rows, width).to(dtype), torch.randn(rows, width).to(dtype), torch.randn(width).to(dtype)


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """The same, one element behind the beginning of its storage."""
    moved = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)
    return moved.copy_(tensor)


def gapped(tensor: torch.Tensor) -> torch.Tensor:
    """The same, with strides of twice its row."""
    return torch.cat([tensor, tensor], dim=-1)[..., : tensor.shape[-1]]


def fused_plans(machine: Machine) -> list[Any]:
    return [plan for plan in machine.plans if plan.query["surface"] == FUSED]


def capture(scopes: Any) -> Any:
    return scopes.captured_by_others(SimpleNamespace(stream=SimpleNamespace(cuda_stream=5)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_sum_residual_and_norm(dtype: torch.dtype, reduce: PcieAllReduce, machine: Machine) -> None:
    given = operands(3, 16, dtype)
    kept = [operand.clone() for operand in given]
    normed, total = reduce.all_reduce_add_rms_norm(*given, EPSILON)
    wanted = given[0].double() * 2 + given[1].double()
    torch.testing.assert_close(total, wanted.to(dtype))
    scaled = wanted / torch.sqrt(wanted.square().mean(-1, keepdim=True) + EPSILON) * given[2].double()
    torch.testing.assert_close(normed, scaled.to(dtype))
    assert all(torch.equal(operand, before) for operand, before in zip(given, kept, strict=True))
    assert [name for name, _ in machine.calls if name in ("fused", "oneshot", "ring")] == ["fused"]
    assert reduce.calls == {"oneshot": 0, "fused": 1, "ring": 0, "upstream": 0}


def refused() -> dict[str, Operands]:
    tensor, residual, weight = operands(4, 16)
    return {
        "more bytes than the oneshot takes": operands(17, 16),
        "the ring's bytes": operands(32, 16),
        "no rows": operands(0, 16),
        "rows that are no whole packs": operands(4, 18),
        "a dtype that b12x does not take": operands(4, 16, torch.float64),
        "one dimension": (tensor[0], residual[0], weight),
        "three dimensions": (tensor[None], residual[None], weight),
        "a wider weight's dtype": (tensor.half(), residual.half(), weight),
        "a wider residual's dtype": (tensor.half(), residual, weight.half()),
        "a weight of another width": (tensor, residual, weight[:8]),
        "a residual for all rows": (tensor, residual[:1], weight),
        "an input that is not dense": (gapped(tensor), residual, weight),
        "a residual that is not dense": (tensor, gapped(residual), weight),
        "a weight that is not dense": (tensor, residual, torch.stack([weight, weight], dim=1)[:, 0]),
        "an input between packs": (shifted(tensor), residual, weight),
        "a residual between packs": (tensor, shifted(residual), weight),
        "a weight between packs": (tensor, residual, shifted(weight)),
    }


@pytest.mark.parametrize("why", refused())
def test_what_is_left_to_vllm(why: str, reduce: PcieAllReduce, machine: Machine) -> None:
    assert reduce.all_reduce_add_rms_norm(*refused()[why], EPSILON) is None
    assert fused_plans(machine) == []
    assert set(reduce.calls.values()) == {0}, "the all-reduce that follows is counted by itself"


def test_no_more_rows_than_b12x_has_blocks(machine: Machine, group: Any) -> None:
    """Narrow rows come to that before they come to the oneshot's bytes."""
    reduce = PcieAllReduce(group, CPU, Limits(4096))
    assert reduce.all_reduce_add_rms_norm(*operands(36, 16), EPSILON) is not None
    assert reduce.all_reduce_add_rms_norm(*operands(37, 16), EPSILON) is None
    assert reduce.all_reduce(operands(37, 16)[0]) is not None


def test_another_stream_or_thread_is_vllms(reduce: PcieAllReduce, machine: Machine) -> None:
    given = operands(4, 16)
    found: list[Any] = []
    assert reduce.all_reduce_add_rms_norm(*given, EPSILON) is not None
    with machine.on_stream(2):
        assert reduce.all_reduce_add_rms_norm(*given, EPSILON) is None
    thread = threading.Thread(target=lambda: found.append(reduce.all_reduce_add_rms_norm(*given, EPSILON)))
    thread.start()
    thread.join()
    assert found == [None]
    assert reduce.all_reduce_add_rms_norm(*given, EPSILON) is not None


def test_one_plan_for_all_layers(reduce: PcieAllReduce, machine: Machine) -> None:
    """Weights and epsilons are given with each call."""
    tensor, residual, weight = operands(4, 16)
    for epsilon in (1e-5, 1e-6):
        for factor in (1, 2):
            reduce.all_reduce_add_rms_norm(tensor, residual, weight * factor, epsilon)
    assert len(fused_plans(machine)) == 1
    assert [call["epsilon"] for call in machine.named("fused")] == [1e-5, 1e-5, 1e-6, 1e-6]
    reduce.all_reduce_add_rms_norm(*operands(5, 16), EPSILON)
    assert len(fused_plans(machine)) == 2


def test_a_plan_of_the_sum_is_none_of_the_fused_call(reduce: PcieAllReduce, machine: Machine, scopes: Any) -> None:
    given = operands(4, 16)
    assert reduce.all_reduce(given[0]) is not None
    with capture(scopes), machine.on_stream(5):
        with machine.captured():
            assert reduce.all_reduce_add_rms_norm(*given, EPSILON) is None
        assert reduce.all_reduce_add_rms_norm(*given, EPSILON) is not None, "the capture's warm-up"
        with machine.captured():
            assert reduce.all_reduce_add_rms_norm(*given, EPSILON) is not None
    assert reduce.all_reduce_add_rms_norm(*operands(5, 16), EPSILON) is None, "captures are over"


@pytest.mark.parametrize(("width", "oneshot_bytes", "rows"), [(64, 1024, 4), (16, 4096, 36)])
def test_plans_for_all_rows_are_made_ahead(
    width: int, oneshot_bytes: int, rows: int, machine: Machine, group: Any, scopes: Any
) -> None:
    reduce = PcieAllReduce(group, CPU, Limits(oneshot_bytes))
    reduce.join_captures()
    reduce.prepare_rows(width, torch.float32, fused=True)
    assert [len(plan.query["call"]["inp"]) for plan in fused_plans(machine)] == list(range(1, rows + 1))
    with capture(scopes), machine.on_stream(5), machine.captured():
        for count in range(1, rows + 1):
            assert reduce.all_reduce_add_rms_norm(*operands(count, width), EPSILON) is not None
    assert len(fused_plans(machine)) == rows


def test_none_is_made_ahead_for_a_pass_that_is_off(reduce: PcieAllReduce, machine: Machine) -> None:
    reduce.prepare_rows(64, torch.float32)
    assert fused_plans(machine) == []


@dataclass
class Config:
    """Of an engine with a model."""

    fuse: bool | None = True
    mode: CompilationMode = CompilationMode.VLLM_COMPILE
    additional_config: Any = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model_config = SimpleNamespace(get_hidden_size=lambda: 64, dtype=torch.float32)
        self.compilation_config = SimpleNamespace(
            mode=self.mode, pass_config=SimpleNamespace(fuse_allreduce_rms=self.fuse)
        )


@pytest.mark.parametrize(
    ("config", "fused"),
    [
        (Config(), True),
        (Config(additional_config="hashed by itself"), True),
        (Config(fuse=False), False),
        (Config(fuse=None), False),
        (Config(mode=CompilationMode.NONE), False),
        (None, False),
    ],
)
def test_an_engine_with_the_pass(
    config: Config | None, fused: bool, collectives: Any, machine: Machine, group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Has its plans ahead, and compiled graphs of its own."""
    monkeypatch.setattr(collectives, "get_current_vllm_config_or_none", lambda: config)
    monkeypatch.setattr(collectives, "_on_cuda", lambda device: True)
    monkeypatch.setattr(collectives, "made_together", lambda name, group, device, make, *rest: make())
    given = SimpleNamespace(unique_name="tp:0", world_size=2, device=CPU, cpu_group=group)
    collectives.attach_pcie_all_reduce(given)
    assert bool(fused_plans(machine)) == fused
    if config is not None and isinstance(config.additional_config, dict):
        assert bool(config.additional_config) == fused


def test_an_engine_without_pcie_keeps_its_compiled_graphs(collectives: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config()
    monkeypatch.setattr(collectives, "get_current_vllm_config_or_none", lambda: config)
    monkeypatch.setattr(collectives, "_on_cuda", lambda device: True)
    monkeypatch.setattr(collectives, "made_together", lambda *args: None)
    given = SimpleNamespace(unique_name="tp:0", world_size=2, device=CPU, cpu_group=None)
    collectives.attach_pcie_all_reduce(given)
    assert config.additional_config == {}
