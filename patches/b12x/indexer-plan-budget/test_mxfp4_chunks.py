"""What only the prepared path of 1.5 has: MXFP4 plans within a budget, their calls in chunks, and declarations.

Top-k of MXFP4 calls is 512; of FP8 plans it is 2,048.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from budget_plans import HEADS, MIB, PAGE, assert_topk, budget, bytes_of, fp8_layout, fp8_plan, plans
from mxfp4_call import LAUNCH, ROWS, TOPK, WIDTH, Mxfp4Call, mxfp4_caps, mxfp4_plan

pytestmark = pytest.mark.skipif(not plans.prepared_plans(), reason="this b12x has no prepared path")


@pytest.mark.parametrize("rows", [20, 32, 33, 80, 96])
@pytest.mark.parametrize("shared", [True, False])
def test_a_call_is_exact(monkeypatch: pytest.MonkeyPatch, rows: int, shared: bool) -> None:
    call = Mxfp4Call(monkeypatch, rows, shared=shared)
    found = call.api.run(call.bind())
    assert found is call.operands["output_indices"]
    scores = call.scores.float()
    assert_topk(scores, call.operands["cache_lengths"], TOPK, found, call.operands["output_scores"])
    parts = [(start, min(start + LAUNCH, rows)) for start in range(0, rows, LAUNCH)]
    assert call.launched == [(stage, *part) for part in parts for stage in ("score", "sort")]


def test_without_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Mxfp4Call(monkeypatch, 80)
    found = call.api.run(call.bind(output_scores=None))
    assert_topk(call.scores.float(), call.operands["cache_lengths"], TOPK, found)
    assert (call.operands["output_scores"] == 7).all()


def test_candidates_of_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Mxfp4Call(monkeypatch, 80, max_candidates=WIDTH)
    found = call.api.run(call.bind())
    of_row = WIDTH * torch.arange(80, dtype=torch.int32)[:, None]
    place = (call.operands["candidate_indices"] - of_row).argsort()
    columns = place.gather(1, (found - of_row).long())
    assert_topk(call.scores.float(), call.operands["candidate_lengths"], TOPK, columns)
    assert len(call.launched) == 6


def test_candidates_that_are_put_out(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Mxfp4Call(monkeypatch, 80, candidate_topk_blocks=2048)
    call.api.run(call.bind())
    lengths = call.operands["candidate_output_lengths"]
    assert lengths.tolist() == [0] * 32 + [32] * 32 + [64] * 16
    assert (call.operands["candidate_output"][:, 0] != -7).all()


def test_a_narrower_score_width_is_every_chunk_s(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Mxfp4Call(monkeypatch, 80)
    binding = call.bind(score_width=640).runtime
    assert [part.runtime.scratch["scores"].shape for _, _, part in binding.parts] == [(LAUNCH, 640)] * 3


def test_only_launches_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Mxfp4Call(monkeypatch, 80, candidate_topk_blocks=2048)
    assert call.compiled_rows == {LAUNCH}
    assert (call.state.caps.choice.rows, call.state.caps.choice.call_rows) == (LAUNCH, ROWS)


@pytest.mark.parametrize("stage", ["score", "select"])
def test_a_stage_by_itself_is_refused_for_chunks(monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    call = Mxfp4Call(monkeypatch, 80)
    with pytest.raises(ValueError, match=r"80 rows in launches of 32; call run, .* plan without plan_budget"):
        getattr(call.api, stage)(call.bind())
    assert call.launched == []


def test_stages_of_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Mxfp4Call(monkeypatch, 32)
    binding = call.bind()
    assert torch.equal(call.api.score(binding), call.scores)
    assert_topk(call.scores.float(), call.operands["cache_lengths"], TOPK, call.api.select(binding))


def test_more_rows_than_planned_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"97 rows, wanted 96 or fewer"):
        Mxfp4Call(monkeypatch, 97).bind()


@pytest.mark.parametrize("rows", [79, 96])
@pytest.mark.parametrize(
    "name", ["q_scales", "query_weights", "cache_lengths", "output_indices", "output_scores", "page_table"]
)
def test_operands_of_other_rows_are_refused(monkeypatch: pytest.MonkeyPatch, name: str, rows: int) -> None:
    other = Mxfp4Call(monkeypatch, rows, shared=False).operands[name]
    call = Mxfp4Call(monkeypatch, 80, shared=False)
    with pytest.raises(ValueError, match=f"{name} has {rows} rows, wanted 80"):
        call.bind(**{name: other})


@pytest.mark.parametrize("least", [0, 256])
@pytest.mark.parametrize("plan_bytes", [200 * MIB, 1024 * MIB, 3000 * MIB])
def test_plans_are_bounded(plan_bytes: int, least: int) -> None:
    """Six bytes for each row and token without a budget. Tokens are never halved."""
    if least and plan_bytes < 800 * MIB:
        with pytest.raises(plans.module("plan_budget").BudgetTooSmall, match="in launches of 256 rows"):
            mxfp4_plan(3072, 8192, budget(plan_bytes, 0, least))
        return
    whole, planned = mxfp4_plan(3072, 8192), mxfp4_plan(3072, 8192, budget(plan_bytes, 0, least))
    choice = planned.caps.choice
    assert whole.nbytes == 9_682_563_072
    assert planned.nbytes == choice.nbytes == mxfp4_plan(choice.rows, 8192).nbytes <= plan_bytes
    assert planned.scratch_specs()[0].shape == (planned.nbytes,)
    assert choice.rows % 32 == 0
    assert choice.rows >= max(least, 32)
    (reason,) = choice.reasons
    assert f"{whole.nbytes:,} B -> {planned.nbytes:,} B" in reason


def test_a_plan_that_fits_and_one_without_a_budget_are_as_they_were() -> None:
    whole, fits = mxfp4_plan(64), mxfp4_plan(64, plan_budget=budget(1 << 30))
    assert (whole.views, whole.nbytes, whole.score_kind) == (fits.views, fits.nbytes, fits.score_kind)
    assert fits.caps.choice.reasons == ()
    assert type(whole.caps) is plans.module("api").Caps


@pytest.mark.parametrize("plan_bytes", [1 << 30, 8 << 30, 64 << 30])
def test_what_upstream_refuses_for_its_size_is_planned_in_chunks(plan_bytes: int) -> None:
    """4,096 rows over 1,048,576 tokens: however much there is, its selection addresses less than 2,048 rows."""
    with pytest.raises(ValueError, match="tensor limit"):
        mxfp4_plan(4096, 16384)
    planned = mxfp4_plan(4096, 16384, budget(plan_bytes))
    assert planned.nbytes <= plan_bytes
    assert planned.caps.choice.call_rows == 4096
    assert planned.caps.max_q_rows == planned.caps.choice.rows < 2048


def test_what_upstream_refuses_for_another_reason_stays_refused() -> None:
    caps = mxfp4_caps(64, plan_budget=budget(1 << 30))
    object.__setattr__(caps, "num_q_heads", 24)
    with pytest.raises(ValueError, match="divisor"):
        plans.module("mxfp4").plan_mxfp4(caps)


def test_the_public_plan_says_the_bounded_bytes() -> None:
    for given, nbytes in ((budget(), 9_682_563_072), (budget(1 << 30), 1_008_601_088)):
        (spec,) = plans.module("api").plan(mxfp4_caps(3072, 8192, given)).memory_requirements().scratch
        assert spec.shape == (nbytes,) == (mxfp4_plan(3072, 8192, given).nbytes,)


def test_the_public_fp8_plan_says_the_bounded_bytes() -> None:
    for given, nbytes in ((budget(), 507_667_456), (budget(192 * MIB), 153_170_944)):
        (spec,) = fp8_plan(3072, 8192, "prefill", given).memory_requirements().scratch
        assert spec.shape == (nbytes,)


@pytest.mark.parametrize("mode", ["decode", "prefill"])
def test_a_declaration_has_its_budget_and_none_is_upstream_s_own(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    preparation = plans.module("_preparation")
    bounded = [fp8_plan(96, 1024, mode, budget(8 * MIB, *more)).query for more in ((), (9 * MIB,), (9 * MIB, 32))]
    plain = fp8_plan(96, 1024, mode).query
    monkeypatch.setattr(preparation, "with_budget", lambda operands, caps: operands)
    theirs = fp8_plan(96, 1024, mode).query
    assert plain == theirs
    assert set(plain.operands) == set(preparation._OPERANDS)
    assert len({query.operands for query in (plain, *bounded)}) == 4
    for query in bounded:
        assert replace(query, operands=plain.operands) == plain
        assert {name: query.operands[name] for name in plain.operands} == dict(plain.operands)


@pytest.mark.parametrize("given", [(), (10 << 20,), (1 << 20, 5 << 20, 32)])
def test_the_budget_reaches_the_compiler(given: tuple[int, ...]) -> None:
    """Through what its workers are sent."""
    tuning, wanted = plans.module("_tuning"), budget(*given)
    plan = fp8_plan(96, 1024, "decode", wanted)
    (job,) = plan._compile_jobs(tuning.DsaIndexerConfig(backend="native"), SimpleNamespace(ordinal=0))
    query = tuning.DsaIndexerQuery(**dict(job.args[0]))
    assert plans.module("plan_budget").budget_of(query) == wanted
    assert fp8_layout(plan).layout.nbytes == plans.plan(96, 1024, plan_budget=wanted).layout.nbytes


def chunked(mode: str) -> Any:
    return fp8_plan(ROWS, 1024, mode, budget(bytes_of(LAUNCH, 1024 * PAGE, mode, topk=plans.TOPK), 0, 32))


@pytest.mark.parametrize("mode", ["decode", "prefill"])
def test_the_public_bind_takes_all_planned_rows(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    api, plan = plans.module("api"), chunked(mode)
    layout = fp8_layout(plan)
    state = plans.module("_preparation")._DsaIndexerState(layout, None, {})
    monkeypatch.setattr(api, "require_prepared", lambda plan, component, device=None: state)

    def bound(rows: int) -> Any:
        return api.bind(
            plan, scratch=torch.empty(layout.layout.nbytes, dtype=torch.uint8),
            q_fp8=torch.empty(rows, HEADS, 128, dtype=torch.float8_e4m3fn), query_weights=torch.ones(rows, HEADS),
            index_k_cache=torch.zeros(1, PAGE * 132, dtype=torch.uint8),
            page_table=torch.zeros(rows, 8, dtype=torch.int32), cache_lengths=torch.ones(rows, dtype=torch.int32),
            active_width=torch.ones(1, dtype=torch.int32),
            output_indices=torch.zeros(rows, plans.TOPK, dtype=torch.int32),
        )  # fmt: skip

    assert bound(LAUNCH).runtime.scratch.max_paged_q_rows == LAUNCH
    with pytest.raises(ValueError, match="capacity"):
        bound(ROWS + 1)
    assert [part[:2] for part in bound(ROWS).runtime.parts] == [(0, 32), (32, 64), (64, 96)]


@pytest.mark.parametrize("mode", ["decode", "prefill"])
@pytest.mark.parametrize("wants_scores", [True, False])
def test_launchers_of_a_fold_are_gathered_for_chunks(
    monkeypatch: pytest.MonkeyPatch, mode: str, wants_scores: bool
) -> None:
    """The selection asks for operands of as many rows as one another, though declared are those of the whole call."""
    module, layout, rows = plans.module("fold_launchers"), fp8_layout(chunked(mode)), []
    monkeypatch.setattr(module, "run_tiled_topk", lambda **given: None)

    def selected(**given: Any) -> None:
        operands = ("row_logits", "lengths", "output_values", "output_indices", "output_gather_table")
        rows.append({given[name].shape[0] for name in operands})

    monkeypatch.setattr(module, "run_row_topk", selected)
    binding = layout.bind(
        scratch=torch.empty(layout.layout.nbytes, dtype=torch.uint8), shared_page_table=mode == "prefill",
        real_page_table=torch.zeros(ROWS, 1024, dtype=torch.int32),
        cache_seqlens_int32=torch.ones(ROWS, dtype=torch.int32),
    )  # fmt: skip
    values = {"output_indices": torch.zeros(ROWS, plans.TOPK, dtype=torch.int32)}
    values["output_scores"] = torch.zeros(ROWS, plans.TOPK) if wants_scores else None
    module.gather_fold_launchers(layout, binding, values, {})
    assert layout.layout.memory.folds
    assert [len(counts) for counts in rows] == [1], rows


def test_caps_of_a_caller_s_own_class_have_no_budget() -> None:
    """Upstream takes them here, and so does a plan without a budget."""
    caps = SimpleNamespace(**{name: value for name, value in vars(mxfp4_caps(64)).items() if name != "plan_budget"})
    module = plans.module("plan_budget")
    assert module.mxfp4_within_budget(caps, lambda _: pytest.fail("nothing is planned")) is caps
    operands = {"q_fp8": None}
    assert module.with_budget(operands, caps) is operands
