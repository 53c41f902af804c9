"""Decode in row tiles selects what the GLM kpool op selects when it scores all rows at once."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from indexer_standins import Device, run
from indexer_steps import K, Shape, Step, chosen_scores, make_step, row_bytes, sets
from vllm_modules import load

RAGGED = (2, 1, 4, 4, 3, 1, 2, 4, 1, 1, 3)
FORMS = {
    "plain": Shape(),
    "native 2": Shape(units=21, next_n=2),
    "native 4": Shape(units=13, next_n=4),
    "varlen": Shape(varlen=True),
    "padded": Shape(units=11, next_n=4, decode_lens=RAGGED),
    "FP4": Shape(units=21, next_n=2, fp4=True, lengths=(2, K)),
}
CONTENTS: dict[str, dict[str, Any]] = {
    "ties": {"scores": "ties"},
    "-inf": {"scores": "infinite"},
    "short": {"lengths": (4, 2 * K)},
}


def expand(pools: torch.Tensor, lens: torch.Tensor, size: int) -> torch.Tensor:
    """Tokens of each row's pools, then the tokens behind its last whole pool, -1 where there is none."""
    assert pools.dtype == torch.int64
    assert lens.dtype == torch.int32
    lens = lens.expand(len(pools)) if len(lens) == len(pools) else lens.repeat_interleave(len(pools) // len(lens))
    inside = torch.arange(size)
    tokens = torch.where(pools[..., None] < 0, -1, pools[..., None] * size + inside).flatten(1)
    tail = (lens // size * size)[:, None] + inside[:-1]
    return torch.cat([tokens, torch.where(tail < lens[:, None], tail, -1)], dim=1).to(torch.int32)


def kpool(
    step: Step, monkeypatch: pytest.MonkeyPatch, pool: int, policy: str, *, units: int = 6, sm100: bool = False,
    **arguments: Any,
) -> tuple[torch.Tensor, Device]:  # fmt: skip
    """The op with tiles of ``units``: K keys a row, pools of tokens where ``pool`` is above 1."""
    module = load("vllm.models.glm5next.nvidia.sparse_indexer")
    monkeypatch.setattr(module, "_fill_short_decode_causal_indices", lambda *args: False)
    monkeypatch.setattr(module.kpool_ops, "expand_pools_and_append_tail", expand)
    return run(
        step, monkeypatch, budget=units * step.shape.next_n * row_bytes(step.shape.columns, sm100=sm100), policy=policy,
        which="kpool", k=K * pool, extra_columns=pool - 1, index_kpool=pool, sm100=sm100, **arguments,
    )  # fmt: skip


def both(
    step: Step, monkeypatch: pytest.MonkeyPatch, pool: int, **arguments: Any
) -> tuple[torch.Tensor, torch.Tensor, Device, Device]:
    """(token ids in tiles, of the whole step, and their devices)."""
    tiled, device = kpool(step, monkeypatch, pool, "constant_bytes", **arguments)
    whole, other = kpool(step, monkeypatch, pool, "upstream", **arguments)
    assert len(device.calls) > len(other.calls) == 1
    return tiled, whole, device, other


def positions_of(step: Step, pool: int) -> torch.Tensor:
    """A position of every token, in all phases of a pool."""
    return torch.arange(step.shape.tokens) * 5 + 40 * pool


@pytest.mark.parametrize("garbage", [float("nan"), float("inf")])
@pytest.mark.parametrize("with_positions", [False, True])
@pytest.mark.parametrize("pool", [1, 4])
@pytest.mark.parametrize("form", FORMS)
def test_same_tokens(
    form: str, pool: int, with_positions: bool, garbage: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = make_step(FORMS[form])
    positions = positions_of(step, pool) if with_positions else None
    tiled, whole, _, _ = both(step, monkeypatch, pool, positions=positions, garbage=garbage)
    assert sets(tiled[:, : K * pool]) == sets(whole[:, : K * pool])
    assert torch.equal(tiled[:, K * pool :], whole[:, K * pool :])
    assert tiled.min() >= -1


@pytest.mark.parametrize("units", [2, 10])
@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("pool", [1, 4])
@pytest.mark.parametrize("form", [name for name in FORMS if name != "FP4"])
def test_same_scores(form: str, pool: int, content: str, units: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of pools with equal scores any may be chosen; rows with fewer pools than k are filled with -1."""
    step = make_step(dataclasses.replace(FORMS[form], **CONTENTS[content], seed=1))
    positions = positions_of(step, pool)
    found = both(step, monkeypatch, pool, positions=positions, units=units)[:2]
    # The first token of each pool names it.
    tiled, whole = (indices[:, : K * pool : pool].div(pool, rounding_mode="floor") for indices in found)
    assert chosen_scores(step, tiled) == chosen_scores(step, whole)


@pytest.mark.parametrize("pool", [1, 4])
def test_bf16_logits_are_ranked_as_fp32(pool: int, monkeypatch: pytest.MonkeyPatch) -> None:
    step = make_step(Shape(varlen=True))
    tiled, whole, device, other = both(step, monkeypatch, pool, sm100=True, positions=positions_of(step, pool))
    tiled, whole = (indices[:, : K * pool : pool].div(pool, rounding_mode="floor") for indices in (tiled, whole))
    assert chosen_scores(step, tiled, sm100=True) == chosen_scores(step, whole, sm100=True)
    assert {ranked[1] for ranked in device.ranked + other.ranked} == {torch.float32}


@pytest.mark.parametrize("pool", [1, 4])
def test_tails_follow_each_rows_own_position(pool: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding does not move a token's tail to another request."""
    step = make_step(FORMS["padded"])
    positions = positions_of(step, pool)
    tiled, _, _, _ = both(step, monkeypatch, pool, positions=positions)
    for row, position in zip(tiled.tolist(), positions.tolist(), strict=True):
        tail = [token for token in row[K * pool :] if token >= 0]
        assert tail == list(range((position + 1) // pool * pool, position + 1))


@pytest.mark.parametrize("pool", [1, 4])
@pytest.mark.parametrize("form", ["plain", "native 2", "varlen", "padded"])
def test_context_parallel_ranks_exchange_pools_once(form: str, pool: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks take turns of ``interleave`` tokens, so of ``interleave / pool`` pools."""
    step = make_step(FORMS[form])
    tiled, whole, device, other = both(
        step, monkeypatch, pool, positions=positions_of(step, pool), dcp_world_size=2, cp_kv_cache_interleave_size=8
    )
    assert sets(tiled) == sets(whole)
    assert device.gathered == other.gathered == [(step.shape.rows, K, 2)]


def test_the_backend_is_that_of_the_whole_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile of at most 64 rows would be cooperative by itself."""
    step = make_step(Shape(units=70))
    _, device = run(step, monkeypatch, budget=33 * row_bytes(700), which="kpool", backend="auto", k=512, index_kpool=1)
    assert [ranked[0] for ranked in device.ranked] == ["persistent"] * len(device.calls)
    assert len(device.calls) > 1
