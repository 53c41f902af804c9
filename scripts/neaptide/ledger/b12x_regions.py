"""Regions that b12x allocates: PCIe channels and the indexer's scratch, from what both trees say of a profile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from neaptide.ledger.asking import Answers
from neaptide.ledger.profiles import Profile
from neaptide.ledger.regions import Lifetime, Region, Term

EXCHANGE, ONESHOT, RING = (f"b12x/comm/pcie/{name}.py" for name in ("pcie_dcp_a2a", "pcie_oneshot", "pcie_dma"))
SCRATCH = "b12x/attention/{indexer}/scratch.py"
CALLER = "vllm/pcie-collectives"
# In place of the size of a plan that there is not.
REFUSED = "refused"


@dataclass(frozen=True)
class Reach:
    """Who calls b12x's pools and indexer in a profile's engine.

    Attributes:
        fork: the engine has callers of its own, which run on either tree; a channel is theirs for each capture.
        switched: mainline vLLM with ``vllm/pcie-collectives`` on: upstream has no caller, and all share one channel.
    """

    fork: bool
    switched: bool
    why: str

    @property
    def pools(self) -> bool:
        return self.fork or self.switched


def reach_of(profile: Profile, has_caller: bool) -> Reach:
    """Who calls, in a profile's engine at a pin.

    Args:
        has_caller: whether ``vllm/pcie-collectives`` applies at the pin.
    """
    if profile.engine == "fork":
        return Reach(True, False, "the fork's callers")
    if has_caller and profile.pcie_collectives != "0":
        return Reach(False, True, f"upstream: not reached, mainline vLLM has no caller; ours: through {CALLER}")
    off = f"only with {CALLER}, which is off in this profile" if has_caller else "no caller in this pin's vLLM"
    return Reach(False, False, f"not reached: {off}")


@dataclass(frozen=True)
class Channels:
    """How many channels of a pool an engine holds.

    Attributes:
        captures: one for each capture scope that lasts.
        profiling: those of the profiling capture that nobody frees.
    """

    eager: int
    captures: int
    profiling: int


def channels_of(profile: Profile) -> Channels:
    """Channels of an engine that gives every capture scope its own.

    V2 captures once for each manager: target, draft prefill, and draft decode if a step drafts more than one token;
    its profiling captures are rolled back. V1 captures once for all, and its profiling capture is never freed.
    """
    if profile.runner == "v1":
        return Channels(1, 1, 1)
    return Channels(1, 1 + min(profile.speculative_tokens, 2), 0)


def b12x_regions(profile: Profile, answers: Answers, reach: Reach) -> Iterator[Region]:
    up, ours = answers.upstream["channels"], answers.overlay["channels"]
    if "exchange" in up:
        yield from exchange(profile, up["exchange"], ours["exchange"], reach)
    if "oneshot" in up:
        yield from oneshot(profile, up["oneshot"], ours["oneshot"], reach)
        yield from ring(profile, up["dma"], ours["dma"], reach)
    yield from indexer(profile, answers, reach)


def exchange(profile: Profile, up: Mapping[str, int], ours: Mapping[str, int], reach: Reach) -> Iterator[Region]:
    """Channels of the DCP exchange."""
    counts, slab, own = channels_of(profile), up["slab_bytes"], ours["slab_bytes"]
    each = f"{slab:,} B a channel, {own:,} ours"
    # Without a caller upstream there is nothing to save: what stands there is what the switch costs.
    base = 0 if reach.switched else 1
    patches = ("b12x/exact-slabs", "b12x/channel-pool")
    yield Region(
        "exchange, channel of eager work", EXCHANGE, patches, base * counts.eager * slab, own, Lifetime.PROCESS,
        Term.NON_TORCH, Term.NON_TORCH, f"{each}; {reach.why}", reached=reach.pools,
    )  # fmt: skip
    shared = 0 if reach.switched else counts.captures
    yield Region(
        "exchange, channels of captures", EXCHANGE, patches, base * counts.captures * slab, shared * own,
        Lifetime.PROCESS, Term.NONE, Term.NONE,
        "graphs share the channel of eager work" if reach.switched
        else f"one for each of {counts.captures} capture scopes that last; a caller that names a replay group shares",
        reached=reach.pools,
    )  # fmt: skip
    leaks = profile.runner == "v1"
    # Only vLLM's own patches roll a V1 profiling capture back, and they are in no fork's engine.
    left = counts.profiling if reach.fork else 0
    yield Region(
        "exchange, channel of the profiling capture", EXCHANGE, ("vllm/disposable-captures", "b12x/channel-pool"),
        base * counts.profiling * slab, left * own, Lifetime.PROCESS, Term.NON_TORCH, Term.NON_TORCH,
        "never freed by V1; rolled back where vllm/disposable-captures applies" if leaks else "rolled back by V2",
        reached=reach.pools and leaks,
    )  # fmt: skip


def oneshot(profile: Profile, up: Mapping[str, int], ours: Mapping[str, int], reach: Reach) -> Iterator[Region]:
    """Channels of the oneshot all-reduce: slabs, and tables of pointers."""
    counts = channels_of(profile)
    many = counts.eager + counts.captures + counts.profiling
    mine = 1 if reach.switched else many
    base = 0 if reach.switched else many
    # With the communicator, before the profile's first reading, and so beside gpu_memory_utilization.
    term = Term.NONE if reach.switched else Term.NON_TORCH
    for name, key, patches in (
        ("oneshot, slabs", "slab_bytes", ("b12x/exact-slabs", "b12x/channel-pool")),
        ("oneshot, rank data", "rank_data_bytes", ("b12x/oneshot-rank-data", "b12x/channel-pool")),
    ):
        yield Region(
            name, ONESHOT, patches, base * up[key], mine * ours[key], Lifetime.PROCESS, Term.NON_TORCH, term,
            f"{many} channels of {up[key]:,} B, {mine} of {ours[key]:,} ours; {reach.why}", reached=reach.pools,
            # Those of captures come when the KV cache is sized already.
            upstream_over=base and counts.captures * up[key],
            overlay_over=0 if reach.switched else counts.captures * ours[key],
        )  # fmt: skip


def ring(profile: Profile, up: Mapping[str, int], ours: Mapping[str, int], reach: Reach) -> Iterator[Region]:
    """The DMA ring: its slab and its stage."""
    base = 0 if reach.switched else 1
    # vllm/pcie-collectives makes a ring of bf16 alone.
    mode = "bf16" if profile.ring_wire_mode == "0" else profile.ring_wire_mode
    compressed = reach.switched and mode != "bf16"
    has = reach.fork or profile.ring
    reached = reach.pools and has and not compressed
    why = f"{CALLER} sends bf16" if compressed else reach.why if has else "no ring in this profile"
    term = Term.NONE if reach.switched else Term.NON_TORCH
    for name, key in (("DMA ring, slab", "slab_bytes"), ("DMA ring, stage", "stage_bytes")):
        yield Region(
            name, RING, ("b12x/dma-wire-slots",), base * up[key], ours[key], Lifetime.PROCESS, Term.NON_TORCH, term,
            f"{profile.widest_all_reduce:,} B at most, wire mode {mode}; {why}", reached=reached,
        )  # fmt: skip


def indexer(profile: Profile, answers: Answers, reach: Reach) -> Iterator[Region]:
    """The arena of the indexer's plans, its parts, and what calls take beside it."""
    up, ours = answers.upstream["plans"], answers.overlay["plans"]
    owner = SCRATCH.format(indexer=answers.upstream["indexer"])
    patches = ("b12x/indexer-regions", "b12x/indexer-plan-budget")
    why = reach.why if reach.fork else "not reached: no vLLM calls b12x's indexer, a fork's engine does"
    arena = "indexer arena"
    whole = [_largest(side) for side in (up, ours)]
    unknown = ", and one is refused" if None in whole else ""
    yield Region(
        arena, owner, patches, whole[0], whole[1], Lifetime.PROCESS, Term.ACTIVATION, Term.ACTIVATION,
        f"the largest plan of it{unknown}; {why}", reached=reach.fork, missing=REFUSED,
    )  # fmt: skip
    for case, what in (("prefill", "prefill plan"), ("decode", "decode plan"), ("captures", "plan of the captures")):
        rows = ours[case]["case"]["rows"]
        yield Region(
            f"{what}, {rows:,} rows", owner, patches, up[case].get("nbytes"), ours[case].get("nbytes"),
            Lifetime.PROCESS, Term.ACTIVATION, Term.ACTIVATION, _refusals(up[case], ours[case])
            or f"route {ours[case]['route']}", reached=reach.fork, part_of=arena, missing=REFUSED,
        )  # fmt: skip
    for name, label in (
        ("tile_logits", "tile logits"), ("topk_values", "top-k values"), ("topk_indices", "top-k indices"),
        ("candidate_values", "candidate values"), ("candidate_indices", "candidate indices"),
    ):  # fmt: skip
        yield Region(
            f"prefill plan, {label}", owner, patches, _region(up["prefill"], name), _region(ours["prefill"], name),
            Lifetime.PROCESS, Term.ACTIVATION, Term.ACTIVATION, "FP32 scores and selections of a plan's rows",
            reached=reach.fork, part_of=arena, missing=REFUSED,
        )  # fmt: skip
    for case, what in (("decode", "decode"), ("captures", "captures")):
        beside = [side[case].get("transient_bytes") for side in (up, ours)]
        step = (beside[0] or 0) * profile.index_layers
        yield Region(
            f"fold beside the plan, {what}, {ours[case]['case']['rows']:,} rows", owner.replace("scratch", "paged"),
            ("b12x/indexer-regions",), beside[0], beside[1], Lifetime.CALL, Term.NONE, Term.NONE,
            f"in each of {profile.index_layers} layers of an eager step: {step:,} B" if step
            else _refusals(up[case], ours[case]) or "the fold is in the plan, or off",
            reached=reach.fork and case == "decode", missing=REFUSED,
        )  # fmt: skip
    direct = profile.largest_capture_rows * profile.max_model_len
    both = [side["direct_bytes"] for side in (answers.upstream, answers.overlay)]
    yield Region(
        "direct logits of a whole context", owner.replace("scratch", "kernel"), ("b12x/indexer-direct-outputs",),
        both[0], both[1], Lifetime.CALL, Term.NONE, Term.NONE,
        f"{direct:,} scores: no engine takes this route; without out= a call over max_output_bytes is an error",
        reached=False,
    )  # fmt: skip


def _largest(plans: Mapping[str, Mapping[str, Any]]) -> int | None:
    """Bytes of the largest plan; None where one was refused."""
    refused = any("none" in plan for plan in plans.values())
    return None if refused else max(int(plan["nbytes"]) for plan in plans.values())


def _refusals(up: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """Why a plan was refused, upstream or by the overlay; "" if it was not."""
    sides = [(side, plan["none"]) for side, plan in (("upstream", up), ("overlay", ours)) if "none" in plan]
    return "; ".join(f"refused, {side}: {why}" for side, why in sides)


def _region(plan: Mapping[str, Any], name: str) -> int | None:
    """Bytes of a plan's region; None where the plan was refused."""
    if "none" in plan:
        return None
    return sum(int(region["nbytes"]) for region in plan["regions"] if region["name"] == name)
