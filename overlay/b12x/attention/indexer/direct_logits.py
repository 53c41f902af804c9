# SPDX-License-Identifier: Apache-2.0
"""Where the direct routes of the indexer put a whole matrix of logits, [rows, tokens] fp32.

In this order: the caller's own tensor; bytes that the plan of a paged binding reserved (``reserve_paged_logits`` and
``paged_logits_k_rows``); a new allocation, within a ceiling. A kernel is compiled for the strides of its output, so an
output has exactly the shape that a call puts out, and is contiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .paged_regions import ABSENT, logits_nbytes

DIRECT_LOGITS_CEILING = 1 << 30
REGION = "paged_logits"
NO_SCORE = float("-inf")


class DirectLogitsTooLarge(ValueError):
    """A call would allocate more bytes of logits than its ceiling."""


def check_logits(given: torch.Tensor | None, rows: int, width: int, device: Any, name: str = "out") -> None:
    """Refuse a caller's output that is not contiguous fp32 [rows, width] on ``device``.

    Raises:
        ValueError: with what was found and wanted.
    """
    if given is None:
        return
    strides = (max(width, 1), 1)
    if (
        given.dtype != torch.float32
        or tuple(given.shape) != (rows, width)
        or given.stride() != strides
        or given.device != device
    ):
        raise ValueError(
            f"{name} is {given.dtype} of shape {tuple(given.shape)} with strides {given.stride()} on {given.device}, "
            f"wanted torch.float32 of shape {(rows, width)} with strides {strides} on {device}, for which the kernel "
            "is compiled; pass such a tensor, or a view of that kind over a larger one"
        )


def check_ceiling(rows: int, width: int, limit: int, ways: str) -> None:
    """Refuse an allocation of [rows, width] over ``limit`` bytes.

    Raises:
        DirectLogitsTooLarge: with its bytes, the ceiling and the ``ways`` out.
    """
    nbytes = logits_nbytes(rows, width)
    if nbytes > limit:
        raise DirectLogitsTooLarge(
            f"logits of shape {(rows, width)} are {nbytes} B, and this call allocates {limit} B at most "
            f"(max_output_bytes); {ways}"
        )


def logits_tensor(
    given: torch.Tensor | None, q: torch.Tensor, width: int, limit: int, *, name: str = "out", more: str = "",
    blank: bool = False,
) -> torch.Tensor:  # fmt: skip
    """The output of a call, fp32 [rows of q, width]: the tensor that was given, or a new one.

    Args:
        limit: bytes that may be allocated.
        name: of the caller's parameter.
        more: another way out of a ceiling, for the error.
        blank: whether it is filled with -inf, else it is as it was.

    Raises:
        ValueError: ``given`` does not fit.
        DirectLogitsTooLarge: nothing was given, and the limit is too low.
    """
    rows = int(q.shape[0])
    check_logits(given, rows, width, q.device, name)
    if given is None:
        check_ceiling(
            rows, width, limit,
            f"pass {name}, a contiguous torch.float32 tensor of that shape, or raise max_output_bytes{more}",
        )  # fmt: skip
        given = torch.empty((rows, width), dtype=torch.float32, device=q.device)
    return blank_from(given, 0) if blank else given


def reserved_bytes(binding: Any) -> int:
    """Bytes of logits that the plan of a paged binding holds; 0 without a binding, or in a plan of another maker."""
    memory = getattr(getattr(binding, "scratch", None), "memory", None)
    if memory is None or memory.offset_of(REGION) == ABSENT:
        return 0
    return next(int(placed.region.nbytes) for placed in memory.placed if placed.region.name == REGION)


def reserved_logits(binding: Any, rows: int, width: int) -> torch.Tensor | None:
    """The plan's bytes as fp32 [rows, width]; None where they are not enough.

    Direct calls over one scratch share them: what a call puts there lives until the next.
    """
    held, nbytes = reserved_bytes(binding), logits_nbytes(rows, width)
    if not held or nbytes > held:
        return None
    scratch = binding.scratch
    slab = scratch.shared_scratch.narrow(0, scratch.memory.offset_of(REGION), nbytes)
    return slab.view(torch.float32).view(rows, width)


def paged_logits_tensor(
    out: torch.Tensor | None, binding: Any, q: torch.Tensor, width: int, limit: int
) -> torch.Tensor:
    """The output of a paged call: the caller's, else the plan's, else a new one; nothing is written to it.

    Raises:
        ValueError, DirectLogitsTooLarge: as :func:`logits_tensor`.
    """
    more = ""
    if out is None and binding is not None:
        out = reserved_logits(binding, int(q.shape[0]), width)
        more = (
            f", or plan with reserve_paged_logits and paged_logits_k_rows (this plan holds {reserved_bytes(binding)} B)"
        )
    return logits_tensor(out, q, width, limit, more=more)


def first_rows(logits: torch.Tensor, rows: int) -> torch.Tensor:
    """The rows that a kernel writes; ``logits`` itself, if these are all."""
    return logits if rows == logits.shape[0] else logits[:rows]


def blank_from(logits: torch.Tensor, row: int) -> torch.Tensor:
    """``logits`` with -inf from ``row`` on."""
    logits[row:].fill_(NO_SCORE)
    return logits


def refuse_beside(out: torch.Tensor | None, tile_logits: Any, binding: Any) -> None:
    """Refuse an output where a contiguous call has another.

    Raises:
        ValueError: the call puts out tiles, or its staged binding has the output.
    """
    other = (
        "tile_logits" if tile_logits is not None
        else "out_kernel of a staged binding" if binding is not None and binding.q_u32 is not None
        else ""
    )  # fmt: skip
    if out is not None and other:
        raise ValueError(f"out beside {other}, wanted one of them; this call writes to {other}, so do not pass out")


def refuse_with_page_scores(out: torch.Tensor | None) -> None:
    """Refuse an output of logits from a call that puts out page scores.

    Raises:
        ValueError: one was given.
    """
    if out is not None:
        raise ValueError("out with PAGE_HEAD_MAX, which has no logits to put out; pass page_scores instead")


def block_maxima(logits: torch.Tensor, heads: int, block_tokens: int) -> torch.Tensor:
    """The largest logit of every block of tokens, [heads, rows, blocks]; the last block may be short.

    Args:
        logits: [rows * heads, tokens] with the heads of a row together; nothing of its size is allocated.
    """
    count, width = logits.shape
    rows, whole = count // heads, width // block_tokens
    blocks = logits[:, : whole * block_tokens].view(rows, heads, whole, block_tokens).amax(dim=3)
    if width % block_tokens:
        rest = logits[:, whole * block_tokens :].amax(dim=1).view(rows, heads, 1)
        blocks = torch.cat((blocks, rest), dim=2)
    return blocks.permute(1, 0, 2)


def reference_logits(
    reference: Callable[..., torch.Tensor], out: torch.Tensor | None, limit: int, *, q_fp8: torch.Tensor,
    kv_fp8: tuple[torch.Tensor, torch.Tensor], **given: Any,
) -> torch.Tensor:  # fmt: skip
    """What the reference scorer puts out, [q rows, keys] fp32, in ``out`` if there is one.

    It makes a matrix of its own, so its ceiling holds either way.

    Raises:
        ValueError, DirectLogitsTooLarge: as :func:`logits_tensor`.
    """
    rows, width = int(q_fp8.shape[0]), int(kv_fp8[0].shape[0])
    check_logits(out, rows, width, q_fp8.device)
    check_ceiling(rows, width, limit, "the reference scorer has no output of the caller's; raise max_output_bytes")
    logits = reference(q_fp8=q_fp8, kv_fp8=kv_fp8, **given)
    return logits if out is None else out.copy_(logits)
