"""Where a direct call puts its logits: the rules of direct_logits, and the plan's region for them.

Runs on the b12x on the path, on a CPU.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from direct_calls import NO_SCORE, WRONG, Made, bound, module, plan, spans, wrong

ROWS, WIDTH = 3, 320
Q = torch.zeros(ROWS, 1)
GIB = 1 << 30


def direct() -> Any:
    return module("direct_logits")


def test_bytes() -> None:
    assert direct().logits_nbytes(4096, 524288) == 8 * GIB
    assert direct().logits_nbytes(1, 1) == 4
    assert direct().logits_nbytes(0, 64) == direct().logits_nbytes(3, 0) == 0
    assert direct().DIRECT_LOGITS_CEILING == GIB


@pytest.mark.parametrize("given", [torch.zeros(ROWS, WIDTH), torch.zeros(ROWS + 2, WIDTH)[1:-1]])
@pytest.mark.parametrize("blank", [False, True])
def test_a_given_tensor_is_the_output(given: torch.Tensor, blank: bool) -> None:
    given.fill_(7)
    with Made() as made:
        out = direct().logits_tensor(given, Q, WIDTH, 0, blank=blank)
    assert out is given
    assert made.sizes == []
    assert (out == (NO_SCORE if blank else 7)).all()
    whole = given if given._base is None else given._base
    assert blank == bool((whole == NO_SCORE).any())
    assert (whole[[0, -1]] == 0).all() or whole is given


@pytest.mark.parametrize("kind", WRONG)
def test_another_tensor_is_refused(kind: str) -> None:
    given = wrong(ROWS, WIDTH)[kind]
    with pytest.raises(ValueError, match=r"^tensor is ") as caught:
        direct().logits_tensor(given, Q, WIDTH, GIB, name="tensor", blank=True)
    text = str(caught.value)
    assert f"is {given.dtype} of shape {tuple(given.shape)} with strides {given.stride()} on {given.device}" in text
    assert "wanted torch.float32 of shape (3, 320) with strides (320, 1) on cpu" in text
    assert given.device.type == "meta" or not given.to(torch.float32).any()


def test_one_row_of_another_stride_is_refused() -> None:
    """torch calls it contiguous, but a kernel would be compiled again for it."""
    given = torch.zeros(1, WIDTH + 64)[:, :WIDTH]
    assert given.is_contiguous()
    with pytest.raises(ValueError, match=r"strides \(384, 1\) on cpu, wanted .* with strides \(320, 1\)"):
        direct().logits_tensor(given, Q[:1], WIDTH, GIB)


@pytest.mark.parametrize(("rows", "width"), [(0, WIDTH), (3, 0), (0, 0), (1, 1)])
def test_what_torch_makes_is_taken(rows: int, width: int) -> None:
    given = torch.empty(rows, width)
    assert direct().logits_tensor(given, Q[:rows], width, 0) is given
    new = direct().logits_tensor(None, Q[:rows], width, 4)
    assert (new.shape, new.stride()) == (given.shape, given.stride())


@pytest.mark.parametrize("blank", [False, True])
def test_without_one_it_is_allocated(blank: bool) -> None:
    with Made() as made:
        out = direct().logits_tensor(None, Q, WIDTH, ROWS * WIDTH * 4, blank=blank)
    assert (out.shape, out.dtype, out.stride()) == ((ROWS, WIDTH), torch.float32, (WIDTH, 1))
    assert not blank or (out == NO_SCORE).all()
    assert made.sizes == [ROWS * WIDTH * 4]


def test_above_the_ceiling() -> None:
    with Made() as made, pytest.raises(direct().DirectLogitsTooLarge) as caught:
        direct().logits_tensor(None, Q, WIDTH, ROWS * WIDTH * 4 - 1, name="this")
    assert made.sizes == []
    assert isinstance(caught.value, ValueError)
    assert str(caught.value) == (
        "logits of shape (3, 320) are 3840 B, and this call allocates 3839 B at most (max_output_bytes); pass this, a "
        "contiguous torch.float32 tensor of that shape, or raise max_output_bytes"
    )


@pytest.mark.parametrize("mode", ["decode", "prefill"])
@pytest.mark.parametrize("rows", [9, 40])
def test_a_plan_reserves_what_its_caps_say(mode: str, rows: int) -> None:
    """Nothing by default, although the paged caps ask for it: of no tokens."""
    without, reserved = plan(rows, mode), plan(rows, mode, paged_logits_k_rows=WIDTH)
    assert module("scratch").B12XIndexerPagedScratchCaps.reserve_paged_logits is True
    assert "paged_logits" not in spans(without)
    assert plan(rows, mode, reserve_paged_logits=False, paged_logits_k_rows=WIDTH).layout == without.layout
    start, end = spans(reserved)["paged_logits"]
    assert end - start == direct().logits_nbytes(rows, WIDTH) == rows * WIDTH * 4
    assert reserved.layout.nbytes - without.layout.nbytes == -(-(end - start) // 1024) * 1024
    others = [span for name, span in spans(reserved).items() if name != "paged_logits"]
    assert all(end <= one or other <= start for one, other in others)
    assert end <= reserved.layout.nbytes
    assert spans(reserved).keys() - spans(without).keys() == {"paged_logits"}


def test_the_public_caps_reserve_only_when_they_are_told_to() -> None:
    scratch = module("scratch")

    def region(**caps: Any) -> tuple[int, int] | None:
        planned = scratch.plan_indexer_scratch(
            scratch.B12XIndexerScratchCaps(
                device="cpu", source_layout="paged", num_q_heads=32, max_q_rows=9, topk=24, max_page_table_width=64,
                paged_logits_k_rows=WIDTH, **caps,
            )
        )  # fmt: skip
        return spans(planned).get("paged_logits")

    assert region() is None
    start, end = region(reserve_paged_logits=True) or (0, 0)
    assert end - start == 9 * WIDTH * 4


def test_reserved_bytes_are_the_output() -> None:
    """As a matrix of the call's shape, whatever that of the plan."""
    binding = bound(plan(9, paged_logits_k_rows=WIDTH))
    start, end = spans(plan(9, paged_logits_k_rows=WIDTH))["paged_logits"]
    assert direct().reserved_bytes(binding) == end - start
    storage = binding.scratch.shared_scratch.zero_()
    for rows, width in ((9, WIDTH), (1, 9 * WIDTH), (2, 64), (45, 64)):
        q = torch.zeros(rows, 1)
        with Made() as made:
            out = direct().paged_logits_tensor(None, binding, q, width, 0)
        assert made.sizes == []
        assert (out.shape, out.dtype, out.stride()) == ((rows, width), torch.float32, (width, 1))
        assert out.data_ptr() - storage.data_ptr() == start
        out.fill_(1)
        written = storage.view(torch.float32).nonzero().flatten() * 4
        assert (int(written[0]), int(written[-1]) + 4) == (start, start + rows * width * 4)
        out.zero_()


