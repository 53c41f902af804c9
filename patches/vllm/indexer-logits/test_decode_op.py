"""Decode in row tiles selects what the shared op selects when it scores all rows at once."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from indexer_standins import Call, Device, run
from indexer_steps import K, Shape, Step, chosen_scores, make_step, row_bytes, sets
from vllm_modules import load

RAGGED = (2, 1, 4, 4, 3, 1, 2, 4, 1, 1, 3)
FORMS = {
    "plain": Shape(),
    "flattened": Shape(units=75),
    "native 2": Shape(units=21, next_n=2),
    "native 4": Shape(units=13, next_n=4),
    "native 2, one length a request": Shape(units=21, next_n=2, row_lens=False),
    "varlen": Shape(units=37, varlen=True),
    "varlen, even": Shape(units=48, varlen=True),
    "padded": Shape(units=11, next_n=4, decode_lens=RAGGED),
    "padded, undeclared": Shape(units=11, next_n=4, decode_lens=RAGGED, declared=False),
    "FP4": Shape(fp4=True),
    "FP4, native 2": Shape(units=21, next_n=2, fp4=True),
    "FP4, padded": Shape(units=11, next_n=4, decode_lens=RAGGED, fp4=True),
}
# Units of a tile that the budget allows: tiles of one size, an overlapping last tile, one step.
ALLOWED = (2, 6, 10)
CONTENTS = {
    "distinct": {},
    "ties": {"scores": "ties"},
    "-inf": {"scores": "infinite"},
    "short": {"lengths": (4, 2 * K)},
}


def both(
    step: Step, monkeypatch: pytest.MonkeyPatch, units: int, *, sm100: bool = False, copy: bool = True, **arguments: Any
) -> tuple[torch.Tensor, torch.Tensor, Device, Device]:  # fmt: skip
    """(indices in tiles, indices of the whole step, and their devices); ``units`` that a tile's budget allows."""
    budget = units * step.shape.next_n * row_bytes(step.shape.columns, sm100=sm100, copy=copy)
    tiled, device = run(step, monkeypatch, budget=budget, sm100=sm100, **arguments)
    whole, other = run(step, monkeypatch, budget=1, policy="upstream", sm100=sm100, **arguments)
    assert len(device.calls) > len(other.calls) == 1
    return tiled, whole, device, other


