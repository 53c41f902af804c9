"""``neaptide ledger``: regions, reach, sums and output, from what fake children answer. No torch."""

from __future__ import annotations

import csv
import functools
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from neaptide.both_trees import Question
from neaptide.cli import main
from neaptide.errors import NeaptideError
from neaptide.ledger import asking, command, show
from neaptide.ledger.asking import Answers, b12x_spec
from neaptide.ledger.b12x_regions import Channels, channels_of, reach_of
from neaptide.ledger.kept import prefill_logits
from neaptide.ledger.profiles import Profile, load_profile
from neaptide.ledger.regions import Lifetime, Region, Sum, Term, by_lifetime, by_term, check_sums, kv_tokens, total
from neaptide.model import Patch
from neaptide.session import Options
from neaptide.simulate.ladders import overlay_sizes

ROOT = Path(__file__).resolve().parents[2]
SIZES = overlay_sizes(ROOT / "overlay")
MIB = 1 << 20
NAMES = {
    "workspace lane 0, the indexer's keys", "workspace lane 1, the draft's graphs", "prefill logits, one launch",
    "prefill logits, FP32 copy", "prefill logits, previous launch", "prefill logits, kept by the allocator",
    "decode logits", "decode logits, FP32 copy", "split accumulators of sparse MLA", "sparse MLA over a whole batch",
    "graph estimate", "buffers of the attention builders", "exchange, channel of eager work",
    "exchange, channels of captures", "exchange, channel of the profiling capture", "oneshot, slabs",
    "oneshot, rank data", "DMA ring, slab", "DMA ring, stage", "indexer arena", "prefill plan, 3,072 rows",
    "decode plan, 4 rows", "plan of the captures, 64 rows", "prefill plan, tile logits", "prefill plan, top-k values",
    "prefill plan, top-k indices", "prefill plan, candidate values", "prefill plan, candidate indices",
    "fold beside the plan, decode, 4 rows", "fold beside the plan, captures, 64 rows",
    "direct logits of a whole context",
}  # fmt: skip


def vllm_answer(*, patched: bool) -> dict[str, Any]:
    """What a vLLM child might say: every size of its own, a multiple of 2 MiB."""
    launch = 16 * MIB if patched else 20 * MIB
    chunks = [[[launch, 0]], [[launch if patched else 40 * MIB, 0]] * 2]
    return {
        "profile_run": {
            "workspace_bytes": 100 * MIB, "draft_lane_bytes": 2 * MIB * patched, "lanes": 1 + patched,
            "reserved_bytes": 64 * MIB,
        },
        "prefill": {
            "chunks": chunks, "holds_previous": not patched, "blocks": [16 * MIB] * patched, "columns": 524288,
        },
        "decode": {"rows": 4, "rows_at_once": 4, "logits_bytes": 8 * MIB, "copy_bytes": 0},
        "splits": {"bytes": (6 if patched else 12) * MIB, "profiled": patched},
        "transients": {"bytes": 32 * MIB, "moment": "combine", "tensors": {"output": 32 * MIB}, "profiled": patched},
    }  # fmt: skip


def b12x_answer(profile: Profile, *, patched: bool) -> dict[str, Any]:
    spec = b12x_spec(profile, SIZES)
    cases = spec["plans"]
    channels = {
        "exchange": {"slab_bytes": (12 if patched else 14) * MIB},
        "oneshot": {"slab_bytes": MIB, "rank_data_bytes": MIB if patched else 8 * MIB},
        "dma": {"slab_bytes": 54 * MIB, "stage_bytes": 0},
    }
    return {
        "channels": {kind: sizes for kind, sizes in channels.items() if spec["channels"][kind] is not None},
        "plans": {
            name: {
                "case": case, "nbytes": (40 + number) * MIB, "transient_bytes": 0 if patched else 24 * MIB,
                "route": "paged_tiled", "regions": [{"name": "tile_logits", "nbytes": 30 * MIB}],
            }
            for number, (name, case) in enumerate(cases.items())
        },
        "indexer": "dsa_indexer",
        "direct_bytes": 128 * MIB,
    }  # fmt: skip