@pytest.mark.parametrize(("rows", "width"), [(9, WIDTH + 1), (10, WIDTH), (46, 64)])
def test_too_few_reserved_bytes_are_as_none(rows: int, width: int) -> None:
    binding, q = bound(plan(9, paged_logits_k_rows=WIDTH)), torch.zeros(rows, 1)
    assert direct().reserved_logits(binding, rows, width) is None
    with Made() as made:
        out = direct().paged_logits_tensor(None, binding, q, width, GIB)
    assert made.sizes == [rows * width * 4]
    assert out.shape == (rows, width)
    with pytest.raises(direct().DirectLogitsTooLarge, match="or raise max_output_bytes, or plan with ") as caught:
        direct().paged_logits_tensor(None, binding, q, width, rows * width * 4 - 1)
    assert str(caught.value).endswith("reserve_paged_logits and paged_logits_k_rows (this plan holds 11520 B)")


def test_a_plan_without_the_region_reserves_nothing() -> None:
    msa = SimpleNamespace(scratch=SimpleNamespace(memory=None))
    foreign = SimpleNamespace(scratch=object())
    for binding in (bound(plan(9)), msa, foreign, SimpleNamespace(), None):
        assert direct().reserved_bytes(binding) == 0
        assert direct().reserved_logits(binding, 1, 64) is None
        assert direct().paged_logits_tensor(None, binding, Q, WIDTH, GIB).shape == (ROWS, WIDTH)
    with pytest.raises(direct().DirectLogitsTooLarge, match=r"or raise max_output_bytes$"):
        direct().paged_logits_tensor(None, None, Q, WIDTH, 0)
    with pytest.raises(direct().DirectLogitsTooLarge, match=r"\(this plan holds 0 B\)$"):
        direct().paged_logits_tensor(None, foreign, Q, WIDTH, 0)


def test_the_caller_s_tensor_comes_before_the_plan_s() -> None:
    binding, given = bound(plan(9, paged_logits_k_rows=WIDTH)), torch.zeros(ROWS, WIDTH)
    assert direct().paged_logits_tensor(given, binding, Q, WIDTH, 0) is given
    with pytest.raises(ValueError, match=r"^out is torch.float32 of shape \(2, 320\)"):
        direct().paged_logits_tensor(given[:2], binding, Q, WIDTH, GIB)


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("width", [64, 128, 192, 320, 1024])
def test_block_maxima(heads: int, width: int) -> None:
    """As those of a copy that is filled up with -inf, without the copy."""
    generator = torch.Generator().manual_seed(width * heads)
    logits = torch.randn(5 * heads, width, generator=generator)
    logits[logits < -1] = NO_SCORE
    logits[0] = NO_SCORE
    logits[1, width - 1] = float("nan")
    count = -(-width // 128)
    filled = torch.full((5 * heads, count * 128), NO_SCORE)
    filled[:, :width] = logits
    wanted = torch.stack([filled[:, 128 * block : 128 * (block + 1)].amax(dim=1) for block in range(count)], dim=1)
    with Made() as made:
        found = direct().block_maxima(logits, heads, 128)
    assert found.shape == (heads, 5, count)
    for head in range(heads):
        assert torch.equal(found[head].nan_to_num(9), wanted[head::heads].nan_to_num(9))
    assert sum(made.sizes) < logits.nbytes / 8


def test_the_reference_s_logits() -> None:
    """It makes them itself, so its ceiling holds with an output too."""
    kv, calls = (torch.zeros(WIDTH, 128), torch.zeros(WIDTH)), []

    def reference(**given: Any) -> torch.Tensor:
        calls.append(given)
        return torch.ones(ROWS, WIDTH)

    given = {"q_fp8": Q, "kv_fp8": kv, "weights": "w"}
    assert direct().reference_logits(reference, None, ROWS * WIDTH * 4, **given).eq(1).all()
    assert calls == [given]
    out = torch.zeros(ROWS, WIDTH)
    assert direct().reference_logits(reference, out, GIB, **given) is out
    assert out.eq(1).all()
    calls.clear()
    for output in (None, out):
        with pytest.raises(direct().DirectLogitsTooLarge, match=r"no output of the caller's; raise max_output_bytes$"):
            direct().reference_logits(reference, output, ROWS * WIDTH * 4 - 1, **given)
    for kind, output in wrong(ROWS, WIDTH).items():
        with pytest.raises(ValueError, match=r"^out is "):
            direct().reference_logits(reference, output, GIB, **given)
        assert kind == "device" or not output.any()
    assert calls == []
