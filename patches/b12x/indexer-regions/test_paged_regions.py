"""A plan of the paged indexer has the regions of its route, one behind the other.

Runs on the b12x on the path, on a CPU. Upstream's layout of the same caps is at hand in it: the patch puts its own
in at one place.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from indexer_plans import (
    SWITCH,
    TOPK,
    VARIABLES,
    WIDTH,
    bound,
    inner_plan,
    module,
    plan,
    prepared_plans,
    upstream_plan,
)

# The field of the scratch with a region's view.
FIELDS = {
    "gather_k_quant": "indexer_k_quant_bytes",
    "gather_k_scale": "indexer_k_scales_bytes",
    "contiguous_lengths": "indexer_contiguous_lengths",
    "runtime_lengths": "paged_indexer_runtime_lengths",
    "tile_logits": "indexer_contiguous_tile_logits",
    "topk_values": "indexer_contiguous_topk_values",
    "topk_indices": "indexer_contiguous_topk_indices",
    "candidate_values": "indexer_contiguous_candidate_values",
    "candidate_indices": "indexer_contiguous_candidate_indices",
    "merge_positions": "indexer_contiguous_topk_positions",
    "active_width": "paged_indexer_active_width_cap",
    "fused_pack_values": "fused_indexer_pack_values",
    "fused_pack_indices": "fused_indexer_pack_indices",
    "fused_merge_state": "fused_indexer_merge_state",
}
GATHER = {"gather_k_quant", "gather_k_scale", "contiguous_lengths", "runtime_lengths"}
OUTPUTS = {"topk_values", "topk_indices"}
CARRY = {"candidate_values", "candidate_indices"}
MERGE = {"fused_pack_values", "fused_pack_indices", "fused_merge_state"}
PLANS = [
    (rows, width, mode, more, policy)
    for (rows, mode, more), width, policy in itertools.product(
        [
            (1, "decode", {}), (16, "decode", {}), (17, "decode", {}), (48, "decode", {"supertile_k": 4096}),
            (5, "decode", {"route": "paged_tiled"}), (64, "decode", {"output_physical_slots": True}),
            (7, "decode", {"topk": 512, "num_q_heads": 64}), (1, "prefill", {}), (300, "prefill", {}),
            (33, "prefill", {"supertile_k": 8192}),
        ],
        (1, 511, 512, 513, 1500, WIDTH),
        ("auto", "on", "off"),
    )
]  # fmt: skip


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def all_plans() -> Any:
    """Each of PLANS as it is, with and without outputs of its own, and as upstream makes it."""
    for rows, width, mode, more, policy in PLANS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(SWITCH, policy)
            theirs = upstream_plan(rows, width, mode, **more)
            for ours in (plan(rows, width, mode, **more), inner_plan(rows, width, mode, **more)):
                yield ours, theirs


def sizes(planned: Any) -> dict[str, int]:
    """Bytes of the regions that a plan has."""
    return {item.region.name: item.region.nbytes for item in planned.layout.memory.placed if item.region.nbytes}


def reasons(planned: Any) -> dict[str, str]:
    return {
        item.region.name: item.region.absent_because for item in planned.layout.memory.placed if not item.region.nbytes
    }


def up(size: int) -> int:
    return -(-size // 1024) * 1024


def test_sizes_at_524288_tokens() -> None:
    """Upstream: 557,999,104 and 11,537,408 bytes, and 33,554,688 more in each call of the decode."""
    prefill, decode = plan(3072, mode="prefill").layout, plan(64).layout
    assert upstream_plan(3072, mode="prefill").layout.nbytes == 557_999_104
    assert upstream_plan(64).layout.nbytes == 11_537_408
    assert prefill.nbytes == (507_667_456 if prepared_plans() else 557_999_104)
    assert decode.nbytes == (41_945_088 if prepared_plans() else 42_993_664)
    assert sizes(plan(48))["fold"] == 25_166_016


def test_regions_lie_apart_unless_they_share() -> None:
    shared = 0
    for ours, _ in all_plans():
        layout, memory = ours.layout, ours.layout.memory
        there = [item for item in memory.placed if item.region.nbytes]
        for item in there:
            assert item.offset % 1024 == 0
            assert 0 <= item.offset <= item.offset + item.region.nbytes <= layout.nbytes
        for one, two in itertools.combinations(there, 2):
            if max(one.offset, two.offset) < min(one.offset + one.region.nbytes, two.offset + two.region.nbytes):
                names = {one.region.name, two.region.name}
                assert "fold" in names, names
                assert names - {"fold"} <= CARRY
                assert one.region.shares == two.region.shares != ""
                shared += 1
        start, end = memory.fold_offset, memory.fold_offset + memory.fold_bytes
        for item in there:
            if item.region.name in CARRY | {"fold"}:
                assert start <= item.offset <= item.offset + item.region.nbytes <= end
            else:
                assert item.offset + item.region.nbytes <= start or item.offset >= end
    assert shared > 20


def test_sizes_add_up() -> None:
    for ours, theirs in all_plans():
        layout, have = ours.layout, sizes(ours)
        carry, fold = sum(up(have.get(name, 0)) for name in CARRY), up(have.get("fold", 0))
        rest = sum(up(nbytes) for name, nbytes in have.items() if name not in CARRY | {"fold"})
        assert layout.nbytes == layout.memory.nbytes == rest + max(carry, fold)
        assert layout.memory.fold_bytes == max(carry, fold)
        assert layout.nbytes <= theirs.layout.nbytes + max(fold - carry, 0)
        (spec,) = ours.scratch_specs()
        assert (tuple(spec.shape), spec.dtype) == ((layout.nbytes,), torch.uint8)


def test_the_layout_is_upstream_s_but_for_where_things_lie() -> None:
    for ours, theirs in all_plans():
        layout, memory = ours.layout, ours.layout.memory
        assert {item.region.name for item in memory.placed} == set(FIELDS) | {"fold", "paged_logits"}
        offsets = {f"{name}_offset_bytes": memory.offset_of(name) for name in FIELDS}
        assert layout == replace(theirs.layout, nbytes=layout.nbytes, memory=memory, **offsets)
        regions = module("paged_regions")
        assert {item.offset == regions.ABSENT for item in memory.placed if not item.region.nbytes} == {True}
        assert memory.offset_of("no such region") == regions.ABSENT


def test_each_region_has_the_view_that_upstream_s_has() -> None:
    """And one without bytes has none. The largest of these plans has 0.2 GB, which is never written."""
    for ours, theirs in all_plans():
        if max(ours.layout.nbytes, theirs.layout.nbytes) > 1 << 28:
            continue
        storage = torch.empty(ours.layout.nbytes, dtype=torch.uint8)
        scratch, upstream = bound(ours, storage), bound(theirs)
        have = sizes(ours)
        for name, field in FIELDS.items():
            view, wanted = getattr(scratch, field), getattr(upstream, field)
            if name not in have:
                assert view is None, name
                continue
            assert (view.shape, view.dtype, view.stride()) == (wanted.shape, wanted.dtype, wanted.stride()), name
            assert view.nbytes == have[name], name
            assert view.data_ptr() - storage.data_ptr() == ours.layout.memory.offset_of(name), name
        assert scratch.memory is ours.layout.memory
        assert scratch.fold_slab.nbytes == scratch.memory.fold_bytes
        if scratch.memory.fold_bytes:
            assert scratch.fold_slab.data_ptr() - storage.data_ptr() == scratch.memory.fold_offset
        others = {name for name, value in vars(scratch).items() if isinstance(value, torch.Tensor)}
        assert others <= set(FIELDS.values()) | {"shared_scratch", "fold_slab"}
        plain = {name: value for name, value in vars(upstream).items() if isinstance(value, (int, str, torch.dtype))}
        assert {name: getattr(scratch, name) for name in plain} == plain
        assert scratch.paged_indexer_active_width_cap.item() == upstream.paged_indexer_active_width_cap.item()


@pytest.mark.parametrize("own", [False, True])
def test_fused(own: bool) -> None:
    planned = inner_plan(8, caller_outputs=not own)
    why = reasons(planned)
    assert planned.layout.route == "paged_fused"
    assert set(sizes(planned)) == MERGE | {"active_width"}
    for name in {"tile_logits", "fold"} | CARRY | (OUTPUTS if own else set()):
        assert why[name] == "the fused route scores and selects in one launch"
    assert {why[name] for name in GATHER} == {"only the packed route gathers keys"}
    with pytest.raises(RuntimeError, match="missing tiled logits"):
        bound(planned).get_indexer_contiguous_tile_logits()


@pytest.mark.parametrize("own", [False, True])
def test_tiled(own: bool) -> None:
    planned = inner_plan(64, caller_outputs=not own)
    why = reasons(planned)
    assert planned.layout.route == "paged_tiled"
    assert set(sizes(planned)) == {"tile_logits", "fold", "active_width"} | CARRY | (OUTPUTS if own else set())
    assert {why[name] for name in GATHER} == {"only the packed route gathers keys"}
    assert {why[name] for name in MERGE} == {"only the fused route merges across blocks"}
    assert {why.get(name, "") for name in OUTPUTS} == {"" if own else "the caller passes the outputs"}


@pytest.mark.parametrize("own", [False, True])
def test_packed(own: bool) -> None:
    planned = inner_plan(64, mode="prefill", caller_outputs=not own)
    why = reasons(planned)
    assert planned.layout.route == "packed_contiguous"
    assert set(sizes(planned)) == {"tile_logits", "active_width"} | GATHER | CARRY | (OUTPUTS if own else set())
    assert {why[name] for name in MERGE} == {"only the fused route merges across blocks"}
    assert {why.get(name, "") for name in OUTPUTS} == {"" if own else "the caller passes the outputs"}


@pytest.mark.parametrize("mode", ["decode", "prefill"])
def test_one_supertile_needs_no_carry(mode: str) -> None:
    one, two = inner_plan(64, 512, mode), inner_plan(64, 513, mode)
    assert {reasons(one)[name] for name in CARRY} == {"one supertile holds the whole context"}
    assert set(sizes(two)) - set(sizes(one)) == CARRY
    assert ("fold" in sizes(one)) == (mode == "decode")


def test_every_region_without_bytes_says_why() -> None:
    for ours, _ in all_plans():
        for name, why in reasons(ours).items():
            assert why, name
            assert any(name in note and why in note for note in ours.layout.memory.notes), name
        for name in sizes(ours):
            assert not any(note.startswith(f"{name}:") for note in ours.layout.memory.notes), name


def test_notes_tell_of_shared_bytes() -> None:
    assert any("share their bytes" in note for note in plan(64).layout.memory.notes)
    for alone in (plan(64, mode="prefill"), plan(64, 512), plan(8)):
        assert not any("share their bytes" in note for note in alone.layout.memory.notes)


def test_regions_that_share() -> None:
    """Upstream's in a row, ours over them; what comes next lies behind the longer."""
    regions = module("paged_regions")

    def region(name: str, nbytes: int, **more: Any) -> Any:
        return regions.Region(name, nbytes, "writer", "reader", "call", **more)

    def offsets(*these: Any) -> tuple[list[int], int]:
        placed, nbytes = regions.place(these)
        return [item.offset for item in placed], nbytes

    carry = [region("values", 1500, shares="s"), region("indices", 1024, shares="s")]
    first, last = region("first", 1), region("last", 1025)
    none, fold = region("none", 0, shares="s"), region("fold", 5000, shares="s", ours=True)
    assert offsets() == ([], 0)
    assert offsets(first, *carry, last) == ([0, 1024, 3072, 4096], 6144)
    assert offsets(first, *carry, fold, none, last) == ([0, 1024, 3072, 1024, -1, 6144], 8192)
    assert offsets(first, *carry, region("fold", 7, shares="s", ours=True), last)[0] == [0, 1024, 3072, 1024, 4096]
    assert offsets(first, none, fold, last)[0] == [0, -1, 1024, 6144]


