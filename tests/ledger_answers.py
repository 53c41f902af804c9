"""What fake children answer to the ledger, and the regions that come of it. No torch."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from neaptide.ledger import command
from neaptide.ledger.asking import Answers, b12x_spec
from neaptide.ledger.profiles import Profile, load_profile
from neaptide.ledger.regions import Lifetime, Region, Term
from neaptide.session import Options
from neaptide.simulate.ladders import overlay_sizes

ROOT = Path(__file__).resolve().parents[1]
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


def region(name: str, upstream: int | None, overlay: int | None, **more: Any) -> Region:
    return Region(
        name, "owner", (), upstream, overlay, Lifetime.CALL, Term.NONE, Term.ACTIVATION, "", **more
    )  # fmt: skip


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "ask", lambda profiles, *given: [answers(one) for one in profiles])
