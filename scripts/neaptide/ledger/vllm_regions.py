"""Regions that vLLM allocates, from what both trees say of a profile."""

from __future__ import annotations

from collections.abc import Iterator

from neaptide.ledger.asking import Answers
from neaptide.ledger.kept import Logits, prefill_logits
from neaptide.ledger.profiles import Profile
from neaptide.ledger.regions import Lifetime, Region, Term

OP = "vllm/model_executor/layers/sparse_attn_indexer.py"
KPOOL_OP = "vllm/models/glm5next/nvidia/sparse_indexer.py"
OPS = (OP, KPOOL_OP)
MLA = "vllm/model_executor/layers/attention/mla_attention.py"
FA3 = "vllm/v1/attention/backends/mla/flashattn_mla_sparse.py"
# FlashAttention 3's sparse MLA.
SPLITTING = "FLASH_ATTN_MLA_SPARSE"


def vllm_regions(profile: Profile, answers: Answers, logits_patch: str) -> Iterator[Region]:
    """All of them.

    Args:
        logits_patch: the patch of the pin's era that bounds prefill logits.
    """
    yield from workspace(profile, answers)
    yield from prefill(profile, answers, logits_patch)
    yield from decode(profile, answers, logits_patch)
    yield from attention(profile, answers)
    yield from measured(profile)


def _op(profile: Profile) -> str:
    """The module of the indexer's op."""
    return KPOOL_OP if profile.model == "glm5next" else OP


def workspace(profile: Profile, answers: Answers) -> Iterator[Region]:
    """Slots of the shared workspace, as far as the indexer decides them."""
    up, ours = answers.upstream["profile_run"], answers.overlay["profile_run"]
    yield Region(
        "workspace lane 0, the indexer's keys", _op(profile), ("vllm/workspace-manager",), up["workspace_bytes"],
        ours["workspace_bytes"], Lifetime.PROCESS, Term.ACTIVATION, Term.ACTIVATION,
        "gathered keys, scales and top-k scratch; a larger request of another layer would set the slot "
        "(needs a device: neaptide bench workspace)",
    )  # fmt: skip
    yield Region(
        "workspace lane 1, the draft's graphs", _op(profile), ("vllm/workspace-lanes",), up["draft_lane_bytes"],
        ours["draft_lane_bytes"], Lifetime.CAPTURE, Term.GRAPHS, Term.GRAPHS,
        f"{ours['lanes']} lanes, upstream {up['lanes']}; what its indexer's graphs hold, other layers' need a device: "
        "neaptide bench workspace" if ours["lanes"] > 1 else "one lane: no draft model on the V2 runner",
        reached=bool(profile.largest_capture_rows),
    )  # fmt: skip


def prefill(profile: Profile, answers: Answers, patch: str) -> Iterator[Region]:
    """Logits of a prompt that fills the context."""
    sides = (answers.upstream["prefill"], answers.overlay["prefill"])
    reserved = [side["profile_run"]["reserved_bytes"] for side in (answers.upstream, answers.overlay)]
    margin = profile.margin_mib << 20
    limits = [margin + room if margin else None for room in reserved]
    up, ours = (prefill_logits(side, limit) for side, limit in zip(sides, limits, strict=True))
    launches = [[logits for chunk in side["chunks"] for logits, _ in chunk] for side in sides]
    over = [
        beyond(room, side.launch_bytes, side.copy_bytes, side.previous_bytes, side.kept_bytes)
        for side, room in zip((up, ours), reserved, strict=True)
    ]
    owner = _op(profile)
    bound = f"within {profile.margin_mib:,} MiB beside the profile's" if margin else "with no bound"
    yield Region(
        "prefill logits, one launch", owner, (patch,), up.launch_bytes, ours.launch_bytes, Lifetime.CALL,
        Term.ACTIVATION, Term.ACTIVATION,
        f"at the fullest moment; {len(launches[0]):,} launches upstream, {len(launches[1]):,} ours, a layer, of at "
        f"most {max(launches[0]):,} B, {max(launches[1]):,} ours; at most {sides[0]['columns']:,} columns; the profile "
        f"reserves {reserved[0]:,} B, {reserved[1]:,} ours",
        upstream_over=over[0][0], overlay_over=over[1][0],
    )  # fmt: skip
    yield Region(
        "prefill logits, FP32 copy", owner, (patch,), up.copy_bytes, ours.copy_bytes, Lifetime.CALL,
        Term.ACTIVATION, Term.ACTIVATION,
        "of BF16 logits" if up.copy_bytes else "none: these kernels write FP32",
        reached=profile.architecture == "sm100",
        upstream_over=over[0][1], overlay_over=over[1][1],
    )  # fmt: skip
    # r12's patch of the logits lets go of the previous launch itself.
    release = "vllm/indexer-drop-previous-logits" if patch.endswith("indexer-logits") else patch
    yield Region(
        "prefill logits, previous launch", owner, (release,), up.previous_bytes, ours.previous_bytes, Lifetime.CALL,
        Term.ACTIVATION, Term.ACTIVATION, "the loop still holds it while the next launch allocates",
        upstream_over=over[0][2], overlay_over=over[1][2],
    )  # fmt: skip
    yield Region(
        "prefill logits, kept by the allocator", owner, (patch,), up.kept_bytes, ours.kept_bytes, Lifetime.PROCESS,
        Term.ACTIVATION, Term.ACTIVATION,
        f"segments beyond these after one prompt of {profile.max_model_len:,} tokens in chunks of "
        f"{profile.chunk_tokens:,}, simulated {bound}; {up.device_allocs} cudaMallocs upstream, "
        f"{ours.device_allocs} ours", upstream_over=over[0][3], overlay_over=over[1][3],
    )  # fmt: skip
    if up.failed or ours.failed:
        yield without_memory(owner, patch, up, ours, bound)