@pytest.mark.parametrize("garbage", [float("nan"), float("inf")])
@pytest.mark.parametrize("units", ALLOWED)
@pytest.mark.parametrize("form", FORMS)
def test_same_keys(form: str, units: int, garbage: float, monkeypatch: pytest.MonkeyPatch) -> None:
    step = make_step(FORMS[form])
    tiled, whole, _, _ = both(step, monkeypatch, units, garbage=garbage)
    assert chosen_scores(step, tiled) == chosen_scores(step, whole)
    assert step.shape.fp4 or sets(tiled) == sets(whole)


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("form", [name for name, shape in FORMS.items() if not shape.fp4])
def test_same_scores(form: str, content: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of equal scores any may be chosen; a row shorter than k is filled with -1."""
    step = make_step(dataclasses.replace(FORMS[form], **CONTENTS[content], seed=1))
    tiled, whole, _, _ = both(step, monkeypatch, 6)
    assert chosen_scores(step, tiled) == chosen_scores(step, whole)


@pytest.mark.parametrize(("backend", "copy"), [("torch", True), ("deep_select", False)])
@pytest.mark.parametrize("content", CONTENTS)
def test_bf16_logits(content: str, backend: str, copy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """SM100 writes BF16 in the varlen form; only deep_select ranks it without an FP32 copy."""
    step = make_step(Shape(varlen=True, **CONTENTS[content]))
    tiled, whole, device, other = both(step, monkeypatch, 6, sm100=True, copy=copy, backend=backend)
    assert chosen_scores(step, tiled, sm100=True) == chosen_scores(step, whole, sm100=True)
    assert {ranked[1] for ranked in device.ranked + other.ranked} == {torch.float32 if copy else torch.bfloat16}


@pytest.mark.parametrize("units", ALLOWED)
@pytest.mark.parametrize("rows", [37, 48])
def test_varlen_tiles_begin_at_even_rows(rows: int, units: int, monkeypatch: pytest.MonkeyPatch) -> None:
    step = make_step(Shape(units=rows, varlen=True))
    _, _, device, _ = both(step, monkeypatch, units)
    for call, (_, _, _, indices, _) in zip(device.calls, device.schedules, strict=True):
        assert call.indices is not None
        assert call.indices.storage_offset() == call.start
        assert call.start % 2 == 0
        assert torch.equal(call.indices, step.decode.indices[call.start : call.start + call.units])
        assert torch.equal(call.indices, indices)


class Blocks:
    """Stand-ins for two-level selection; ``rows`` are those of the blocks that each call was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[tuple[int, int]] = []
        module = load("vllm.model_executor.layers.sparse_attn_indexer")
        monkeypatch.setattr(module, "_select_candidate_blocks", self.select)
        monkeypatch.setattr(module, "_apply_candidate_mask", self.mask)

    def select(
        self, logits: torch.Tensor, starts: None, ends: Any, k: int, size: int, out: torch.Tensor, repeat: int = 1
    ) -> None:
        """The ``k`` blocks with the highest score of each row."""
        self.rows.append((out.storage_offset() // out.stride(0), len(out)))
        ends = ends.repeat_interleave(repeat)
        assert len(ends) == len(logits) == len(out)
        seen = logits.float().masked_fill(torch.arange(logits.shape[1]) >= ends[:, None], float("-inf"))
        seen = torch.nn.functional.pad(seen, (0, -seen.shape[1] % size), value=float("-inf"))
        best = seen.view(len(seen), -1, size).amax(-1).sort(dim=1, descending=True, stable=True)
        out.copy_(torch.where(best.values > float("-inf"), best.indices, -1)[:, :k])

    def mask(
        self, logits: torch.Tensor, starts: None, ends: Any, blocks: torch.Tensor, size: int, repeat: int = 1
    ) -> None:
        """Scores outside of a row's blocks become -inf."""
        self.rows.append((blocks.storage_offset() // blocks.stride(0), len(blocks)))
        assert len(ends) * repeat == len(logits) == len(blocks)
        block = torch.arange(logits.shape[1]) // size
        logits.masked_fill_(~(block[None, :, None] == blocks[:, None]).any(-1), float("-inf"))

    def of(self, calls: list[Call], next_n: int) -> bool:
        """Whether the calls were given the rows of these tiles, and no others."""
        return self.rows == [(call.start * next_n, call.units * next_n) for call in calls]


CANDIDATE_FORMS = ("plain", "native 2", "native 2, one length a request", "varlen", "padded")


@pytest.mark.parametrize("form", CANDIDATE_FORMS)
def test_candidate_blocks_are_published(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tile writes the rows of its own units, and ranks all of its keys."""
    step = make_step(FORMS[form])
    rows, next_n = step.shape.rows, step.shape.next_n
    written, chosen = [], []
    for policy in ("constant_bytes", "upstream"):
        blocks, standin = torch.full((rows + 3, 4), -9, dtype=torch.int32), Blocks(monkeypatch)
        indices, device = run(
            step, monkeypatch, budget=6 * next_n * row_bytes(700), policy=policy, candidate_blocks=blocks,
            candidate_block_size=16, candidate_write=True,
        )  # fmt: skip
        assert standin.of(device.calls, next_n)
        assert (len(device.calls) == 1) == (policy == "upstream")
        written.append(blocks)
        chosen.append(sets(indices))
    assert torch.equal(*written)
    assert (written[0][rows:] == -9).all()
    assert chosen[0] == chosen[1]


@pytest.mark.parametrize("form", CANDIDATE_FORMS)
def test_scores_are_masked_to_candidate_blocks(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = make_step(dataclasses.replace(FORMS[form], lengths=(300, 700)))
    draw, standin = torch.Generator().manual_seed(2), Blocks(monkeypatch)
    blocks = torch.stack([torch.randperm(15, generator=draw)[:4] for _ in range(step.shape.rows)]).to(torch.int32)
    tiled, whole, device, other = both(
        step, monkeypatch, 6, candidate_blocks=blocks, candidate_block_size=16, candidate_write=False
    )
    assert sets(tiled) == sets(whole)
    assert standin.of(device.calls + other.calls, step.shape.next_n)


@pytest.mark.parametrize("interleave", [1, 4])
@pytest.mark.parametrize("units", ALLOWED)
@pytest.mark.parametrize("form", ["plain", "native 2", "varlen", "padded"])
def test_context_parallel_ranks_exchange_once(
    form: str, units: int, interleave: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = make_step(FORMS[form])
    step.decode.global_seq_lens = step.decode.seq_lens * 2
    tiled, whole, device, other = both(
        step, monkeypatch, units, dcp_world_size=2, cp_kv_cache_interleave_size=interleave
    )
    assert sets(tiled) == sets(whole)
    assert device.gathered == other.gathered == [(step.shape.rows, K, 2)]


@pytest.mark.parametrize("sm100", [False, True])
def test_context_parallel_merge_reads_fp32(sm100: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """deep_select ranks FP32, too, where its scores go to another rank."""
    step = make_step(Shape(varlen=True))
    step.decode.global_seq_lens = step.decode.seq_lens * 2
    tiled, whole, device, _ = both(step, monkeypatch, 6, sm100=sm100, backend="deep_select", dcp_world_size=2)
    assert {ranked[1] for ranked in device.ranked} == {torch.float32}
    assert sets(tiled) == sets(whole) or sm100
    assert len(device.gathered) == 1


def test_whole_requests_are_not_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without global lengths this rank holds all keys of its requests, whatever the world's size."""
    tiled, whole, device, other = both(make_step(Shape()), monkeypatch, 6, dcp_world_size=2)
    assert sets(tiled) == sets(whole)
    assert device.gathered == other.gathered == []
