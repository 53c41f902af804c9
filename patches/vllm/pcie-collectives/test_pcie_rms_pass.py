"""The compile pass on graphs as Inductor hands them to vLLM, and the operation that it puts there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.ir.ops
from torch import fx
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from vllm.compilation.passes import pass_manager
from vllm.compilation.passes.fusion import pcie_rms_fusion
from vllm.compilation.passes.inductor_pass import CallableInductorPass, pass_context
from vllm.config import CompilationConfig, DeviceConfig, VllmConfig
from vllm.config.compilation import PassConfig
from vllm.config.utils import Range
from vllm.distributed import parallel_state, tensor_model_parallel_all_reduce

NAME, WORLD = "tp:7", 3
WIDTH, EPSILON = 16, 1e-6
NORM = vllm.ir.ops.fused_add_rms_norm
OURS = torch.ops.vllm.neaptide_all_reduce_add_rms_norm.default
Model = Callable[..., Any]


def signed(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """By its sign a norm of the stand-in is told from vLLM's."""
    normed, total = NORM(*args)
    return -normed, total


class Pcie:
    """It takes up to four rows."""

    def __init__(self) -> None:
        self.epsilons: list[float] = []

    def all_reduce_add_rms_norm(
        self, tensor: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        if len(tensor) > 4:
            return None
        self.epsilons.append(epsilon)
        return signed(tensor * WORLD, residual, weight, epsilon)


class Group:
    """Every rank of it has the same input; ``torch.ops.vllm.all_reduce`` comes here, too."""

    world_size, unique_name = WORLD, NAME

    def __init__(self, **collectives: Any) -> None:
        self.device_communicator = SimpleNamespace(**collectives)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.ops.vllm.all_reduce(tensor, group_name=NAME)

    def _all_reduce_out_place(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * WORLD


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    """With PCIe collectives, as the group of tensor parallelism."""
    made = Group(pcie_ar_comm=Pcie())
    monkeypatch.setattr(parallel_state, "_TP", made)
    monkeypatch.setitem(parallel_state._groups, NAME, lambda: made)
    return made


def engine(dtype: torch.dtype = torch.bfloat16, dumps: Path | None = None) -> Any:
    """What a pass reads of a configuration."""
    return SimpleNamespace(
        compilation_config=SimpleNamespace(
            splitting_ops=[], use_inductor_graph_partition=False, pass_config=PassConfig(fuse_allreduce_rms=True)
        ),
        model_config=SimpleNamespace(dtype=dtype),
        device_config=SimpleNamespace(device="cpu"),
        compile_debug_dump_path=lambda: dumps,
    )


def layers(epsilon: float = EPSILON, of: Callable[..., Any] = NORM) -> Model:
    """Two of them, whose last residual nobody reads."""

    def forward(
        attention: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, last_weight: torch.Tensor
    ) -> torch.Tensor:
        hidden, residual = of(tensor_model_parallel_all_reduce(attention), residual, weight, epsilon)
        hidden, _ = of(tensor_model_parallel_all_reduce(torch.relu(hidden)), residual, last_weight, epsilon)
        return hidden

    return forward


def operands(rows: int, dtype: torch.dtype = torch.bfloat16, weights: torch.dtype | None = None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    given = [torch.randn(rows, WIDTH, dtype=dtype) for _ in range(2)]
    return given + [torch.randn(WIDTH, dtype=weights or dtype) for _ in range(2)]


def traced(model: Model, given: list[torch.Tensor]) -> fx.GraphModule:
    """The graph behind AOTAutograd of a model in inference, its number of rows not known."""
    with torch.no_grad():
        graph = make_fx(model, decomposition_table=select_decomp_table(), tracing_mode="symbolic")(*given)
    graph.graph.eliminate_dead_code()
    return graph


def count(graph: fx.GraphModule, target: Any) -> int:
    return sum(node.target == target for node in graph.graph.nodes)


def rewritten(model: Model, given: list[torch.Tensor], config: Any = None) -> tuple[fx.GraphModule, Any]:
    graph = traced(model, given)
    made = pcie_rms_fusion.pcie_rms_fusion_pass(config or engine(given[0].dtype))
    made(graph.graph)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph, made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("epsilon", pcie_rms_fusion.EPSILONS)
def test_both_layers_become_one_operation_each(dtype: torch.dtype, epsilon: float, group: Group) -> None:
    given = operands(4, dtype)
    plain = traced(layers(epsilon), given)
    assert (count(plain, torch.ops.vllm.all_reduce.default), count(plain, NORM.torch_op)) == (2, 2)
    graph, made = rewritten(layers(epsilon), given)
    assert made.matched_count == 2
    assert count(graph, OURS) == 2
    assert (count(graph, torch.ops.vllm.all_reduce.default), count(graph, NORM.torch_op)) == (0, 0)
    graph(*given)
    assert group.device_communicator.pcie_ar_comm.epsilons == [epsilon] * 2


@pytest.mark.parametrize("rows", [4, 5, 100])
def test_a_rewritten_graph_has_the_values_of_the_steps(rows: int, group: Group) -> None:
    """For all sizes of one graph: what is not taken by PCIe, as with 5 rows, is the same two steps."""
    graph, _ = rewritten(layers(), operands(7))
    given = operands(rows)
    pcie = rows <= 4
    assert torch.equal(graph(*given), layers(of=signed if pcie else NORM)(*given))
    assert len(group.device_communicator.pcie_ar_comm.epsilons) == (2 if pcie else 0)


def both_results(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, _: torch.Tensor) -> Any:
    return NORM(tensor_model_parallel_all_reduce(x), residual, weight, EPSILON)


def sum_used_twice(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, _: torch.Tensor) -> Any:
    summed = tensor_model_parallel_all_reduce(x)
    return summed.relu(), *NORM(summed, residual, weight, EPSILON)


def another_epsilon(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, _: torch.Tensor) -> Any:
    return NORM(tensor_model_parallel_all_reduce(x), residual, weight, 1e-4)


def a_part_of_the_width(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, _: torch.Tensor) -> Any:
    return NORM(tensor_model_parallel_all_reduce(x), residual, weight, EPSILON, WIDTH // 2)


def no_weight(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, _: torch.Tensor) -> Any:
    return NORM(tensor_model_parallel_all_reduce(x), residual, None, EPSILON)


def no_sum(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, _: torch.Tensor) -> Any:
    return NORM(x.relu(), residual, weight, EPSILON)


@pytest.mark.parametrize(
    ("model", "weights", "replaced"),
    [
        (both_results, torch.bfloat16, 1),
        (both_results, torch.float32, 0),
        (layers(), torch.float32, 0),
        (sum_used_twice, torch.bfloat16, 0),
        (another_epsilon, torch.bfloat16, 0),
        (a_part_of_the_width, torch.bfloat16, 0),
        (no_weight, torch.bfloat16, 0),
        (no_sum, torch.bfloat16, 0),
    ],
)
def test_what_is_replaced(model: Model, weights: torch.dtype, replaced: int, group: Group) -> None:
    given = operands(8, weights=weights)
    graph, made = rewritten(model, given)
    assert made.matched_count == count(graph, OURS) == replaced
    found, wanted = graph(*given), model(*given)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_a_residual_of_another_dtype_is_left_alone(group: Group) -> None:
    given = operands(8)
    given[1] = given[1].float()
    _, made = rewritten(both_results, given)
    assert made.matched_count == 0


@pytest.mark.parametrize("served", [True, False])
def test_the_operation_gives_new_tensors(served: bool, group: Group) -> None:
    if not served:
        group.device_communicator = SimpleNamespace()
    x, residual, weight, _ = operands(3)
    kept = [tensor.clone() for tensor in (x, residual, weight)]
    normed, total = OURS(x, residual, weight, EPSILON, NAME)
    wanted = NORM(x * WORLD, residual, weight, EPSILON)
    assert torch.equal(normed, -wanted[0] if served else wanted[0])
    assert torch.equal(total, wanted[1])
    assert all(torch.equal(tensor, before) for tensor, before in zip((x, residual, weight), kept, strict=True))
    assert not {x.data_ptr(), residual.data_ptr()} & {normed.data_ptr(), total.data_ptr()}
    torch.library.opcheck(OURS, (x, residual, weight, EPSILON, NAME), test_utils=("test_schema", "test_faketensor"))


class Kernel:
    """vLLM's C kernel works in place."""

    def __init__(self, *, supported: bool = True, takes: bool = True) -> None:
        self.supported, self.supports_args, self.calls = supported, lambda *args: takes, 0

    def impl_fn(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls += 1
        return x.fill_(1), residual.fill_(2)


@pytest.mark.parametrize(
    ("kernel", "priority", "called"),
    [
        (Kernel(), ["native"], 1),
        (Kernel(), [], 1),
        (Kernel(supported=False), ["native"], 0),
        (Kernel(takes=False), ["native"], 0),
        (Kernel(), ["oink", "native"], 0),
    ],
)
def test_what_is_not_taken_is_one_kernel(
    kernel: Kernel, priority: list[str], called: int, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where vLLM has one, and nothing else was chosen; the native form is for Inductor."""
    monkeypatch.setitem(NORM.impls, "vllm_c", kernel)
    monkeypatch.setattr(NORM, "get_priority", lambda: priority)
    x, residual, weight, _ = operands(5)
    kept = x.clone(), residual.clone()
    normed, total = OURS(x, residual, weight, EPSILON, NAME)
    assert kernel.calls == called
    if called:
        assert (normed.unique().tolist(), total.unique().tolist()) == ([1.0], [2.0])
    assert torch.equal(x, kept[0])
    assert torch.equal(residual, kept[1])


def test_it_is_for_all_ranges_and_its_identity_for_its_source(
    group: Group, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = pcie_rms_fusion.pcie_rms_fusion_pass(engine(dumps=tmp_path))
    for compile_range in (Range(1, 1), Range(1, 8192), Range(8193, 65536)):
        assert made.is_applicable_for_range(compile_range)
    (dumped,) = tmp_path.iterdir()
    assert "all_reduce" in dumped.read_text()
    identity = made.uuid()
    assert pcie_rms_fusion.pcie_rms_fusion_pass(engine()).uuid() == identity

    def another(match: Any) -> bool:
        return False

    monkeypatch.setattr(pcie_rms_fusion, "of_one_dtype", another)
    assert made.uuid() != identity


@pytest.fixture
def bare() -> VllmConfig:
    """With the pass, without a model."""
    passes = PassConfig(fuse_allreduce_rms=True)
    return VllmConfig(
        compilation_config=CompilationConfig(pass_config=passes), device_config=DeviceConfig(device="cpu")
    )


@pytest.fixture
def config(bare: VllmConfig) -> VllmConfig:
    object.__setattr__(bare, "model_config", SimpleNamespace(dtype=torch.bfloat16, using_transformers_backend=bool))
    return bare


@pytest.fixture
def upstreams(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """How often vLLM's own pass was made, which makes workspaces."""
    made: list[Any] = []
    monkeypatch.setattr(
        pass_manager, "AllReduceFusionPass", lambda config: made.append(config) or "upstream's", raising=False
    )
    return made


def test_the_manager_has_ours_where_pcie_serves(group: Group, config: VllmConfig, upstreams: list[Any]) -> None:
    manager = pass_manager.PostGradPassManager()
    manager.configure(config)
    assert [type(made).__name__ for made in manager.passes].count("PcieAllReduceRmsNormPass") == 1
    assert upstreams == []
    # It looks vLLM's C operations up.
    manager.fix_functionalization = CallableInductorPass(lambda graph: None, "none")
    given = operands(4)
    graph = traced(layers(), given)
    with pass_context(Range(1, 8192)):
        manager(graph.graph)
        assert isinstance(manager.uuid(), str)
    assert (count(graph, OURS), count(graph, NORM.torch_op)) == (2, 0)
    graph.recompile()
    assert torch.equal(graph(*given), layers(of=signed)(*given))


@pytest.mark.parametrize("collectives", [{"pcie_ar_comm": None}, {}])
def test_without_pcie_the_manager_has_upstreams(
    collectives: dict[str, Any], group: Group, config: VllmConfig, upstreams: list[Any]
) -> None:
    group.device_communicator = SimpleNamespace(**collectives)
    manager = pass_manager.PostGradPassManager()
    manager.configure(config)
    assert "upstream's" in manager.passes
    assert upstreams == [config]
    group.device_communicator = None
    assert pcie_rms_fusion.pcie_rms_fusion_pass(config) is None


def test_without_a_model_the_manager_has_upstreams(group: Group, bare: VllmConfig, upstreams: list[Any]) -> None:
    pass_manager.PostGradPassManager().configure(bare)
    assert upstreams == [bare]


def test_with_the_switch_off_there_is_neither(group: Group, config: VllmConfig, upstreams: list[Any]) -> None:
    config.compilation_config.pass_config.fuse_allreduce_rms = False
    manager = pass_manager.PostGradPassManager()
    manager.configure(config)
    assert [made for made in manager.passes if "AllReduce" in type(made).__name__] == []
    assert upstreams == []
