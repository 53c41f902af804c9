"""The DMA ring in every wire mode: what it carries, how exactly, and what it refuses."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from operations import normal
from surfaces import prepared_plan, surfaces

FLAGS_BYTES = 256 * 128
BLOCK = 128
GATHER_MODES = ("ag", "i8", "mx")
MODES = ("", *GATHER_MODES, "ring", "i8_ring", "mx_ring", "a2a", "i8_a2a", "mx_a2a")
BF16 = torch.bfloat16


def align(size: int) -> int:
    return -(-size // 256) * 256


def widths(max_bytes: int, world: int) -> tuple[int, int]:
    """Bytes of a bf16 shard's slot, and of a compressed one's: a byte an element, four for each 128 elements."""
    elements = max_bytes // 2 // world
    return align(-(-max_bytes // world)), align(elements + elements // BLOCK * 4)


def arithmetic(mode: str, max_bytes: int, world: int, slotted: bool) -> tuple[int, int]:
    """Bytes of the slab and of the stage, as they should be."""
    full, narrow = widths(max_bytes, world)
    hops = world - 1
    if not slotted or not mode:
        return FLAGS_BYTES + 2 * hops * full, world * narrow if mode else 0
    if mode in GATHER_MODES:
        return FLAGS_BYTES + hops * (full + narrow), narrow
    return FLAGS_BYTES + 2 * hops * narrow, world * narrow


def carried(mode: str, max_bytes: int, world: int, elements: int, dtype: torch.dtype) -> tuple[bool, bool]:
    """Whether an input goes compressed, and whether a ring with slots by wire mode takes it."""
    shard = elements // world
    compressed = bool(mode) and dtype == BF16 and shard % BLOCK == 0
    return compressed, not mode or compressed or shard * dtype.itemsize <= widths(max_bytes, world)[1]


def inputs(max_bytes: int, world: int) -> list[tuple[str, int, torch.dtype]]:
    """Label, elements and dtype; elements are multiples of 8 W."""
    step, narrow = 8 * world, widths(max_bytes, world)[1]
    edge = narrow // 2 // 8 * 8 * world
    return [
        ("largest", max_bytes // 2, BF16),
        ("blocks-3", 3 * BLOCK * world, BF16),
        ("blocks-odd", (max_bytes // 4 // world // BLOCK | 1) * BLOCK * world, BF16),
        ("largest-uneven", max_bytes // 2 - step, BF16),
        ("uneven-5", 5 * step, BF16),
        ("uneven-edge", edge - step if edge // world % BLOCK == 0 else edge, BF16),
        ("largest", max_bytes // 2, torch.float16),
        ("edge", edge, torch.float16),
        ("edge-over", edge + step, torch.float16),
        ("largest", max_bytes // 4, torch.float32),
        ("small", 100 * step, torch.float32),
    ]


def _spread(values: torch.Tensor) -> torch.Tensor:
    """For each element, the largest magnitude of its block."""
    return values.view(-1, BLOCK).amax(dim=1, keepdim=True).expand(-1, BLOCK).reshape(-1)


def _rounding(magnitude: torch.Tensor, mode: str) -> torch.Tensor:
    """Greatest error of one quantisation of values of at most this magnitude.

    int8: half a step of the block's largest / 127. E4M3 has 3 bits of mantissa, so 2^-4 of a normal value and half of
    2^-9 of the scale below; the scale is the block's largest / 448, in mx rounded up to a power of two.
    """
    largest = _spread(magnitude)
    if mode.startswith("i8"):
        return largest / 254 * 1.001
    return magnitude * 2.0**-4 * 1.001 + largest * (2.0**-9 / 448)


def bound(parts: list[torch.Tensor], dtype: torch.dtype, mode: str, compressed: bool) -> torch.Tensor:
    """Greatest error of each element of the sum of two inputs, from the roundings on its way."""
    whole, total = torch.stack([part.abs() for part in parts]).sum(dim=0), torch.stack(parts).sum(dim=0).abs()
    stored = whole * (torch.finfo(dtype).eps if dtype != BF16 else 2.0**-7)
    if not compressed:
        return stored + 1e-30
    before = torch.zeros_like(whole)
    if mode not in GATHER_MODES:
        before = torch.stack([_rounding(part.abs(), mode) for part in parts]).sum(dim=0)
    return before + _rounding(total + before + stored, mode) + stored + 1e-30


def run_ring(context: Any) -> None:
    max_bytes = (2 if context.reduced else 36) << 20
    # The first ring loads kernels; it is not measured.
    _closed(context, _made(context, "", max_bytes)[0])
    for mode in MODES:
        context.machine.settle()
        context.meet()
        before = context.machine.free_bytes()
        ring, plan = _made(context, mode, max_bytes)
        context.machine.settle()
        slab, stage = arithmetic(mode, max_bytes, context.world, surfaces().slotted)
        found = 0 if ring._fp8_stage is None else int(ring._fp8_stage.numel())
        context.row(
            "bytes", mode=mode or "bf16", free_drop_bytes=before - context.machine.free_bytes(), slab_bytes=slab,
            stage_bytes=found, stage_arithmetic_bytes=stage, failed=found != stage,
        )  # fmt: skip
        for label, elements, dtype in inputs(max_bytes, context.world):
            _one(context, ring, plan, (mode, max_bytes), (f"{label}-{str(dtype)[6:]}", elements, dtype))
        _closed(context, ring)
        del ring, plan


def _made(context: Any, mode: str, max_bytes: int) -> tuple[Any, Any]:
    ring = surfaces().dma.PCIeDmaAllReduce(
        exchange_group=context.exchange, device=context.device, max_bytes=max_bytes, fp8=mode
    )
    # Its plan takes every shape.
    return ring, prepared_plan(ring, "DmaAllReduce.all_reduce", {}) if surfaces().planned else None


def _closed(context: Any, ring: Any) -> None:
    context.machine.sync()
    context.meet()
    ring.close()
    context.meet()


def _one(
    context: Any, ring: Any, plan: Any, made: tuple[str, int], given: tuple[str, int, torch.dtype]
) -> None:  # fmt: skip
    (mode, max_bytes), (label, elements, dtype) = made, given
    compressed, fits = carried(mode, max_bytes, context.world, elements, dtype)
    wanted = fits or not surfaces().slotted
    name, row = f"{mode or 'bf16'}-{label}", {"mode": mode or "bf16", "elements": elements, "compressed": compressed}
    out = torch.zeros(elements, dtype=dtype, device=context.device)
    more = {} if plan is None else {"plan": plan}
    worst, ratio = 0.0, 0.0
    for seed in (1, 2):
        parts = [normal(context.device, 5000 * seed + rank, (elements,), dtype) for rank in range(context.world)]
        accepted = ring.should_allreduce(parts[context.rank])
        if accepted != wanted:
            context.row(name, **row, accepted=accepted, wanted_accepted=wanted, failed=True)
            return
        if not accepted:
            _refused(context, ring, parts[context.rank], out, more, name, row)
            return
        ring.all_reduce(parts[context.rank], out=out, **more)
        context.machine.sync()
        floats = [part.float() for part in parts]
        error = (out.float() - torch.stack(floats).sum(dim=0)).abs().nan_to_num(float("inf"), float("inf"))
        worst = max(worst, float(error.max()))
        ratio = max(ratio, float((error / bound(floats, dtype, mode, compressed)).max()))
    digest = hashlib.sha256(out.view(torch.uint8).cpu().numpy().tobytes()).hexdigest()
    identical = len(set(context.everyones(digest))) == 1
    context.row(
        name, **row, accepted=True, max_abs_error=worst, error_to_bound_ratio=ratio, ranks_identical=identical,
        failed=ratio > 1 or not identical,
    )  # fmt: skip


def _contents(context: Any, ring: Any, mode: str, max_bytes: int) -> torch.Tensor:
    """This rank's slab and stage, copied."""
    slab_bytes, _ = arithmetic(mode, max_bytes, context.world, surfaces().slotted)
    copy = torch.empty(slab_bytes, dtype=torch.uint8, device=context.device)
    stream = torch.cuda.current_stream(context.device).cuda_stream if copy.is_cuda else 0
    ring._ipc.cudaMemcpyAsync(copy.data_ptr(), ring._slab.local_ptr, slab_bytes, stream)
    context.machine.sync()
    return torch.cat([copy, ring._fp8_stage])


def _refused(
    context: Any, ring: Any, inp: torch.Tensor, out: torch.Tensor, more: dict[str, Any], name: str,
    row: dict[str, Any],
) -> None:  # fmt: skip
    """A refused input must be an error that writes nothing, on any rank."""
    contents = [_contents(context, ring, row["mode"], ring.max_bytes)]
    context.meet()
    message = ""
    try:
        ring.all_reduce(inp, out=out, **more)
    except ValueError as error:
        message = str(error)
    context.machine.sync()
    context.meet()
    contents.append(_contents(context, ring, row["mode"], ring.max_bytes))
    changed = int((contents[0] != contents[1]).sum()) + int((out != 0).sum())
    context.row(
        name, **row, accepted=False, message=message[:200], changed_bytes=changed, failed=not message or changed > 0
    )
