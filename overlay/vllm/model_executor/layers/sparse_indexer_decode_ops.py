# SPDX-License-Identifier: Apache-2.0
"""What the sparse indexer ops call at decode: rank the step in tiles, if one tile does not hold it.

Both functions return False, having done nothing, where a step is one tile: upstream's own path follows.
Otherwise they do all that the op does from there on, and the op returns its buffer.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.sparse_indexer_decode import (
    Candidates,
    ContextParallel,
    DecodeStep,
    rank_in_tiles,
    step_tiles,
)
from vllm.utils.deep_gemm import mqa_logits_mx_inputs

Inputs = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]


def _decode_step(inputs: Inputs, kv_cache: torch.Tensor, metadata: Any, columns: int, *, fp32: bool) -> DecodeStep:
    """The step that the op's metadata describes; ``inputs`` as in :func:`shared_decode_in_tiles`."""
    decode, (q, q_scale, weights) = metadata.decode, inputs
    q_scale, weights = mqa_logits_mx_inputs(q, q_scale, weights)
    return DecodeStep(
        q=q,
        q_scale=q_scale,
        weights=weights,
        kv_cache=kv_cache,
        seq_lens=decode.seq_lens[: q.shape[0]],
        block_table=decode.block_table,
        indices=decode.indices,
        columns=columns,
        max_seq_len=metadata.max_seq_len,
        fp32=fp32,
    )


def shared_decode_in_tiles(
    inputs: Inputs,
    kv_cache: torch.Tensor,
    metadata: Any,
    columns: int,
    topk_buffer: torch.Tensor,
    topk_tokens: int,
    topk_backend: str,
    *,
    fp32: bool,
    parallel: ContextParallel,
    candidates: Candidates | None,
    padded: bool,
) -> bool:
    """Decode of the shared op (``vllm::sparse_attn_indexer``).

    Args:
        inputs: q [units, next_n, heads, head_dim] as the kernel takes it, its scales or None, weights [rows, heads].
        kv_cache: the index cache in the kernel's view.
        metadata: the layer's ``DeepseekV32IndexerMetadata``.
        columns: width of the logits.
        topk_buffer: int32 [tokens, at least topk_tokens]; its first rows are written.
        fp32: whether BF16 logits are copied to FP32.
        padded: whether requests were padded to ``next_n`` rows, which are taken out again.
    """
    q, decode = inputs[0], metadata.decode
    ranges = step_tiles(q, columns, varlen=decode.indices is not None, fp32=fp32)
    if len(ranges) == 1:
        return False
    step = _decode_step(inputs, kv_cache, metadata, columns, fp32=fp32)
    topk = topk_buffer[: q.shape[0] * step.next_n, :topk_tokens]
    if decode.global_seq_lens is None:
        parallel = ContextParallel()
    rank_in_tiles(step, ranges, topk, topk_tokens, topk_backend, parallel, candidates)
    if padded:
        _write(topk_buffer, _without_padding(topk, decode, q.shape[0]))
    return True


def kpool_decode_in_tiles(
    inputs: Inputs,
    kv_cache: torch.Tensor,
    metadata: Any,
    columns: int,
    topk_buffer: torch.Tensor,
    topk_tokens: int,
    topk_backend: str,
    *,
    parallel: ContextParallel,
    index_kpool: int,
    positions: torch.Tensor | None,
) -> bool:
    """Decode of the GLM kpool op (``vllm::sparse_attn_indexer_kpool``): ranks pools, then names their tokens.

    Args:
        columns: most pools of a sequence.
        topk_tokens: tokens that a row keeps; ``topk_tokens // index_kpool`` pools are ranked.
        index_kpool: tokens of a pool; 1 for none.
        positions: of the tokens, int [tokens], or None.

    The others are as in :func:`shared_decode_in_tiles`.
    """
    q, decode = inputs[0], metadata.decode
    ranges = step_tiles(q, columns, varlen=decode.indices is not None, fp32=True)
    if len(ranges) == 1:
        return False
    step = _decode_step(inputs, kv_cache, metadata, columns, fp32=True)
    rows, keep = q.shape[0] * step.next_n, topk_tokens // max(index_kpool, 1)
    ranked = topk_buffer[:rows, :keep]
    if index_kpool > 1:
        ranked = torch.empty((rows, keep), dtype=torch.int32, device=topk_buffer.device)
    rank_in_tiles(step, ranges, ranked, keep, topk_backend, parallel)
    if index_kpool > 1:
        ranked = _tokens_of_pools(ranked, metadata, positions, q.shape[0], step.next_n, index_kpool)
    if decode.requires_padding:
        ranked = _without_padding(ranked, decode, q.shape[0])
    _write(topk_buffer, ranked)
    return True


def _tokens_of_pools(
    pools: torch.Tensor, metadata: Any, positions: torch.Tensor | None, units: int, next_n: int, index_kpool: int
) -> torch.Tensor:
    """Token ids of ranked pools, with the tokens of each row's unfinished pool behind them."""
    from vllm.models.glm5next.nvidia import sparse_indexer as op

    decode = metadata.decode
    if positions is None:
        lens = decode.seq_lens[: pools.shape[0]]
        lens = (lens[:, -1] if lens.ndim == 2 else lens).to(torch.int32)
    else:
        lens = op._decode_topk_seq_lens(
            positions, decode.decode_lens, metadata.num_decode_tokens, units, next_n, decode.requires_padding
        )
    return op.kpool_ops.expand_pools_and_append_tail(pools.to(torch.int64), lens, index_kpool)


def _without_padding(topk: torch.Tensor, decode: Any, units: int) -> torch.Tensor:
    from vllm.v1.attention.ops.common import unpack_seq_triton

    return unpack_seq_triton(topk.reshape(units, -1, topk.shape[-1]), decode.decode_lens)


def _write(buffer: torch.Tensor, topk: torch.Tensor) -> None:
    buffer[: topk.shape[0], : topk.shape[-1]] = topk
