"""The whole call: fold, carry and what is in between give torch's own top-k, from memory that the plan has."""

from __future__ import annotations

import pytest
import torch
from indexer_call import Call, op_module

SUPERTILE, TOPK = 32768, 24
ON, OFF = "on", "off"


def scores_of(rows: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct scores in each row, and lengths from one key to all of them."""
    generator = torch.Generator().manual_seed(rows * tokens)
    scores = torch.stack([torch.randperm(tokens, generator=generator).float() for _ in range(rows)])
    lengths = torch.linspace(1, tokens, rows).to(torch.int32)
    return scores, lengths


def expected(scores: torch.Tensor, lengths: torch.Tensor, topk: int) -> list[set[int]]:
    return [
        set(torch.topk(row[: int(n)], min(topk, int(n))).indices.tolist())
        for row, n in zip(scores, lengths, strict=True)
    ]


def chosen(indices: torch.Tensor) -> list[set[int]]:
    return [set(row[row >= 0].tolist()) for row in indices]


def decode(monkeypatch: pytest.MonkeyPatch, rows: int, tokens: int, mode: str = "auto", **caps: object) -> Call:
    monkeypatch.setenv("B12X_INDEXER_TWO_LEVEL_FOLD", mode)
    return Call(monkeypatch, rows=rows, tokens=tokens, topk=TOPK, mode="decode", route="paged_tiled", **caps)


@pytest.mark.parametrize("tokens", [1000, 32768, 40000, 65536, 70016, 131072])
@pytest.mark.parametrize("rows", [18, 7])
def test_a_decode_call_folds_and_is_exact(monkeypatch: pytest.MonkeyPatch, rows: int, tokens: int) -> None:
    call = decode(monkeypatch, 18, 131072)
    scores, lengths = scores_of(rows, tokens)
    indices, values = call.run(scores, lengths)
    assert chosen(indices) == expected(scores, lengths, TOPK)
    kinds = [kind for kind, _, _ in call.launches]
    if tokens < SUPERTILE:
        assert kinds == ["first"]
    else:
        assert kinds == ["fold"] * -(-tokens // SUPERTILE) + ["finish"]
    assert values is not None
    assert all(
        set(row[best > float("-inf")].tolist()) == wanted
        for row, best, wanted in zip(indices, values, expected(scores, lengths, TOPK), strict=True)
    )
    assert call.allocations.made == []


@pytest.mark.parametrize("rows", [18, 5])
@pytest.mark.parametrize("tokens", [1000, 40000, 131072])
def test_without_a_fold_the_carry_is_exact(monkeypatch: pytest.MonkeyPatch, tokens: int, rows: int) -> None:
    call = decode(monkeypatch, 18, 131072, OFF)
    scores, lengths = scores_of(rows, tokens)
    indices, _ = call.run(scores, lengths)
    assert chosen(indices) == expected(scores, lengths, TOPK)
    assert [kind for kind, _, _ in call.launches] == ["first"] + ["carry"] * (-(-tokens // SUPERTILE) - 1)
    assert call.allocations.made == []


def test_a_prefill_plan_folds_where_its_carry_holds_the_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is reserved for it; few rows fit, many do not, and both are exact."""
    call = Call(monkeypatch, rows=64, tokens=131072, topk=TOPK, mode="prefill", shared_page_table=True)
    for rows, folds in ((64, False), (8, True)):
        scores, lengths = scores_of(rows, 131072)
        indices, _ = call.run(scores, lengths, shared=True)
        assert chosen(indices) == expected(scores, lengths, TOPK)
        assert ("finish" in [kind for kind, _, _ in call.launches]) == folds
        assert call.allocations.made == []


def test_a_width_with_more_slices_than_the_plans_carries(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,048,576 tokens are 32 slices, 1,015,872 are 63."""
    call = decode(monkeypatch, 4, 1 << 20, supertile_k=SUPERTILE)
    scores, lengths = scores_of(4, 1_015_872)
    indices, _ = call.run(scores, lengths)
    assert chosen(indices) == expected(scores, lengths, TOPK)
    assert "finish" not in [kind for kind, _, _ in call.launches]
    assert call.allocations.made == []


def test_the_policy_is_the_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    scores, lengths = scores_of(18, 65536)
    for planned, later, folds in ((ON, OFF, True), (OFF, ON, False)):
        call = decode(monkeypatch, 18, 65536, planned)
        monkeypatch.setenv("B12X_INDEXER_TWO_LEVEL_FOLD", later)
        call.run(scores, lengths)
        assert ("finish" in [kind for kind, _, _ in call.launches]) == folds


def test_physical_slots_are_carried_and_reserve_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logical, physical = (decode(monkeypatch, 18, 131072, output_physical_slots=physical) for physical in (False, True))
    reserved = physical.plan.layout.memory.offset_of("fold")
    assert reserved == op_module("paged_regions").ABSENT
    assert physical.plan.layout.nbytes < logical.plan.layout.nbytes
    scores, lengths = scores_of(18, 131072)
    indices, _ = physical.run(scores, lengths, physical=True)
    assert [kind for kind, _, _ in physical.launches] == ["first", "carry", "carry", "carry"]
    assert chosen(indices - 1000) == expected(scores, lengths, TOPK)
    indices, _ = logical.run(scores, lengths, physical=True)
    assert "finish" not in [kind for kind, _, _ in logical.launches]


def test_outputs_that_the_caller_does_not_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores that nobody wants are not written to the indices that stand in for them."""
    call = decode(monkeypatch, 18, 65536)
    scores, lengths = scores_of(18, 65536)
    for tokens in (1000, 65536):
        indices, values = call.run(scores[:, :tokens].contiguous(), lengths.clamp(max=tokens), out_scores=False)
        assert values is None
        assert chosen(indices) == expected(scores[:, :tokens], lengths.clamp(max=tokens), TOPK)


def test_a_scratch_of_another_maker_carries(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reserved nothing for a fold, so the call allocates nothing either."""
    call = decode(monkeypatch, 18, 131072, own_outputs=True)
    scores, lengths = scores_of(18, 131072)
    monkeypatch.setattr(op_module("scratch"), "with_memory", lambda scratch, layout: scratch)
    indices, _ = call.run(scores, lengths)
    assert "finish" not in [kind for kind, _, _ in call.launches]
    assert chosen(indices) == expected(scores, lengths, TOPK)
    assert call.allocations.made == []


@pytest.mark.parametrize("rows", [18, 20])
@pytest.mark.parametrize("wants_scores", [True, False])
def test_a_prepared_plan_has_every_launcher_that_a_fold_asks_for(
    monkeypatch: pytest.MonkeyPatch, rows: int, wants_scores: bool
) -> None:
    """Keys are the number of slices, and whether scores are put out; before 1.3 nothing is prepared."""
    shapes = op_module("fold_sizes")
    if not hasattr(op_module("api"), "Binding"):
        return
    module = op_module("fold_launchers")
    gathered: dict[object, dict[str, object]] = {}
    monkeypatch.setattr(module, "run_tiled_topk", lambda **given: gathered.update({given["extent_splits"]: given}))
    monkeypatch.setattr(module, "run_row_topk", lambda **given: gathered.update({"row": given}))
    for mode, folds in ((ON, True), (OFF, False)):
        gathered.clear()
        call = decode(monkeypatch, rows, 131072, mode)
        table = torch.zeros((rows, 2048), dtype=torch.int32)
        lengths = torch.ones(rows, dtype=torch.int32)
        binding = call.plan.bind(scratch=call.storage, real_page_table=table, cache_seqlens_int32=lengths)
        outputs = {"output_indices": torch.zeros((rows, TOPK), dtype=torch.int32)}
        outputs["output_scores"] = torch.zeros((rows, TOPK)) if wants_scores else None
        sink: dict[object, object] = {}
        module.gather_fold_launchers(call.plan, binding, outputs, sink)
        asked = {
            slices
            for width in range(1, 2049)
            for slices in shapes.FoldShape(rows, TOPK, width, 64, SUPERTILE // 64).slice_counts()
        }
        assert asked == {1, 2}
        assert set(gathered) == ({*asked, "row"} if folds else set())
        assert all(given["launcher_sink"] is sink for given in gathered.values())
        assert not folds or gathered["row"]["write_values"] == wants_scores