def answers(profile: Profile) -> tuple[Answers, Answers]:
    vllm = Answers(vllm_answer(patched=False), vllm_answer(patched=True))
    return vllm, Answers(b12x_answer(profile, patched=False), b12x_answer(profile, patched=True))


@functools.cache
def regions(name: str = "gate", pin: str = "current", *changes: str) -> dict[str, Region]:
    profile = load_profile(ROOT, name, changes)
    found = command.ledger(profile, pin, Options(root=ROOT, build=ROOT / "build"), answers(profile))
    assert len({region.name for region in found}) == len(found)
    return {region.name: region for region in found}


# What is there


def test_every_region_is_there_once() -> None:
    assert set(regions()) == NAMES
    assert {name for name in regions("v41-flash-ep4") if "exchange" in name or "oneshot" in name} == set()


def uncovered(patches: Iterable[Patch], found: Iterable[Region]) -> list[str]:
    """Patches whose header recovers bytes, and that no region speaks of."""
    named = {name for one in found for name in one.patches}
    promising = [patch for patch in patches if any(recovery.bytes for recovery in patch.header.recovers)]
    return [patch.id for patch in promising if patch.id not in named]


@pytest.mark.parametrize("pin", ["current", "r12"])
def test_every_patch_that_recovers_bytes_has_a_region(pin: str) -> None:
    patches = command.applied_patches(ROOT, pin)
    found = list(regions(pin=pin).values())
    assert uncovered(patches, found) == []
    assert len(uncovered(patches, [])) >= 7
    # Without its one region a patch is missed.
    for gone in ("b12x/dma-wire-slots", "b12x/oneshot-rank-data"):
        assert uncovered(patches, [one for one in found if gone not in one.patches]) == [gone]


@pytest.mark.parametrize("pin", ["current", "r12"])
@pytest.mark.parametrize("name", ["gate", "turnkey"])
def test_reach_is_what_the_patches_headers_say(name: str, pin: str) -> None:
    """A region of patches that recover bytes, none of them at this pin, is not reached."""
    headers = {patch.id: patch.header.recovers for patch in command.applied_patches(ROOT, pin)}
    bounded = 0
    for region in regions(name, pin).values():
        reached = [r.reached.get(pin, False) for name in region.patches for r in headers[name]]
        if reached and not any(reached):
            bounded += 1
            assert not region.reached, region.name
    assert bounded > 10


# Who gets there


@pytest.mark.parametrize(
    ("name", "changes", "counts"),
    [
        ("gate", (), Channels(1, 3, 0)),
        ("gate", ("speculative_tokens=1",), Channels(1, 2, 0)),
        ("gate", ("speculative_tokens=0",), Channels(1, 1, 0)),
        ("turnkey", (), Channels(1, 1, 1)),
    ],
)
def test_channels_by_runner_and_managers(name: str, changes: tuple[str, ...], counts: Channels) -> None:
    assert channels_of(load_profile(ROOT, name, changes)) == counts


def test_without_the_switch_no_channel_is_in_a_sum() -> None:
    found = regions()
    for name in NAMES:
        if name.startswith(("exchange", "oneshot", "DMA")):
            assert not found[name].reached
            assert not found[name].summed
    assert found["exchange, channels of captures"].upstream_bytes == 3 * 14 * MIB
    assert "which is off in this profile" in found["oneshot, slabs"].note
    assert "no caller in this pin's vLLM" in regions(pin="r12")["oneshot, slabs"].note


def test_with_the_switch_upstream_is_not_reached_and_the_overlay_costs() -> None:
    found = regions("gate", "current", "pcie_collectives=1")
    assert found["exchange, channel of eager work"].upstream_bytes == 0
    assert found["exchange, channel of eager work"].overlay_bytes == 12 * MIB
    assert found["exchange, channels of captures"].overlay_bytes == 0
    assert found["oneshot, rank data"].overlay_bytes == MIB
    assert "upstream: not reached" in found["oneshot, slabs"].note
    assert not found["DMA ring, slab"].reached, "no ring by default"
    assert regions("gate", "current", "pcie_collectives=1", "ring=true")["DMA ring, slab"].overlay_bytes == 54 * MIB
    assert not regions("gate", "r12", "pcie_collectives=1")["oneshot, slabs"].reached, "no such patch at r12"


