"""Sums of a ledger, and what its terms hold: parts, what is over a reservation, what the allocator keeps. No torch."""

from __future__ import annotations

import json
from dataclasses import replace

import ledger_answers
import pytest
from ledger_answers import MIB, ROOT, answers, region, regions
from neaptide.cli import main
from neaptide.ledger import command, show
from neaptide.ledger.kept import prefill_logits
from neaptide.ledger.profiles import load_profile
from neaptide.ledger.regions import Sum, Term, by_lifetime, by_term, check_sums, kv_tokens, total
from neaptide.session import Options

faked = ledger_answers.faked


# Sums


@pytest.mark.parametrize("name", ["gate", "turnkey", "v41-flash-ep4", "spark-glm53"])
def test_parts_make_the_totals(name: str) -> None:
    found = [one for one in regions(name).values() if one.reached and one.computed and not one.part_of]
    whole = total(regions(name).values())
    assert whole.upstream_bytes == sum(one.upstream_bytes or 0 for one in found) > 0
    assert whole.overlay_bytes == sum(one.overlay_bytes or 0 for one in found) > 0
    for groups in (by_lifetime(list(regions(name).values())), by_term(list(regions(name).values()))):
        assert sum(one.upstream_bytes for one in groups.values()) == whole.upstream_bytes
        assert sum(one.overlay_bytes for one in groups.values()) == whole.overlay_bytes


def test_sums_leave_out_what_is_not_reached_not_computed_or_a_part() -> None:
    found = [
        region("a", 10, 4), region("b", 100, 100, reached=False), region("c", None, None),
        region("d", 6, 2, part_of="a"),
    ]  # fmt: skip
    check_sums(found)
    assert total(found) == Sum(10, 4)
    assert by_term(found)["none"] == Sum(10, 0)
    assert by_term(found)["peak activation"] == Sum(0, 4)
    assert kv_tokens(Sum(10, 4), 4) == 1
    assert kv_tokens(Sum(4, 10), 4) == -1


def test_a_region_that_is_counted_twice_is_refused() -> None:
    found = list(regions().values())
    for twice in found:
        with pytest.raises(AssertionError, match="two regions of one name"):
            check_sums([*found, twice])


def test_a_part_that_is_more_than_its_region_or_of_none_is_refused() -> None:
    with pytest.raises(AssertionError, match="a part of a is larger"):
        check_sums([region("a", 10, 4), region("b", 11, 2, part_of="a")])
    with pytest.raises(AssertionError, match="part of z, no region"):
        check_sums([region("b", 11, 2, part_of="z")])


@pytest.mark.parametrize("name", ["gate", "turnkey"])
def test_a_region_that_is_dropped_is_missing_from_its_sums_alone(name: str) -> None:
    found = list(regions(name).values())
    summed = [one for one in found if one.summed]
    assert len(summed) > 4
    for gone in found:
        rest = [one for one in found if one is not gone]
        up, ours = (gone.upstream_bytes or 0, gone.overlay_bytes or 0) if gone in summed else (0, 0)
        assert total(rest) == Sum(total(found).upstream_bytes - up, total(found).overlay_bytes - ours)
        for life, both in by_lifetime(found).items():
            own = Sum(up, ours) if life == gone.lifetime else Sum(0, 0)
            assert by_lifetime(rest)[life].upstream_bytes == both.upstream_bytes - own.upstream_bytes
            assert by_lifetime(rest)[life].overlay_bytes == both.overlay_bytes - own.overlay_bytes
        for term, both in by_term(found).items():
            over = (gone.upstream_over, gone.overlay_over) if gone in summed else (0, 0)
            less_up = (up - over[0]) * (term == gone.upstream_term) + over[0] * (term == Term.NONE)
            less_ours = (ours - over[1]) * (term == gone.overlay_term) + over[1] * (term == Term.NONE)
            assert by_term(rest)[term] == Sum(both.upstream_bytes - less_up, both.overlay_bytes - less_ours)


def test_a_side_without_bytes_is_in_no_term() -> None:
    assert region("a", 0, 3).counted.upstream_term is Term.NONE
    moved = replace(region("a", 3, 0), upstream_term=Term.GRAPHS).counted
    assert (moved.upstream_term, moved.overlay_term) == (Term.GRAPHS, Term.NONE)
    unknown = region("a", None, None)
    assert unknown.counted == unknown
    assert all(one == one.counted for one in regions("turnkey").values())


# Prefills that find no memory


def test_launches_without_memory_are_a_finding_and_in_no_sum() -> None:
    """With 2 MiB beside 64 that the profile run reserved, upstream's third launch, of 40 beside 40, has no place."""
    assert "prefill logits, launches without memory" not in regions("gate", "current", "margin_mib=1000")
    found = regions("gate", "current", "margin_mib=2")
    one = found["prefill logits, launches without memory"]
    assert (one.upstream_bytes, one.overlay_bytes, one.summed) == (40 * MIB, 0, False)
    assert one.finding.startswith("prefill logits, launches without memory: 2 upstream, 0 ours")
    assert all((other.saved_bytes is None or min(other.upstream_bytes or 0, other.overlay_bytes or 0) >= 0)
               for other in found.values())  # fmt: skip
    check_sums(list(found.values()))


@pytest.mark.usefixtures("faked")
def test_a_finding_is_shown_and_is_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger", "gate", "--root", str(ROOT), "--set", "margin_mib=2", "--json"]) == 1
    said = capsys.readouterr()
    (text,) = json.loads(said.out)["findings"]
    assert text in said.err
    assert "an engine ends at the first" in text


