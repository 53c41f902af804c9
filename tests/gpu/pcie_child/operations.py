"""Collective operations with inputs that every rank can draw, and what must come out.

Each rank draws the inputs of all ranks from one seed, so the references need no communication.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
EPSILON = 1e-6
# Half a unit in the last place of sums below 8 (16 in bf16, where residual and sum may both be rounded).
SUM_TOLERANCE = {torch.float32: 1e-6, torch.float16: 2.0**-8, torch.bfloat16: 2.0**-5}


@dataclass
class Operation:
    """One call of a pool's method, with buffers that stay where they are.

    Attributes:
        draw: from a seed, this rank's inputs and the outputs to expect.
        tolerance: greatest absolute error; None for equal bytes.
    """

    label: str
    method: str
    inputs: Tensors
    outputs: Tensors
    draw: Callable[[int], tuple[Tensors, Tensors]]
    tolerance: float | None
    options: dict[str, Any] = field(default_factory=dict)
    expected: Tensors = field(default_factory=dict)

    @property
    def call(self) -> dict[str, Any]:
        return {**self.inputs, **self.outputs, **self.options}

    @property
    def key(self) -> tuple[object, ...]:
        """Calls with equal keys share a plan."""
        shapes = tuple((name, tuple(t.shape), str(t.dtype)) for name, t in self.inputs.items())
        return (self.method, shapes, tuple(sorted(self.options.items())))

    def refresh(self, seed: int) -> None:
        """New inputs and expectations, in place; outputs are spoiled."""
        inputs, expected = self.draw(seed)
        for name, value in inputs.items():
            _bytes(self.inputs[name]).copy_(_bytes(value))
        for name, value in expected.items():
            if name in self.expected:
                _bytes(self.expected[name]).copy_(_bytes(value))
            else:
                self.expected[name] = value.clone()
        for output in self.outputs.values():
            _bytes(output).fill_(0x7F)

    def mismatches(self) -> torch.Tensor:
        """Elements (bytes, where bytes must be equal) that are not as expected; not-a-number is not."""
        found = []
        for name, output in self.outputs.items():
            expected = self.expected[name]
            if self.tolerance is None:
                found.append((_bytes(output) != _bytes(expected)).sum())
            else:
                found.append((~((output.float() - expected.float()).abs() <= self.tolerance)).sum())
        return torch.stack(found).sum()

    def max_abs_error(self) -> float:
        pairs = [(output.float(), self.expected[name].float()) for name, output in self.outputs.items()]
        errors = [float((output - expected).abs().nan_to_num(math.inf, math.inf).max()) for output, expected in pairs]
        return max(errors)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def normal(device: torch.device, seed: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, device=device, dtype=torch.float32).to(dtype)


def _made(
    label: str, method: str, draw: Callable[[int], tuple[Tensors, Tensors]], outputs: Tensors,
    tolerance: float | None, **options: Any,
) -> Operation:  # fmt: skip
    inputs, _ = draw(0)
    made = Operation(label, method, {n: t.clone() for n, t in inputs.items()}, outputs, draw, tolerance, options)
    made.refresh(0)
    return made


def gather(context: Any, rows: int, heads: int, head_dim: int, dtype: torch.dtype) -> Operation:
    """[rows, heads / W, head_dim] of each rank into [rows, heads, head_dim]: the same bytes, ranks in order."""
    mine = (rows, heads // context.world, head_dim)

    def draw(seed: int) -> tuple[Tensors, Tensors]:
        all_ranks = [normal(context.device, 1000 * seed + r, mine, dtype) for r in range(context.world)]
        whole = torch.cat([_bytes(value) for value in all_ranks], dim=1).view(dtype)
        return {"local_input": all_ranks[context.rank]}, {"out": whole}

    out = torch.empty((rows, heads, head_dim), dtype=dtype, device=context.device)
    return _made(f"gather-{rows}-{str(dtype)[6:]}", "all_gather_heads", draw, {"out": out}, None)


def merged(outputs: torch.Tensor, lses: torch.Tensor, natural: bool) -> torch.Tensor:
    """Attention over all ranks' keys from each rank's part.

    Args:
        outputs: [W, rows, heads, head_dim], each normalised by its rank's own sum of exponentials.
        lses: [W, rows, heads], logarithms of those sums, to base e or 2; -inf where a rank saw no key.

    Returns:
        float32 [rows, heads, head_dim]; zero where no rank saw a key.
    """
    weights = torch.softmax(lses.double() * (1.0 if natural else math.log(2)), dim=0).nan_to_num(0.0)
    return (outputs.double() * weights.unsqueeze(-1)).sum(dim=0).float()


def reduce_scatter(context: Any, rows: int, heads: int, head_dim: int, natural: bool) -> Operation:
    """bf16 [rows, heads, head_dim] and LSE [rows, heads] of each rank into [rows, heads / W, head_dim]."""
    share = heads // context.world
    own = slice(context.rank * share, (context.rank + 1) * share)

    def draw(seed: int) -> tuple[Tensors, Tensors]:
        parts, lses = [], []
        for rank in range(context.world):
            parts.append(normal(context.device, 2000 * seed + rank, (rows, heads, head_dim), torch.bfloat16))
            lse = 3 * normal(context.device, 2000 * seed + 1000 + rank, (rows, heads), torch.float32)
            lse[0, 0] = -math.inf  # nobody saw a key
            if rank == 0:
                lse[0, share] = -math.inf  # one rank did not
            lses.append(lse)
        expected = merged(torch.stack(parts)[:, :, own], torch.stack(lses)[:, :, own], natural)
        return {"partial_output": parts[context.rank], "partial_lse": lses[context.rank]}, {"out": expected}

    out = torch.empty((rows, share, head_dim), dtype=torch.bfloat16, device=context.device)
    label = f"reduce-scatter-{rows}-base-{'e' if natural else '2'}"
    # Weights sum to 1, so outputs stay below 8: half a unit in the last place, and the weights' own error.
    return _made(label, "lse_reduce_scatter", draw, {"out": out}, 0.02, is_lse_base_on_e=natural)


def all_reduce(context: Any, shape: Sequence[int], dtype: torch.dtype) -> Operation:
    def draw(seed: int) -> tuple[Tensors, Tensors]:
        all_ranks = [normal(context.device, 3000 * seed + r, shape, dtype) for r in range(context.world)]
        total = torch.stack([value.double() for value in all_ranks]).sum(dim=0).float()
        return {"inp": all_ranks[context.rank]}, {"out": total}

    out = torch.empty(tuple(shape), dtype=dtype, device=context.device)
    label = f"all-reduce-{'x'.join(map(str, shape))}-{str(dtype)[6:]}"
    return _made(label, "all_reduce", draw, {"out": out}, SUM_TOLERANCE[dtype])


def add_rms_norm(context: Any, rows: int, hidden: int) -> Operation:
    """bf16 [rows, hidden]: the sum over ranks plus a residual, and its RMS norm times a weight."""
    bf16 = torch.bfloat16

    def draw(seed: int) -> tuple[Tensors, Tensors]:
        all_ranks = [normal(context.device, 4000 * seed + r, (rows, hidden), bf16) for r in range(context.world)]
        residual = normal(context.device, 4000 * seed + 2000, (rows, hidden), bf16)
        weight = (1 + 0.1 * normal(context.device, 4000 * seed + 2001, (hidden,), torch.float32)).to(bf16)
        total = torch.stack([value.double() for value in (*all_ranks, residual)]).sum(dim=0)
        scale = (total.square().mean(dim=-1, keepdim=True) + EPSILON).rsqrt()
        expected = {"out": (total * scale * weight.double()).float(), "residual_out": total.float()}
        return {"inp": all_ranks[context.rank], "residual": residual, "weight": weight}, expected

    outputs = {n: torch.empty((rows, hidden), dtype=bf16, device=context.device) for n in ("out", "residual_out")}
    tolerance = 2 * SUM_TOLERANCE[bf16]
    return _made(
        f"add-rms-norm-{rows}", "all_reduce_fused_add_rms_norm", draw, outputs, tolerance, epsilon=EPSILON
    )  # fmt: skip