def test_a_forks_engine_reaches_pools_and_indexer_but_not_the_ops_logits() -> None:
    found = regions("turnkey", "r12", "engine=fork")
    assert found["exchange, channel of the profiling capture"].upstream_bytes == 14 * MIB
    assert found["exchange, channel of the profiling capture"].overlay_bytes == 12 * MIB, "its vLLM is not patched"
    assert found["DMA ring, slab"].summed
    assert found["indexer arena"].summed
    assert found["fold beside the plan, decode, 48 rows"].summed
    assert not any(one.reached for name, one in found.items() if "logits" in name and one.owner.startswith("vllm"))
    assert reach_of(load_profile(ROOT, "gate"), has_caller=True).pools is False


def test_the_indexer_of_b12x_is_in_no_mainline_sum_and_its_plans_only_in_their_arena() -> None:
    assert not regions()["indexer arena"].reached
    found = regions("gate", "current", "engine=fork")
    assert found["indexer arena"].upstream_bytes == max(
        found[name].upstream_bytes or 0 for name in NAMES if found[name].part_of == "indexer arena"
    )
    assert not any(one.summed for one in found.values() if one.part_of)


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


def region(name: str, upstream: int | None, overlay: int | None, **more: Any) -> Region:
    return Region(
        name, "owner", (), upstream, overlay, Lifetime.CALL, Term.NONE, Term.ACTIVATION, "", **more
    )  # fmt: skip


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


# A plan that a planner refuses


def refused(profile: Profile, *sides: str) -> dict[str, Region]:
    """The ledger of a fork whose prefill plan is refused upstream, by the overlay, or both."""
    vllm, b12x = answers(profile)
    for side in sides:
        plans = getattr(b12x, side)["plans"]
        plans["prefill"] = {"case": plans["prefill"]["case"], "none": "16 rows want 3 MiB"}
    found = command.ledger(profile, "current", Options(root=ROOT, build=ROOT / "build"), (vllm, b12x))
    return {one.name: one for one in found}


@pytest.mark.parametrize("sides", [("overlay",), ("upstream",), ("upstream", "overlay")])
def test_a_refused_plan_is_no_plan_of_0_bytes(sides: tuple[str, ...]) -> None:
    found = refused(load_profile(ROOT, "gate", ["engine=fork"]), *sides)
    for name in ("indexer arena", "prefill plan, 3,072 rows", "prefill plan, tile logits"):
        one = found[name]
        assert (one.upstream_bytes is None, one.overlay_bytes is None) == ("upstream" in sides, "overlay" in sides)
        assert not one.summed
        assert "(refused)" in show.region_row(one)
    assert found["prefill plan, 3,072 rows"].note == "; ".join(f"refused, {side}: 16 rows want 3 MiB" for side in sides)
    assert found["decode plan, 4 rows"].computed


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


# Output


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "ask", lambda profiles, *given: [answers(one) for one in profiles])


