"""The direct routes themselves: where their logits go, and that they are what upstream puts out.

Runs on the b12x on the path, on a CPU; the launches are stand-ins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from direct_calls import (
    NO_SCORE,
    PAGE,
    WRONG,
    Kernels,
    bound,
    contiguous_call,
    decode_call,
    kernel_call,
    keys_call,
    module,
    plan,
    scores,
    spans,
    wrong,
)

GIB = 1 << 30


def paged(**given: Any) -> torch.Tensor:
    return module("kernel").run_paged_logits_kernel(**given)


def decode(**given: Any) -> torch.Tensor:
    return module("_impl").paged_decode_logits(**given)


def keys(**given: Any) -> torch.Tensor:
    return module("contiguous_kernel").run_contiguous_logits_kernel(**given)


def contiguous(**given: Any) -> torch.Tensor:
    return module("_impl").contiguous_logits(**given)


# A call, what makes its operands, and what it puts out: its last row is padding where the route allows it.
ENDS = [200, 0, 320]
STARTS, STOPS = [0, 64, 7], [200, 64, 320]
ROUTES: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., dict[str, Any]], torch.Tensor]] = {
    "paged kernel": (paged, lambda pages=5: kernel_call(3, pages, ENDS), scores(3, 320, ENDS)),
    "paged": (decode, lambda pages=5: decode_call(3, pages, ENDS), scores(3, 320, ENDS)),
    "paged, padded": (decode, lambda pages=5: decode_call(5, pages, ENDS), scores(5, 320, ENDS)),
} | {
    name + padded: (call, lambda pages=5, o=operands, r=rows: o(r, 64 * pages, STARTS, STOPS), wanted)
    for name, call, operands in (("contiguous kernel", keys, keys_call), ("contiguous", contiguous, contiguous_call))
    for padded, rows, wanted in (
        ("", 3, scores(3, 320, STOPS, STARTS)), (", padded", 5, scores(5, 320, STOPS, STARTS)),
    )
}  # fmt: skip
each_route = pytest.mark.parametrize("route", ROUTES)


@each_route
def test_without_an_output_one_matrix_is_made(kernels: Kernels, route: str) -> None:
    call, operands, wanted = ROUTES[route]
    out = kernels.run(call, **operands())
    assert torch.equal(out, wanted)
    assert kernels.made.large(3 * 320 * 4) == [wanted.nbytes]
    assert len(kernels.launches) == 1


@each_route
def test_the_output_is_the_tensor_that_was_given(kernels: Kernels, route: str) -> None:
    call, operands, wanted = ROUTES[route]
    given = torch.full_like(wanted, 7)
    assert kernels.run(call, out=given, **operands()) is given
    assert torch.equal(given, wanted)
    assert kernels.made.large(3 * 320 * 4) == []
    assert kernels.run(call, out=given, max_output_bytes=0, **operands()) is given
    assert [launch.logits.data_ptr() for launch in kernels.launches] == [given.data_ptr()]


@each_route
@pytest.mark.parametrize("kind", WRONG)
def test_another_tensor_is_refused_before_any_launch(kernels: Kernels, route: str, kind: str) -> None:
    call, operands, wanted = ROUTES[route]
    given = wrong(*wanted.shape)[kind]
    with pytest.raises(ValueError, match=rf"^out is .*, wanted torch.float32 of shape \({len(wanted)}, 320\)"):
        kernels.run(call, out=given, **operands())
    assert kernels.launches == []
    assert given.device.type == "meta" or not given.to(torch.float32).any()


@each_route
def test_above_the_ceiling_nothing_is_allocated(kernels: Kernels, route: str) -> None:
    call, operands, wanted = ROUTES[route]
    assert torch.equal(kernels.run(call, max_output_bytes=wanted.nbytes, **operands()), wanted)
    with pytest.raises(module("direct_logits").DirectLogitsTooLarge) as caught:
        kernels.run(call, max_output_bytes=wanted.nbytes - 1, **operands())
    assert f"shape ({len(wanted)}, 320) are {wanted.nbytes} B" in str(caught.value)
    assert f"{wanted.nbytes - 1} B at most (max_output_bytes); pass out, " in str(caught.value)
    assert kernels.made.large(3 * 320 * 4) == kernels.launches == []


@each_route
def test_the_kernel_is_the_same_with_an_output_as_without(kernels: Kernels, route: str) -> None:
    """It is compiled once for both, and for padding rows too; for another width it is another."""
    call, operands, wanted = ROUTES[route]
    rows = len(wanted)
    outputs = [{}, {"out": torch.zeros_like(wanted)}, {"out": torch.zeros(rows + 9, 320)[4 : 4 + rows]}]
    unpadded = ROUTES[route.partition(",")[0]][1]
    specs = []
    for given in (*(operands() | output for output in outputs), unpadded(), operands(pages=6)):
        kernels.run(call, **given)
        specs += [launch.spec for launch in kernels.launches]
    first, *others, wider = specs
    assert others == [first] * 3
    assert wider != first


# Calls whose logits are over 1 GiB.
LARGE = {
    "paged kernel": (paged, lambda: kernel_call(1025, 4097, [64] * 1025)),
    "paged": (decode, lambda: decode_call(1025, 4097, [64])),
    "contiguous kernel": (keys, lambda: keys_call(16385, 16385, [0], [64])),
    "contiguous": (contiguous, lambda: contiguous_call(16385, 16385, [0], [64])),
}


@pytest.mark.parametrize("route", LARGE)
def test_the_ceiling_is_one_gib_unless_it_is_said(kernels: Kernels, route: str) -> None:
    call, operands = LARGE[route]
    with pytest.raises(module("direct_logits").DirectLogitsTooLarge, match=f"allocates {GIB} B at most"):
        kernels.run(call, **operands())
    assert kernels.made.large(GIB) == kernels.launches == []


@pytest.mark.parametrize(("rows", "pages"), [(1, 1024), (8, 1024), (9, 1024), (9, 3)])
def test_every_paged_kernel_writes_the_output(kernels: Kernels, rows: int, pages: int) -> None:
    """Of one row, of a few, and of many, with schedules and without."""
    ends = [pages * PAGE - 5 * row for row in range(rows)]
    given, operands = torch.zeros(rows, pages * PAGE), kernel_call(rows, pages, ends)
    assert kernels.run(paged, out=given, **operands) is given
    assert torch.equal(given, scores(rows, pages * PAGE, ends))
    assert torch.equal(kernels.run(paged, **operands), given)


def test_what_a_call_does_not_fill_stays_as_it_was(kernels: Kernels) -> None:
    """Without a fill the paged kernel leaves what it does not write; padding rows are filled all the same."""
    given, wanted = torch.full((5, 320), 7.0), scores(5, 320, ENDS)
    assert kernels.run(decode, out=given, preinitialize_invalid_logits=False, **decode_call(5, 5, ENDS)) is given
    assert torch.equal(given[3:], wanted[3:])
    assert torch.equal(given[:3], torch.where(wanted[:3] == NO_SCORE, 7.0, wanted[:3]))
    kernels.run(paged, out=given.fill_(7), preinitialize_invalid_logits=False, **kernel_call(5, 5, [*ENDS, 0, 0]))
    assert torch.equal(given, torch.where(wanted == NO_SCORE, 7.0, wanted))


def test_the_contiguous_kernel_fills_for_itself(kernels: Kernels) -> None:
    """So nothing is filled before it."""
    given, wanted = torch.full((3, 320), 7.0), scores(3, 320, STOPS, STARTS)
    operands = {"preinitialize_invalid_logits": False, **keys_call(3, 320, STARTS, STOPS)}
    assert kernels.run(keys, out=given, max_output_bytes=0, **operands) is given
    assert torch.equal(given, wanted)
    assert kernels.launches[0].first == 7
    kernels.run(keys, out=given.fill_(7), **keys_call(3, 320, STARTS, STOPS))
    assert kernels.launches[0].first == NO_SCORE
    assert torch.equal(kernels.run(keys, max_output_bytes=wanted.nbytes, **operands), wanted)
    with pytest.raises(module("direct_logits").DirectLogitsTooLarge):
        kernels.run(keys, max_output_bytes=wanted.nbytes - 1, **operands)
    given = torch.full((5, 320), 7.0)
    with pytest.raises(ValueError, match="requires all q rows to be valid"):
        kernels.run(keys, out=given, preinitialize_invalid_logits=False, **keys_call(5, 320, STARTS, STOPS))
    assert given.eq(7).all()


@pytest.mark.parametrize(("rows", "pages", "ends"), [(4, 5, []), (4, 0, [0, 0]), (0, 5, [])])
def test_calls_without_keys_or_rows(kernels: Kernels, rows: int, pages: int, ends: list[int]) -> None:
    given = torch.zeros(rows, pages * PAGE)
    assert kernels.run(decode, out=given, **decode_call(rows, pages, ends)) is given
    assert given.eq(NO_SCORE).all()
    assert torch.equal(kernels.run(decode, **decode_call(rows, pages, ends)), given)
    with pytest.raises(ValueError, match=r"^out is "):
        kernels.run(decode, out=torch.zeros(rows, 65), **decode_call(rows, pages, ends))
    if rows == len(ends) or not pages:
        operands = kernel_call(rows, pages, [0] * rows)
        assert kernels.run(paged, out=given, **operands) is given
        assert kernels.run(paged, **operands).shape == given.shape
        with pytest.raises(ValueError, match=r"^out is "):
            kernels.run(paged, out=torch.zeros(rows, 65), **operands)
    assert kernels.launches == []


def test_many_rows_without_keys_are_under_the_ceiling_too(kernels: Kernels) -> None:
    with pytest.raises(module("direct_logits").DirectLogitsTooLarge, match=r"shape \(4, 320\) are 5120 B"):
        kernels.run(decode, max_output_bytes=5119, **decode_call(4, 5, []))


def test_a_bound_paged_call_runs_as_before(kernels: Kernels) -> None:
    build = module("kernel").build_indexer_paged_logits_kernel_binding
    binding = build(**kernel_call(3, 5, ENDS))
    assert torch.equal(kernels.run(binding.run), scores(3, 320, ENDS))
    given = torch.zeros(3, 320)
    assert kernels.run(paged, binding=binding, out=given) is given
    with pytest.raises(module("direct_logits").DirectLogitsTooLarge):
        kernels.run(build(**kernel_call(1025, 4097, [64] * 1025)).run)


def test_page_scores_have_no_logits(kernels: Kernels) -> None:
    modes = module("kernel")
    given = kernel_call(2, 1024, [64, 64]) | {
        "output_mode": modes.IndexerOutputMode.PAGE_HEAD_MAX, "score_mode": modes.IndexerScoreMode.MSA_BILINEAR,
    }  # fmt: skip
    assert kernels.run(paged, max_output_bytes=0, **given).shape == (1, 2, 1024)
    with pytest.raises(ValueError, match=r"out with PAGE_HEAD_MAX, .* pass page_scores instead"):
        kernels.run(paged, out=torch.zeros(2, 65536), **given)
    assert kernels.launches == []


@pytest.mark.parametrize("mode", ["decode", "prefill"])
@pytest.mark.parametrize("rows", [3, 5])
def test_a_paged_plan_s_bytes_are_used(kernels: Kernels, mode: str, rows: int) -> None:
    planned = plan(9, mode, paged_logits_k_rows=320)
    binding = bound(planned, ends=ENDS)
    out = kernels.run(decode, max_output_bytes=0, **decode_call(rows, 5, ENDS, binding=binding))
    assert torch.equal(out, scores(rows, 320, ENDS))
    start, _ = spans(planned)["paged_logits"]
    assert out.data_ptr() - binding.scratch.shared_scratch.data_ptr() == start
    assert kernels.made.large(3 * 320 * 4) == []
    given = torch.zeros(rows, 320)
    assert kernels.run(decode, out=given, **decode_call(rows, 5, ENDS, binding=binding)) is given
    assert kernels.launches[0].logits.data_ptr() == given.data_ptr()


@pytest.mark.parametrize("tokens", [0, 64])
def test_a_paged_plan_with_too_few_bytes_is_as_without(kernels: Kernels, tokens: int) -> None:
    binding = bound(plan(9, paged_logits_k_rows=tokens), ends=ENDS)
    before = binding.scratch.shared_scratch.clone()
    out = kernels.run(decode, **decode_call(3, 5, ENDS, binding=binding))
    assert torch.equal(out, scores(3, 320, ENDS))
    assert kernels.made.large(3 * 320 * 4) == [out.nbytes]
    assert torch.equal(binding.scratch.shared_scratch, before)
    with pytest.raises(module("direct_logits").DirectLogitsTooLarge, match=rf"holds {9 * tokens * 4} B\)$"):
        kernels.run(decode, max_output_bytes=out.nbytes - 1, **decode_call(3, 5, ENDS, binding=binding))


def test_tiles_are_no_matrix(kernels: Kernels) -> None:
    tiles = torch.zeros(1 << 20)
    operands = {"tile_logits": tiles, **keys_call(3, 320, STARTS, STOPS)}
    assert kernels.run(keys, max_output_bytes=0, **operands) is tiles
    wrapped = contiguous_call(3, 320, STARTS, STOPS, tile_logits=tiles, out=torch.zeros(3, 320))
    for call, given in ((keys, {"out": torch.zeros(3, 320), **operands}), (contiguous, wrapped)):
        with pytest.raises(ValueError, match=r"out beside tile_logits, .* so do not pass out"):
            kernels.run(call, **given)
        assert kernels.launches == []
        assert not given["out"].any()


def test_a_staged_binding_has_its_own_output(kernels: Kernels) -> None:
    there, given = module("contiguous_kernel"), keys_call(3, 320, STARTS, STOPS)
    own, q = torch.full((3, 320), NO_SCORE), given["q_fp8"].view(torch.uint8)
    staged = there.build_indexer_contiguous_logits_kernel_binding(
        **given, q_bytes=q, q_u32=q.view(torch.uint32), weights_kernel=given["weights"],
        k_quant_bytes=given["k_quant"].view(torch.uint8), k_scale_kernel=given["k_scale"],
        k_start_kernel=given["k_start"], k_end_kernel=given["k_end"], out_kernel=own, out_view=own,
    )  # fmt: skip
    assert kernels.run(staged.run) is own
    assert torch.equal(own, scores(3, 320, STOPS, STARTS))
    assert kernels.run(keys, binding=staged, max_output_bytes=0) is own
    with pytest.raises(ValueError, match="out beside out_kernel of a staged binding"):
        kernels.run(keys, binding=staged, out=torch.zeros(3, 320))
    plain = there.build_indexer_contiguous_logits_kernel_binding(**given)
    assert torch.equal(kernels.run(plain.run), own)
    out = torch.zeros(3, 320)
    assert kernels.run(keys, binding=plain, out=out) is out
    assert torch.equal(out, own)


def test_the_reference_of_contiguous_logits(kernels: Kernels) -> None:
    """On the CPU it is all that there is: it puts out the same with an output as without."""
    operands = contiguous_call(5, 320, STARTS, STOPS)
    operands["q_fp8"] = torch.randn(5, 1, 128).to(torch.float8_e4m3fn)
    keys, scales = operands["kv_fp8"]
    operands["kv_fp8"] = (torch.randn(keys.shape).to(torch.float8_e4m3fn), scales)
    wanted, out = contiguous(**operands), torch.zeros(5, 320)
    assert torch.equal(wanted == NO_SCORE, scores(5, 320, STOPS, STARTS) == NO_SCORE)
    assert contiguous(out=out, **operands) is out
    assert torch.equal(out, wanted)
    with pytest.raises(module("direct_logits").DirectLogitsTooLarge, match="reference scorer"):
        contiguous(max_output_bytes=6399, **operands)
    with pytest.raises(ValueError, match=r"^out is "):
        contiguous(out=out[:3], **operands)
