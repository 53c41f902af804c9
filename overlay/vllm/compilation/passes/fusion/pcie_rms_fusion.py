# SPDX-License-Identifier: Apache-2.0
"""All-reduce, residual add and RMSNorm of a compiled graph as one operation, over PCIe where it takes the payload.

The operation decides when it runs, by size and stream as an all-reduce does; what it leaves are vLLM's own two steps.
So it stands for all sizes of a graph, and a graph is valid with and without PCIe collectives.
"""

from collections.abc import Callable

import torch
import torch._inductor.pattern_matcher as pm
import vllm.ir.ops
from torch import fx
from vllm.compilation.passes.inductor_pass import enable_fake_mode
from vllm.compilation.passes.vllm_inductor_pass import VllmInductorPass, VllmPatternMatcherPass
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group, parallel_state, tensor_model_parallel_all_reduce
from vllm.utils.torch_utils import direct_register_custom_op

# Those of vLLM's own pass: a pattern has its number in it.
EPSILONS = (1e-5, 1e-6)
Tensors = tuple[torch.Tensor, torch.Tensor]
Steps = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Tensors]


def all_reduce_add_rms_norm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float, group_name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The RMSNorm of the group's sum plus ``residual``, and what it is of: two new tensors.

    Args:
        input, residual: [..., width], not written to.
        weight: [width].
        group_name: as ``torch.ops.vllm.all_reduce`` takes it.
    """
    group = parallel_state._groups[group_name]()
    pcie = getattr(getattr(group, "device_communicator", None), "pcie_ar_comm", None)
    fused = None if pcie is None else pcie.all_reduce_add_rms_norm(input, residual, weight, epsilon)
    if fused is not None:
        return fused
    return add_rms_norm(torch.ops.vllm.all_reduce(input, group_name), residual, weight, epsilon)


def add_rms_norm(summed: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float) -> Tensors:
    """vLLM's own add and RMSNorm outside a compiled graph; ``summed`` may be written to.

    Where Inductor compiles, vLLM's choice is the native form, for Inductor to make a kernel of. Here it does not: that
    form would be a dozen kernels with the rows in fp32 between them, and vLLM's C kernel is what it has for this.
    """
    own = vllm.ir.ops.fused_add_rms_norm
    kernel = own.impls.get("vllm_c")
    if kernel is None or not kernel.supported or not set(own.get_priority()) <= {"native"}:
        return own(summed, residual, weight, epsilon)
    if not kernel.supports_args(summed, residual, weight, epsilon):
        return own(summed, residual, weight, epsilon)
    return kernel.impl_fn(summed, residual.clone(), weight, epsilon)


def _shaped_alike(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float, group_name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(input), torch.empty_like(residual)


direct_register_custom_op(
    op_name="neaptide_all_reduce_add_rms_norm", op_func=all_reduce_add_rms_norm, fake_impl=_shaped_alike
)


def steps_of_models(epsilon: float) -> Steps:
    """What is looked for in a graph."""

    def steps(input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Tensors:
        return vllm.ir.ops.fused_add_rms_norm(tensor_model_parallel_all_reduce(input), residual, weight, epsilon)

    return steps


def fused_step(epsilon: float, group_name: str) -> Steps:
    """What it is replaced by."""

    def step(input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Tensors:
        operation = torch.ops.vllm.neaptide_all_reduce_add_rms_norm.default
        return operation(input, residual, weight, epsilon, group_name)

    return step


def without_residual(of: Steps) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """The same where nothing reads the residual any more, as behind the last layer."""

    def normed(input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return of(input, residual, weight)[0]

    return normed


def of_one_dtype(match: pm.Match) -> bool:
    """Whether the matched RMSNorm's three operands are tensors of one dtype; a Gemma weight is fp32."""
    (norm,) = (node for node in match.nodes if node.target == vllm.ir.ops.fused_add_rms_norm.torch_op)
    operands = norm.args[:3]
    return all(isinstance(one, fx.Node) for one in operands) and len({one.meta["val"].dtype for one in operands}) == 1


class PcieAllReduceRmsNormPass(VllmPatternMatcherPass):
    """For every compile range: sizes are told apart when the operation runs."""

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config)
        self.group_name = get_tp_group().unique_name
        self.replacements = pm.PatternMatcherPass(pass_name=self.pass_name)
        self._register()
        self.dump_patterns(config, self.replacements)

    @enable_fake_mode
    def _register(self) -> None:
        rows = torch.empty((4, 32), dtype=self.model_dtype, device=self.device)
        example = [rows, torch.empty_like(rows), rows.new_empty(32)]
        for epsilon in EPSILONS:
            steps, step = steps_of_models(epsilon), fused_step(epsilon, self.group_name)
            for found, put in ((steps, step), (without_residual(steps), without_residual(step))):
                pm.register_replacement(found, put, example, pm.fwd_only, self.replacements, of_one_dtype)

    def uuid(self) -> str:
        """Of all that decides what a graph becomes."""
        patterns = steps_of_models, fused_step, without_residual, of_one_dtype
        return self.hash_source(type(self), *patterns, self.group_name, str(EPSILONS))

    @VllmInductorPass.time_and_log
    def __call__(self, graph: fx.Graph) -> None:
        self.matched_count = self.replacements.apply(graph)
        self.match_table[self.pass_name] += self.matched_count


def pcie_rms_fusion_pass(config: VllmConfig) -> PcieAllReduceRmsNormPass | None:
    """The pass where the all-reduces of tensor parallelism go over PCIe; None where vLLM's own pass is made."""
    communicator = get_tp_group().device_communicator
    if config.model_config is None or getattr(communicator, "pcie_ar_comm", None) is None:
        return None
    return PcieAllReduceRmsNormPass(config)