def without_memory(owner: str, patch: str, up: Logits, ours: Logits, bound: str) -> Region:
    """Launches for which there is no memory: what they ask for is nowhere, and so in no sum."""
    name = "prefill logits, launches without memory"
    failed = f"{up.failed:,} upstream, {ours.failed:,} ours"
    return Region(
        name, owner, (patch,), up.wanted_bytes, ours.wanted_bytes, Lifetime.CALL, Term.NONE, Term.NONE,
        f"the most that one of these asks for, {bound}: {failed}; the rows above are of a run that goes on without",
        reached=False, finding=f"{name}: {failed}, {bound}; an engine ends at the first",
    )  # fmt: skip


def beyond(reserved: int, *sizes: int) -> list[int]:
    """Of each size the bytes that a reservation has no room for, those before it in it already."""
    return [min(size, max(0, sum(sizes[: place + 1]) - reserved)) for place, size in enumerate(sizes)]


def decode(profile: Profile, answers: Answers, patch: str) -> Iterator[Region]:
    """Logits of the widest decode step."""
    sides = (answers.upstream, answers.overlay)
    up, ours = (side["decode"] for side in sides)
    captured = profile.full_graphs and up["rows"] <= profile.largest_capture_rows
    term, lifetime = (Term.GRAPHS, Lifetime.CAPTURE) if captured else (Term.ACTIVATION, Lifetime.CALL)
    over = [
        [0, 0] if captured
        else beyond(side["profile_run"]["reserved_bytes"], *(side["decode"][n] for n in ("logits_bytes", "copy_bytes")))
        for side in sides
    ]  # fmt: skip
    where = "in the pool of the FULL graphs" if captured else "of an eager step"
    owner = _op(profile)
    yield Region(
        "decode logits", owner, (patch,), up["logits_bytes"], ours["logits_bytes"], lifetime, term, term,
        f"{up['rows']:,} rows, {ours['rows_at_once']:,} at once with the overlay; {where}",
        upstream_over=over[0][0], overlay_over=over[1][0],
    )  # fmt: skip
    yield Region(
        "decode logits, FP32 copy", owner, (patch,), up["copy_bytes"], ours["copy_bytes"], lifetime, term, term,
        f"of BF16 logits; {where}" if up["copy_bytes"] else "none: these kernels write FP32, or BF16 is read",
        reached=profile.architecture == "sm100" and bool(up["copy_bytes"]),
        upstream_over=over[0][1], overlay_over=over[1][1],
    )  # fmt: skip


def attention(profile: Profile, answers: Answers) -> Iterator[Region]:
    """Sparse MLA: what the kernel's splits and a whole batch take."""
    up, ours = answers.upstream, answers.overlay
    profiled = ours["splits"]["profiled"]
    splitting = profile.attention_backend == SPLITTING
    yield Region(
        "split accumulators of sparse MLA", FA3, ("vllm/mla-split-budget",), up["splits"]["bytes"],
        ours["splits"]["bytes"], Lifetime.CALL, Term.NONE, Term.ACTIVATION if profiled else Term.NONE,
        "of an eager call of the worst number of rows; a captured one is upstream's"
        if splitting else f"{profile.attention_backend} has none, {SPLITTING} would",
        reached=splitting,
    )  # fmt: skip
    moments = (up["transients"], ours["transients"])
    here = moments[1]["profiled"] and profile.model != "deepseek_v41"
    tensors = ", ".join(name for name, size in moments[1]["tensors"].items() if size)
    yield Region(
        "sparse MLA over a whole batch", MLA, ("vllm/mla-profile-transients",), moments[0]["bytes"],
        moments[1]["bytes"], Lifetime.CALL, Term.NONE, Term.ACTIVATION if here else Term.NONE,
        f"{moments[1]['moment']} of {profile.max_num_batched_tokens:,} rows: {tensors}" if here
        else "this model's attention is another" if moments[1]["profiled"] else "the formulas are those of vLLM 0.33",
        reached=here,
    )  # fmt: skip


def measured(profile: Profile) -> Iterator[Region]:
    """What no arithmetic gives."""
    runner = "gpu_model_runner.py" if profile.runner == "v1" else "gpu/cudagraph_utils.py"
    for name, owner in (
        ("graph estimate", f"vllm/v1/worker/{runner}"),
        ("buffers of the attention builders", "vllm/v1/attention/backends"),
    ):
        yield Region(
            name, owner, ("vllm/graph-estimate",), None, None, Lifetime.CAPTURE, Term.GRAPHS, Term.GRAPHS,
            f"needs a device: neaptide bench engine --scenario graphs-{profile.runner}-full",
        )  # fmt: skip
