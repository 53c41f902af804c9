# SPDX-License-Identifier: Apache-2.0
"""How DeepGEMM lays out the sparse indexer's logits, by architecture and release. Pure, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

FP32_BYTES = 4
# DeepGEMM strides rows by whole KiB.
ROW_STRIDE_BYTES = 1024


def round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def round_down(value: int, step: int) -> int:
    return value // step * step


@dataclass(frozen=True)
class LogitsLayout:
    """How DeepGEMM stores MQA logits on one architecture.

    Attributes:
        element_bytes: one logit as the kernel writes it.
        copy_bytes: one logit of the FP32 copy that is alive beside it; 0 if none is made.
        prefill_block: columns a prefill row is rounded up to before its stride is.
        decode_block: the same for a paged row (one KV split).
        prefill_more: columns that DeepGEMM adds to a prefill row before it rounds; 0 where rows start at their own
            first key (vLLM 0.33), one block where a row has a column for every gathered key (before).
    """

    element_bytes: int
    copy_bytes: int
    prefill_block: int
    decode_block: int
    prefill_more: int = 0

    @property
    def live_bytes(self) -> int:
        """Bytes alive for one logit while it is ranked."""
        return self.element_bytes + self.copy_bytes

    @property
    def column_step(self) -> int:
        """Columns in one step of the row stride: 256 of FP32, 512 of BF16."""
        return ROW_STRIDE_BYTES // self.element_bytes

    def prefill_stride(self, columns: int) -> int:
        """Columns that a prefill row of ``columns`` takes."""
        return round_up(round_up(columns + self.prefill_more, self.prefill_block), self.column_step)

    def decode_stride(self, columns: int) -> int:
        """Columns that a paged row of ``columns`` takes."""
        return round_up(round_up(columns, self.decode_block), self.column_step)


@cache
def logits_layout(*, sm100: bool, fp32_copy: bool) -> LogitsLayout:
    """The layout of an architecture.

    Args:
        sm100: whether DeepGEMM's SM100 kernels run. They write BF16; SM90 and SM120 write FP32.
        fp32_copy: whether BF16 logits are copied to FP32 before they are ranked.
    """
    if sm100:
        return LogitsLayout(2, FP32_BYTES if fp32_copy else 0, prefill_block=256, decode_block=384)
    return LogitsLayout(FP32_BYTES, 0, prefill_block=256, decode_block=256)


def gathered_keys_layout() -> LogitsLayout:
    """The layout before vLLM 0.33: FP32 everywhere, and a prefill row has a column for every gathered key."""
    return LogitsLayout(FP32_BYTES, 0, prefill_block=256, decode_block=256, prefill_more=256)