@pytest.mark.parametrize("mode", ["decode", "prefill"])
def test_msa_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """Even where the fold's variables are wrong, which MSA does not read."""
    monkeypatch.setenv(SWITCH, "what")
    ours = plan(64, 1024, mode, score_mode="msa", num_idx_heads=4, topk=16)
    theirs = upstream_plan(64, 1024, mode, score_mode="msa", num_idx_heads=4, topk=16)
    assert ours.layout.memory is None
    assert ours.layout == theirs.layout
    assert module("paged_regions").laid_out(ours.inner.caps, theirs.layout) is theirs.layout
    scratch, upstream = bound(ours), bound(theirs)
    assert (scratch.memory, scratch.fold_slab) == (None, None)
    for name, value in vars(upstream).items():
        if isinstance(value, torch.Tensor):
            assert getattr(scratch, name).shape == value.shape, name


def output_buffers(scratch: Any, rows: int, **outputs: Any) -> Any:
    named = {"out_indices": None, "out_scores": None} | outputs
    return module("paged_views").output_buffers(scratch, row_count=rows, topk=TOPK, **named)


@pytest.mark.parametrize("mode", ["decode", "prefill"])
def test_outputs_of_the_plan(mode: str) -> None:
    planned = inner_plan(40, 600, mode, caller_outputs=False)
    scratch = bound(planned)
    values, indices = output_buffers(scratch, 9)
    assert (values.shape, values.dtype) == ((9, TOPK), torch.float32)
    assert (indices.shape, indices.dtype) == ((9, TOPK), torch.int32)
    assert values.data_ptr() == scratch.indexer_contiguous_topk_values.data_ptr()
    assert indices.data_ptr() == scratch.indexer_contiguous_topk_indices.data_ptr()
    given = output_buffers(scratch, 9, out_indices=torch.zeros(9, TOPK, dtype=torch.int32))
    assert [tensor.data_ptr() for tensor in given] == [values.data_ptr(), indices.data_ptr()]


