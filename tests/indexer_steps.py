"""Steps of the sparse indexer's decode on a CPU, and the scores of their keys by a plain formula.

All numbers are small integers and fractions of a power of two, so that a score does not depend on the rows scored
beside it.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch

HEADS, DIM, PAGE, K = 2, 32, 64, 8
UNIT_SCALE = 0x7F7F7F7F


def row_bytes(columns: int, *, sm100: bool = False, copy: bool = True) -> int:
    """Bytes of one row's logits, with their FP32 copy on SM100."""
    return decode_stride(columns, sm100) * ((6 if copy else 2) if sm100 else 4)


def decode_stride(columns: int, sm100: bool) -> int:
    split, step = (384, 512) if sm100 else (256, 256)
    return -(-(-(-columns // split) * split) // step) * step


@dataclass(frozen=True)
class Shape:
    """A decode step.

    Attributes:
        row_lens: lengths are [units, next_n], else [units, 1].
        decode_lens: tokens of each request; requests of fewer than ``next_n`` are padded.
        declared: whether the metadata says that requests are padded.
        scores: "distinct", "ties" or "infinite" (half of the keys score -inf).
        lengths: of the rows, inclusive bounds.
    """

    units: int = 37
    next_n: int = 1
    columns: int = 700
    row_lens: bool = True
    varlen: bool = False
    fp4: bool = False
    decode_lens: tuple[int, ...] | None = None
    declared: bool = True
    scores: str = "distinct"
    lengths: tuple[int, int] = (40, 700)
    seed: int = 0

    @property
    def rows(self) -> int:
        return self.units * self.next_n

    @property
    def tokens(self) -> int:
        return self.rows if self.decode_lens is None else sum(self.decode_lens)


@dataclass
class Step:
    """The tensors of a :class:`Shape`."""

    shape: Shape
    q: torch.Tensor
    q_scale: torch.Tensor | None
    weights: torch.Tensor
    kv_cache: torch.Tensor
    decode: Any


def make_step(shape: Shape) -> Step:
    draw = torch.Generator().manual_seed(shape.seed)

    def integers(low: int, high: int, *size: int) -> torch.Tensor:
        return torch.randint(low, high + 1, size, generator=draw, dtype=torch.int32)

    per_request = -(-shape.columns // PAGE)
    pages = per_request + 5
    tokens, tables = shape.tokens, torch.stack([torch.randperm(pages, generator=draw) for _ in range(shape.units)])
    if shape.fp4:
        q, q_scale = integers(0, 3, tokens, HEADS, DIM // 2).to(torch.uint8), integers(1, 2, tokens, HEADS)
        kv = integers(0, 3, pages, PAGE, DIM // 2 + DIM // 32).to(torch.uint8)
    else:
        q, q_scale = integers(-1, 1, tokens, HEADS, DIM).float(), None
        kv = integers(-1, 1, pages, PAGE, DIM + 1).float()
        kv[..., DIM] = 0
        if shape.scores == "distinct":
            kv[..., DIM] = torch.arange(pages * PAGE).view(pages, PAGE) / 4096
        if shape.scores == "infinite":
            kv[..., DIM] = torch.where(integers(0, 1, pages, PAGE) > 0, 0.0, float("-inf"))
    lens = integers(*shape.lengths, shape.units, shape.next_n if shape.row_lens else 1)
    decode_lens = shape.decode_lens or (shape.next_n,) * shape.units
    indexer = importlib.import_module("vllm.v1.attention.backends.mla.indexer")
    decode = indexer.DeepSeekV32IndexerDecodeMetadata(
        block_table=tables[:, :per_request].to(torch.int32), seq_lens=lens,
        decode_lens=torch.tensor(decode_lens, dtype=torch.int32),
        requires_padding=shape.decode_lens is not None and shape.declared, schedule_metadata=torch.tensor([-1]),
        indices=torch.arange(shape.units, dtype=torch.int32) // 3 if shape.varlen else None,
    )  # fmt: skip
    # The rows of a graph's batch size: as many as the padded grid.
    return Step(shape, q, q_scale, integers(1, 3, shape.rows, HEADS).float(), kv, decode)


def row_ends(lens: torch.Tensor, next_n: int) -> torch.Tensor:
    """Length of every row; one length for a request is that of its last row."""
    if lens.shape[1] == next_n:
        return lens.reshape(-1)
    return (lens - next_n + 1 + torch.arange(next_n, dtype=torch.int32)).clamp(min=0).reshape(-1)


def scores_of(q: Any, kv_cache: Any, weights: torch.Tensor, tables: torch.Tensor, columns: int) -> torch.Tensor:
    """FP32 [rows, columns]: (sum over heads of weight x scale x q.k) + the key's own addend."""
    values, scale = q
    units, next_n, heads, dim = values.shape
    assert weights.shape == (units * next_n, heads)
    keys = kv_cache[tables.long()].reshape(units, -1, kv_cache.shape[-1])[:, :columns].float()
    if scale is None:
        scale = torch.full((units, next_n, heads), UNIT_SCALE)
    assert scale.shape == (units, next_n, heads)
    factor = torch.where(scale == UNIT_SCALE, 1, scale).float() * weights.view(units, next_n, heads).float()
    scores = torch.einsum("unhd,unh,ucd->unc", values.float(), factor, keys[..., :dim])
    addend = keys[..., dim] if dim == DIM else torch.zeros(units, columns)
    return (scores + addend[:, None]).reshape(units * next_n, columns)


def pack_seq(x: torch.Tensor, lengths: torch.Tensor, pad_value: float = float("-inf")) -> torch.Tensor:
    packed = x.new_full((len(lengths), int(lengths.max()), *x.shape[1:]), pad_value)
    for row, piece in enumerate(x.split(lengths.tolist())):
        packed[row, : len(piece)] = piece
    return packed


def unpack_seq(packed: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return torch.cat([packed[row, :length] for row, length in enumerate(lengths.tolist())])


def chosen_scores(step: Step, indices: torch.Tensor, *, sm100: bool = False) -> list[list[float]]:
    """The scores that each row chose, sorted; fails on a repeated key and on a fill that is not -1 or not last."""
    shape, decode = step.shape, step.decode
    lens = torch.tensor(shape.decode_lens or (shape.next_n,) * shape.units)
    q, scale = (None if t is None else pack_seq(t, lens, 0) for t in (step.q, step.q_scale))
    scores = scores_of((q, scale), step.kv_cache, step.weights, decode.block_table, shape.columns)
    ends = row_ends(decode.seq_lens, shape.next_n)
    kept = (torch.arange(shape.next_n) < lens[:, None]).reshape(-1)
    found = []
    for row, chosen, end in zip(scores[kept], indices.tolist(), ends[kept].tolist(), strict=True):
        keys = [key for key in chosen if key >= 0]
        assert len(set(keys)) == len(keys) == min(len(chosen), end)
        assert chosen[len(keys) :] == [-1] * (len(chosen) - len(keys))
        row = row.masked_fill(torch.arange(len(row)) >= end, float("-inf"))
        found.append(sorted((row.bfloat16().float() if sm100 else row)[keys].tolist()))
    return found


def sets(indices: torch.Tensor) -> list[list[int]]:
    return [sorted(row) for row in indices.tolist()]
