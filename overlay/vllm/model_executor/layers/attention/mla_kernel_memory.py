# SPDX-License-Identifier: Apache-2.0
"""What the sparse MLA backends allocate in one ``forward_mqa`` call. Pure, without torch.

Read from vLLM 0.33.0's ``v1/attention/backends/mla`` and, for what the kernels' libraries allocate, from their sources.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm.model_executor.layers.attention.mla_transients import (
    FP32_BYTES,
    INT32_BYTES,
    Kernel,
    MqaCall,
)

FLASHMLA_CACHES = ("fp8_ds_mla", "nvfp4_ds_mla")
# Backends that concatenate the two parts of the query.
PACKING = ("FLASHINFER_MLA_SPARSE", "FLASHINFER_MLA_SPARSE_SM120", "FLASH_ATTN_MLA_SPARSE_FA4")
# FlashMLA's BF16 prefill takes whole groups of heads.
FLASHMLA_HEAD_STEP = 64


@dataclass(frozen=True)
class Backend:
    """What decides a backend's allocations.

    Attributes:
        name: its registered name.
        topk: columns of the shared top-k index buffer.
        cache_dtype: the layer's KV cache format.
        mixed: FlashMLA runs prefill and decode as one FP8 batch (few heads per rank).
        decode_heads: heads that FlashMLA's FP8 kernel is padded to.
        scratch: bytes that the implementation says it needs on top (split accumulators of FlashAttention 3).
    """

    name: str
    topk: int
    cache_dtype: str
    mixed: bool = False
    decode_heads: int = 0
    scratch: int = 0


def kernel_memory(call: MqaCall, backend: Backend) -> Kernel:
    """Bytes of one call over all of ``call.rows``."""
    # Indices of the selected keys as cache slots, and how many are valid.
    slots = ("top-k slots", call.rows * (backend.topk + 1) * INT32_BYTES)
    if backend.name == "FLASHMLA_SPARSE":
        return flashmla(call, backend, slots)
    during = [slots, ("output", call.output), ("lse", call.lse)]
    if backend.name in PACKING and call.world == 1 and not call.quantised:
        during.append(("packed query", call.query(call.heads, call.element_bytes)))
    if backend.scratch:
        during.append(("scratch", backend.scratch))
    return Kernel(tuple(during), call.output)


def flashmla(call: MqaCall, backend: Backend, slots: tuple[str, int]) -> Kernel:
    """FLASHMLA_SPARSE, by cache format.

    BF16: ``flash_mla_sparse_fwd`` returns an output of padded heads, the row maxima and the LSE. FP8, separate
    prefill and decode: all in the shared workspace, which is reserved when the layer is made. FP8, mixed: the query and
    the output padded to the decode kernel's heads, and its split accumulators: its decode API allocates one FP32 output
    and LSE of the whole batch for each of (batches + SM parts) splits, and the batch is one, with one part when its
    rows are more than the SMs.
    """
    if backend.cache_dtype not in FLASHMLA_CACHES:
        heads = -(-call.seen_heads // FLASHMLA_HEAD_STEP) * FLASHMLA_HEAD_STEP
        output = call.rows * heads * call.latent * call.element_bytes
        during = (slots, ("output", output), ("maxima and lse", 2 * call.rows * heads * FP32_BYTES))
        return Kernel(during, output)
    if not backend.mixed:
        return Kernel((slots,), 0)
    heads = max(call.seen_heads, backend.decode_heads)
    output = call.rows * heads * call.latent * call.element_bytes
    during = [slots, ("output", output), ("lse", call.rows * heads * FP32_BYTES)]
    during.append(("split accumulators", 2 * call.rows * heads * (call.latent + 1) * FP32_BYTES))
    if heads == call.seen_heads:
        return Kernel(tuple(during), output)
    padded = call.rows * heads * (call.latent + call.rope) * call.element_bytes
    during.append(("padded query", padded))
    if call.world == 1:
        return Kernel(tuple(during), output)
    after = (slots, ("padded output", output), ("lse", call.rows * heads * FP32_BYTES), ("output", call.output))
    return Kernel(tuple(during), call.output, after)