@pytest.mark.parametrize("mode", ["decode", "prefill"])
def test_the_caller_s_indices_stand_in(mode: str) -> None:
    scratch = bound(inner_plan(40, 600, mode, caller_outputs=True))
    out, scores = torch.zeros(9, 100, dtype=torch.int32), torch.zeros(9, 100)
    for outputs in ({"out_indices": out}, {"out_indices": out, "out_scores": scores}):
        values, indices = output_buffers(scratch, 9, **outputs)
        assert indices is out
        assert (values.shape, values.dtype, values.data_ptr()) == (out.shape, torch.float32, out.data_ptr())


def test_a_call_without_indices_is_refused() -> None:
    scratch = bound(inner_plan(40, 600, caller_outputs=True))
    wanted = (
        r"a paged top-k call without out_indices; its plan has no buffer for them\. Pass out_indices, or plan with "
        r"plan_indexer_paged_scratch and caller_outputs=False"
    )
    for outputs in ({}, {"out_scores": torch.zeros(9, TOPK)}):
        with pytest.raises(ValueError, match=wanted):
            output_buffers(scratch, 9, **outputs)


def test_outputs_of_a_scratch_without_memory() -> None:
    scratch = bound(upstream_plan(40, 600))
    values, indices = output_buffers(scratch, 9, out_indices=torch.zeros(9, TOPK, dtype=torch.int32))
    assert values.data_ptr() == scratch.indexer_contiguous_topk_values.data_ptr()
    assert indices.data_ptr() == scratch.indexer_contiguous_topk_indices.data_ptr()


def test_who_counts_on_the_caller_s_outputs() -> None:
    """The public function of 1.3 and later does: its prepared path has no call without them."""
    for mode in ("decode", "prefill"):
        assert OUTPUTS.isdisjoint(sizes(plan(64, mode=mode))) == prepared_plans()
    assert set(sizes(inner_plan(64))) >= OUTPUTS, "as upstream, unless told otherwise"
    assert plan(64).inner.caps.caller_outputs == prepared_plans()


def test_regions_that_share_stand_in_a_row() -> None:
    regions = module("paged_regions")
    first, between, last = (
        regions.Region(name, 4096, "", "", "call", shares=shares)
        for name, shares in (("a", "x"), ("b", ""), ("c", "x"))
    )
    with pytest.raises(ValueError, match="region c shares 'x', and others lie between"):
        regions.place([first, between, last])
    placed, nbytes = regions.place([first, last, between])
    assert [item.offset for item in placed] == [0, 4096, 8192]
    assert nbytes == 12288