@pytest.mark.usefixtures("faked")
def test_json_csv_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gate.csv"
    assert main(["ledger", "gate", "--root", str(ROOT), "--json", "--csv", str(path)]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert (found["schema_version"], found["command"], found["pin"]) == (1, "ledger", "current")
    assert found["profile"]["name"] == "gate"
    assert {one["name"] for one in found["regions"]} == NAMES
    assert found["not_computed"] == ["graph estimate", "buffers of the attention builders"]
    summed = [one for one in found["regions"] if one["summed"]]
    whole = found["sums"]["all"]
    assert whole["upstream_bytes"] == sum(one["upstream_bytes"] for one in summed)
    assert whole["saved_kv_tokens"] == whole["saved_bytes"] // found["profile"]["kv_bytes_per_token"]
    for group in ("by_lifetime", "by_term"):
        assert sum(one["overlay_bytes"] for one in found["sums"][group].values()) == whole["overlay_bytes"]
    with path.open(newline="") as handle:
        rows = list(csv.DictReader(handle))
    assert [row["name"] for row in rows] == [one["name"] for one in found["regions"]]
    assert sum(int(row["upstream_bytes"]) for row in rows if row["summed"] == "True") == whole["upstream_bytes"]
    assert f"all\t{whole['upstream_bytes'] / MIB:,.2f}\t" in said.err
    assert "not computed, and in no sum: graph estimate, buffers of the attention builders" in said.err


def test_what_is_in_no_sum_stands_in_brackets() -> None:
    assert show.region_row(region("a", MIB, 0))[:4] == ["a", "1.00", "0.00", "1.00"]
    assert show.region_row(region("a", MIB, 0, reached=False))[:4] == ["a", "(1.00)", "(0.00)", "(1.00)"]
    assert show.region_row(region("a", MIB, 0, part_of="b"))[:4] == ["- a", "(1.00)", "(0.00)", "(1.00)"]
    assert show.region_row(region("a", None, None))[1:4] == ["(device)", "(device)", ""]


@pytest.mark.usefixtures("faked")
def test_a_plot_has_a_part_of_each_bar_for_each_summed_region(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "gate.svg"
    assert main(["ledger", "gate", "--root", str(ROOT), "--plot", str(path)]) == 0
    assert path.stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["--pin", "sparkinfer-de04"], "pin 'sparkinfer-de04'; wanted one of current, r12"),
        (["--target", "b12x"], "target b12x; wanted b12x and vllm"),
        (["--python", "/nowhere/python"], "no program /nowhere/python; wanted a Python with torch"),
        (["--set", "engine"], "'engine'; wanted FIELD=VALUE"),
        (["--live", "x.json"], "a profile and --live"),
        (["--set", "heads=3"], "Object contains unknown field `heads`"),
    ],
)
def test_a_bad_call_is_refused_before_anything_is_read(
    arguments: list[str], found: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(asking, "read_source", lambda *given: pytest.fail("went on"))
    assert main(["ledger", "gate", "--root", str(ROOT), *arguments]) == 2
    said = capsys.readouterr().err
    assert said.count("error:") == 1
    assert found in said


@pytest.mark.parametrize(
    ("option", "value"),
    [("--csv", "a.csv"), ("--plot", "a.svg"), ("--set", "engine=fork"), ("--pin", "r12"), ("--python", "/bin/sh"),
     ("--target", "vllm")],
)  # fmt: skip
def test_what_an_engine_wrote_takes_no_option_of_a_profile(
    option: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["ledger", "--root", str(ROOT), "--live", str(tmp_path / "x.json"), option, value]
    assert main(given) == 2
    assert f"{option} with --live; wanted files alone" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("said", "todo"),
    [
        ("ModuleNotFoundError: No module named 'torch'", "Name one with --python."),
        ("ModuleNotFoundError: No module named 'b12x'", "Name one with --python."),
        ("ModuleNotFoundError: No module named 'vllm.models.glm5next'", "Change the profile, or choose another --pin."),
        ("ValueError: only supports page_size=64", "Change the profile, or choose another --pin."),
    ],
)
def test_a_child_that_ends_says_what_would_help(said: str, todo: str, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "{said}" >&2\nexit 1\n')
    python.chmod(0o755)
    with pytest.raises(NeaptideError) as caught:
        Question(asking.FOLDER / "vllm_child.py", {}, "ledger").answer(tmp_path, python)
    assert (caught.value.todo, said in caught.value.found) == (todo, True)


def test_a_python_without_torch_is_one_error(tmp_path: Path) -> None:
    """The child itself fails: one line says what is missing and what would help."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'torch'\" >&2\nexit 1\n")
    python.chmod(0o755)
    asked = Question(asking.FOLDER / "vllm_child.py", {}, "ledger")
    with pytest.raises(NeaptideError, match="No module named 'torch'; wanted a Python with torch"):
        asked.answer(tmp_path, python)


def test_only_patches_of_the_pin_are_named() -> None:
    known = {patch.id for patch in command.applied_patches(ROOT, "r12")}
    named = {name for one in regions(pin="r12").values() for name in one.patches}
    assert named <= known
    assert "vllm/indexer-prefill-wide-keys" in named
    assert replace(regions(pin="r12")["graph estimate"], patches=()) == regions(pin="r12")["graph estimate"]