def test_one_launch_counts_as_activation_where_the_reservation_holds_it() -> None:
    """The profile run reserves 64 MiB here."""
    assert regions()["prefill logits, one launch"].upstream_over == 0
    profile = load_profile(ROOT, "gate")
    vllm, b12x = answers(profile)
    for side, reserved in ((vllm.upstream, 39), (vllm.overlay, 16)):
        side["profile_run"]["reserved_bytes"] = reserved * MIB
    found = command.ledger(profile, "current", Options(root=ROOT, build=ROOT / "build"), (vllm, b12x))
    (one,) = [region for region in found if region.name == "prefill logits, one launch"]
    assert (one.upstream_bytes, one.overlay_bytes) == (40 * MIB, 16 * MIB)
    assert (one.upstream_term, one.upstream_over, one.overlay_over) == (Term.ACTIVATION, MIB, 0)
    assert show.region_row(one)[5] == "peak activation but for 1.00 / peak activation"
    before, after = by_term(list(regions().values())), by_term(found)
    # What is held and kept beside the launch has less room, too: 39 MiB in place of 64.
    assert after["none"].upstream_bytes - before["none"].upstream_bytes == 25 * MIB
    assert before["peak activation"].upstream_bytes - after["peak activation"].upstream_bytes == 25 * MIB
    assert sum(both.upstream_bytes for both in after.values()) == total(found).upstream_bytes


@pytest.mark.parametrize("margin", [2, 30, 60, 1000])
def test_what_prefill_takes_beyond_the_reservation_is_at_most_the_margin(margin: int) -> None:
    """The simulated allocator has the reservation and the margin, and no more: so has what is in no term."""
    found = regions("gate", "current", f"margin_mib={margin}")
    parts = [one for name, one in found.items() if name.startswith("prefill logits") and one.summed]
    beyond = by_term(parts)["none"]
    whole = total(parts)
    reserved = 64 * MIB
    assert beyond.upstream_bytes == max(0, whole.upstream_bytes - reserved) <= margin * MIB
    assert beyond.overlay_bytes == max(0, whole.overlay_bytes - reserved)


def test_a_forks_oneshot_channels_of_captures_are_in_no_term() -> None:
    """They come when the KV cache is sized already, as those of the exchange do."""
    found = regions("gate", "r12", "engine=fork")
    slabs = found["oneshot, slabs"]
    assert (slabs.upstream_bytes, slabs.upstream_over, slabs.overlay_over) == (4 * MIB, 3 * MIB, 3 * MIB)
    assert slabs.upstream_term is Term.NON_TORCH
    switched = regions("gate", "current", "pcie_collectives=1")["oneshot, slabs"]
    assert (switched.upstream_over, switched.overlay_over) == (0, 0)


def test_without_graphs_there_is_no_lane_of_theirs() -> None:
    assert regions()["workspace lane 1, the draft's graphs"].reached
    assert not regions("gate", "current", "largest_capture_rows=0")["workspace lane 1, the draft's graphs"].reached


def test_an_eager_decode_step_beyond_the_reservation_is_in_no_term_there() -> None:
    profile = load_profile(ROOT, "gate", ["full_graphs=false"])
    vllm, b12x = answers(profile)
    for side in (vllm.upstream, vllm.overlay):
        side["decode"] |= {"logits_bytes": 50 * MIB, "copy_bytes": 100 * MIB}
    found = command.ledger(profile, "current", Options(root=ROOT, build=ROOT / "build"), (vllm, b12x))
    by_name = {one.name: one for one in found}
    assert by_name["decode logits"].upstream_over == 0
    assert by_name["decode logits, FP32 copy"].upstream_over == 86 * MIB


# What the allocator keeps


def test_logits_that_grow_leave_segments_and_equal_ones_do_not() -> None:
    mebibytes = [20, 40, 60, 80]
    growing = {"chunks": [[[size * MIB, 0]] * 2 for size in mebibytes], "holds_previous": True, "blocks": []}
    found = prefill_logits(growing, None)
    assert (found.launch_bytes, found.previous_bytes, found.copy_bytes) == (80 * MIB, 80 * MIB, 0)
    # Two segments of each size: the first is still held when the second launch asks.
    assert found.launch_bytes + found.previous_bytes + found.kept_bytes == 2 * sum(mebibytes) * MIB
    equal = {"chunks": [[[80 * MIB, 0]]] * 4, "holds_previous": False, "blocks": [80 * MIB]}
    assert prefill_logits(equal, None).kept_bytes == prefill_logits(equal, None).previous_bytes == 0


def test_blocks_that_are_cached_first_serve_a_smaller_launch() -> None:
    smaller_first = {"chunks": [[[60 * MIB, 0]], [[80 * MIB, 0]]], "holds_previous": False}
    assert prefill_logits({**smaller_first, "blocks": [80 * MIB]}, None).kept_bytes == 0
    assert prefill_logits({**smaller_first, "blocks": []}, None).kept_bytes == 60 * MIB


def test_within_a_limit_the_allocator_gives_back() -> None:
    growing = {"chunks": [[[size * MIB, 0]] for size in (20, 40, 60, 80)], "holds_previous": True, "blocks": []}
    found = prefill_logits(growing, 180 * MIB)
    assert found.launch_bytes + found.previous_bytes + found.kept_bytes <= 180 * MIB
    assert found.failed == 0
    assert prefill_logits(growing, 70 * MIB).failed > 0


def test_fp32_copies_are_beside_the_launch() -> None:
    answer = {"chunks": [[[20 * MIB, 40 * MIB]] * 2], "holds_previous": True, "blocks": []}
    found = prefill_logits(answer, None)
    assert (found.launch_bytes, found.copy_bytes, found.previous_bytes) == (20 * MIB, 40 * MIB, 40 * MIB)
    assert found.kept_bytes == 0
