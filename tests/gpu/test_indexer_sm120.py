"""The paged indexer with its own scorers on Blackwell: calls in chunks of rows, and the fold against the carry.

Runs on the patched b12x of PYTHONPATH, of any version. The order of a top-k is not fixed, so that scores are compared
from the largest on, and bit by bit. Times are printed, and nothing depends on them.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest
from kernel_needs import without_kernels

PAGE, HEADS, DIM, TOPK = 64, 32, 128, 2048
MODE = "B12X_INDEXER_TWO_LEVEL_FOLD"
CONTEXT = 524_288


def _package() -> str:
    """The indexer's package, which has another name before 1.3; empty without a patched b12x."""
    if importlib.util.find_spec("b12x") is None:
        return ""
    names = (f"b12x.attention.{name}" for name in ("dsa_indexer", "nsa_indexer"))
    return next((name for name in names if importlib.util.find_spec(f"{name}.plan_budget")), "")


def _missing() -> str:
    """Why this machine cannot run these tests; empty if it can."""
    if why := without_kernels():
        return why
    import torch

    if torch.cuda.get_device_capability()[0] != 12:
        return "the scorers need compute capability 12.x, and this device has {}.{}".format(
            *torch.cuda.get_device_capability()
        )
    return "" if _package() else "no patched b12x on PYTHONPATH"


pytestmark = [pytest.mark.gpu, pytest.mark.sm120, pytest.mark.skipif(bool(_missing()), reason=_missing() or "runs")]


class Operands:
    """Random queries and keys of ``rows`` queries over ``tokens``, in pages of a random order.

    Attributes:
        table: one row for all with ``shared``, as a prefill's.
    """

    def __init__(self, rows: int, tokens: int, *, shared: bool) -> None:
        import torch

        reference = importlib.import_module(f"{_package()}.reference")
        self.rows, self.pages, self.shared = rows, tokens // PAGE, shared
        generator = torch.Generator("cuda").manual_seed(rows)
        queries = torch.randn((rows, HEADS, DIM), generator=generator, device="cuda")
        self.q = queries.to(torch.float8_e4m3fn)
        self.weights = torch.rand((rows, HEADS), generator=generator, device="cuda")
        keys = torch.randn((tokens, DIM), generator=generator, device="cuda")
        self.cache = reference.pack_index_k_cache_reference(keys)
        order = torch.randperm(self.pages, generator=generator, device="cuda").to(torch.int32)
        self.table = order.expand(rows, self.pages) if shared else order.repeat(rows, 1)
        self.lengths = torch.linspace(tokens // 2, tokens, rows, device="cuda").to(torch.int32)
        self.indices = torch.empty((rows, TOPK), dtype=torch.int32, device="cuda")
        self.scores = torch.empty((rows, TOPK), device="cuda")

    def planned(self, **budget: Any) -> Any:
        """A plan of all rows, bound, with the scratch that it asks for; and its bytes."""
        import torch

        scratch = importlib.import_module(f"{_package()}.scratch")
        budgets = importlib.import_module(f"{_package()}.plan_budget")
        caps = scratch.B12XIndexerScratchCaps(
            device=self.q.device, source_layout="paged", num_q_heads=HEADS, topk=TOPK, page_size=PAGE,
            max_q_rows=self.rows, max_page_table_width=self.pages, mode="prefill" if self.shared else "decode",
            shared_page_table=self.shared, plan_budget=budgets.Budget(**budget),
        )  # fmt: skip
        plan = scratch.plan_indexer_scratch(caps)
        (spec,) = plan.scratch_specs()
        binding = plan.bind(
            scratch=torch.empty(spec.shape, dtype=spec.dtype, device=self.q.device),
            real_page_table=self.table, cache_seqlens_int32=self.lengths, shared_page_table=self.shared,
        )  # fmt: skip
        return binding, int(spec.shape[0])

    def call(self, binding: Any) -> Any:
        """Scores of each row, the largest first."""
        paged = importlib.import_module(f"{_package()}.paged")
        paged.index_topk_fp8(
            q_fp8=self.q, weights=self.weights, index_k_cache=self.cache, binding=binding, topk=TOPK,
            out_indices=self.indices, out_scores=self.scores,
        )  # fmt: skip
        return self.scores.sort(1, descending=True).values


def milliseconds(operands: Operands, binding: Any, calls: int = 20) -> float:
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    operands.call(binding)
    begin.record()
    for _ in range(calls):
        operands.call(binding)
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / calls


def test_chunks_of_rows_have_the_scores_of_whole_calls() -> None:
    import torch

    operands = Operands(3072, 65_536, shared=True)
    whole, nbytes = operands.planned()
    chunks, fewer = operands.planned(plan_bytes=192 << 20)
    assert fewer <= 192 << 20 < nbytes
    assert len(chunks.parts) > 1
    assert torch.equal(operands.call(whole), operands.call(chunks))
    times = [milliseconds(operands, binding) for binding in (whole, chunks)]
    print(f"3,072 rows in {len(chunks.parts)} launches take {times[1] / times[0]:.2f} of the time of one")


@pytest.mark.parametrize("rows", [48, 64])
def test_fold_and_carry_have_the_same_scores(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    import torch

    operands, bindings = Operands(rows, CONTEXT, shared=False), []
    for mode in ("on", "off"):
        monkeypatch.setenv(MODE, mode)
        bindings.append(operands.planned()[0])
    scores = [operands.call(binding) for binding in bindings]
    assert torch.equal(*scores)
    fold, carry = (milliseconds(operands, binding) for binding in bindings)
    print(f"{rows} rows over {CONTEXT:,} tokens: the fold takes {fold / carry:.2f} of the carry's time")


def test_a_prepared_plan_gives_the_scores_of_a_direct_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its fold's launchers are those that were gathered when it was compiled; before 1.3 nothing is prepared."""
    import torch

    api = importlib.import_module(f"{_package()}.api")
    if not hasattr(api, "Binding"):
        pytest.skip("this b12x prepares no plans")
    operands = Operands(48, CONTEXT, shared=False)
    caps = api.Caps(
        device=operands.q.device, num_q_heads=HEADS, max_q_rows=48, max_page_table_width=operands.pages, topk=TOPK
    )
    tensors = {
        "q_fp8": operands.q, "query_weights": operands.weights, "index_k_cache": operands.cache,
        "page_table": operands.table, "cache_lengths": operands.lengths,
        "active_width": torch.full((1,), CONTEXT, dtype=torch.int32, device="cuda"),
        "output_indices": operands.indices, "output_scores": operands.scores,
    }  # fmt: skip
    plan = api.plan(caps, invocation=api.invocation_from_tensors(caps, **tensors))
    scratch = [
        torch.empty(spec.shape, dtype=spec.dtype, device="cuda")
        for spec in api.scratch_specs(plan, device=operands.q.device)
    ]
    api.run(api.bind(plan, scratch=scratch, **tensors))
    prepared = operands.scores.sort(1, descending=True).values
    monkeypatch.setenv(MODE, "off")
    assert torch.equal(prepared, operands.call(operands.planned()[0]))
