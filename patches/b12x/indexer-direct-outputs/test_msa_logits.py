"""The block scores of MSA where they have to have logits: in one matrix, or in the caller's.

Runs on the b12x on the path, on a CPU; the launches are stand-ins.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from direct_calls import NO_SCORE, PAGE, WRONG, Kernels, module, msa_call, scores, wrong

ENDS = [200, 0, 320]
GIB = 1 << 30


def msa(**given: Any) -> torch.Tensor:
    return module("_impl").msa_paged_decode_block_scores(**given)


def block_scores(rows: int, heads: int, pages: int, ends: list[int]) -> torch.Tensor:
    """What MSA puts out: the largest logit of every block of 128 tokens, [heads, rows, blocks]."""
    blocks = -(-pages * PAGE // 128)
    logits = torch.full((rows * heads, blocks * 128), NO_SCORE)
    logits[: len(ends) * heads, : pages * PAGE] = scores(
        len(ends) * heads, pages * PAGE, [end for end in ends for _ in range(heads)]
    )
    return logits.view(rows, heads, blocks, 128).amax(dim=3).permute(1, 0, 2)


@pytest.mark.parametrize("pages", [1, 4, 5])
@pytest.mark.parametrize(("rows", "heads"), [(3, 4), (5, 4), (3, 1)])
def test_block_scores_have_one_matrix_or_the_caller_s(kernels: Kernels, rows: int, heads: int, pages: int) -> None:
    ends = [min(end, pages * PAGE) for end in ENDS]
    wanted, nbytes = block_scores(rows, heads, pages, ends), 3 * heads * pages * PAGE * 4
    assert torch.equal(kernels.run(msa, **msa_call(rows, heads, pages, ends)), wanted)
    assert kernels.made.large(nbytes) == [nbytes]
    given, blocks = torch.zeros(3 * heads, pages * PAGE), torch.zeros(wanted.shape)
    operands = msa_call(rows, heads, pages, ends, out=blocks, logits_out=given, max_output_bytes=0)
    assert torch.equal(kernels.run(msa, **operands), wanted)
    assert torch.equal(blocks, wanted)
    assert kernels.made.large(nbytes) == []
    assert kernels.launches[0].logits.data_ptr() == given.data_ptr()
    assert torch.equal(given, scores(3 * heads, pages * PAGE, [end for end in ends for _ in range(heads)]))


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_logits_of_block_scores_are_refused(kernels: Kernels, kind: str) -> None:
    given, blocks = wrong(12, 320)[kind], torch.zeros(4, 5, 3)
    with pytest.raises(ValueError, match=r"^logits_out is .*, wanted torch.float32 of shape \(12, 320\)"):
        kernels.run(msa, **msa_call(5, 4, 5, ENDS, out=blocks, logits_out=given))
    assert kernels.launches == []
    assert not blocks.any()
    assert given.device.type == "meta" or not given.to(torch.float32).any()


def test_block_scores_above_the_ceiling(kernels: Kernels) -> None:
    nbytes = 12 * 320 * 4
    kernels.run(msa, **msa_call(5, 4, 5, ENDS, max_output_bytes=nbytes))
    wanted = rf"shape \(12, 320\) are {nbytes} B, .* {nbytes - 1} B at most \(max_output_bytes\); pass logits_out, "
    with pytest.raises(module("direct_logits").DirectLogitsTooLarge, match=wanted):
        kernels.run(msa, **msa_call(5, 4, 5, ENDS, max_output_bytes=nbytes - 1))
    assert kernels.launches == []


def test_page_maxima_need_no_logits(kernels: Kernels) -> None:
    """The scheduled route of MSA has page scores; logits that it is given stay as they are, if they would fit."""
    given = torch.zeros(12, 65536)
    kernels.run(msa, **msa_call(3, 4, 1024, ENDS, max_output_bytes=0))
    kernels.run(msa, **msa_call(3, 4, 1024, ENDS, max_output_bytes=0, logits_out=given))
    assert [launch.logits.shape for launch in kernels.launches] == [(4, 3, 1024)]
    assert not given.any()
    with pytest.raises(ValueError, match=r"^logits_out is "):
        kernels.run(msa, **msa_call(3, 4, 1024, ENDS, logits_out=given[:1]))


def test_the_selection_of_blocks_hands_its_logits_on(kernels: Kernels) -> None:
    select = module("_impl").msa_q2k_indices_decode
    given = torch.zeros(12, 320)
    wanted = kernels.run(select, **msa_call(5, 4, 5, ENDS))
    found = kernels.run(select, **msa_call(5, 4, 5, ENDS, logits_out=given, max_output_bytes=0))
    assert torch.equal(found, wanted)
    assert kernels.launches[0].logits.data_ptr() == given.data_ptr()
    with pytest.raises(module("direct_logits").DirectLogitsTooLarge, match="pass logits_out, "):
        kernels.run(select, **msa_call(5, 4, 5, ENDS, max_output_bytes=0))


@pytest.mark.parametrize("route", ["msa_paged_decode_block_scores", "msa_q2k_indices_decode"])
def test_the_ceiling_of_block_scores_is_one_gib_unless_it_is_said(kernels: Kernels, route: str) -> None:
    with pytest.raises(module("direct_logits").DirectLogitsTooLarge, match=f"allocates {GIB} B at most"):
        kernels.run(getattr(module("_impl"), route), **msa_call(130, 8, 4097, [64] * 130))
    assert kernels.launches == []
