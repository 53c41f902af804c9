"""``neaptide ledger``: which regions there are, and who gets there, from what fake children answer. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from ledger_answers import MIB, NAMES, ROOT, answers, regions
from neaptide.ledger import command, show
from neaptide.ledger.b12x_regions import Channels, channels_of, reach_of
from neaptide.ledger.profiles import Profile, load_profile
from neaptide.ledger.regions import Region
from neaptide.model import Patch
from neaptide.session import Options

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


def test_only_patches_of_the_pin_are_named() -> None:
    known = {patch.id for patch in command.applied_patches(ROOT, "r12")}
    named = {name for one in regions(pin="r12").values() for name in one.patches}
    assert named <= known
    assert "vllm/indexer-prefill-wide-keys" in named
    assert replace(regions(pin="r12")["graph estimate"], patches=()) == regions(pin="r12")["graph estimate"]
