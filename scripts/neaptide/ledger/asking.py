"""Both trees of both targets asked about a profile, at once."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from neaptide.both_trees import Question, module_trees, read_source, whole_trees
from neaptide.ledger.profiles import Profile
from neaptide.ledger.vllm_modules import MODULES
from neaptide.output import Progress
from neaptide.plans.cases import PlanCase
from neaptide.session import Options
from neaptide.simulate.ladders import overlay_sizes
from neaptide.slabs.cases import Dma, Exchange, Oneshot

FOLDER = Path(__file__).parent
COMMAND = "ledger"


@dataclass(frozen=True)
class Answers:
    """What the two trees of a target say, each in its child's form."""

    upstream: dict[str, Any]
    overlay: dict[str, Any]


def b12x_spec(profile: Profile, sizes: Any) -> dict[str, Any]:
    """Shapes of a profile for ``b12x_child``.

    Args:
        sizes: the overlay's module that counts the rows of a decode step.
    """
    world, dcp = profile.tensor_parallel, profile.decode_context_parallel
    exchange = Exchange(
        dcp, profile.exchange_rows, profile.exchanged_heads, profile.kv_lora_rank, profile.query_head_dim
    )
    shapes = {
        "exchange": asdict(exchange) if dcp > 1 and profile.exchange_rows else None,
        "oneshot": asdict(Oneshot(world, profile.oneshot_kib << 10)) if world > 1 else None,
        "dma": asdict(Dma(world, profile.widest_all_reduce, profile.ring_wire_mode)) if world > 1 else None,
    }
    rows = sizes.max_decode_rows(profile.max_num_seqs, profile.max_num_batched_tokens, profile.speculative_tokens)
    own: dict[str, Any] = {"heads": profile.index_heads, "page": profile.page_size, "topk": profile.index_topk}
    budget = profile.indexer_plan_budget_mib
    prefill = PlanCase("prefill", profile.max_num_batched_tokens, profile.max_model_len, budget_mib=budget, **own)
    # Captures have more rows than the fused route takes: a tiled plan, the same for every rank, needs no device.
    decode, tiled = (
        PlanCase("decode", count, profile.max_model_len, sms=profile.multiprocessors, **own)
        for count in (rows, max(profile.largest_capture_rows, 1))
    )
    cases = {"decode": decode, "captures": tiled, "prefill": prefill}
    return {
        "channels": shapes,
        "plans": {name: asdict(case) for name, case in cases.items()},
        "direct": {
            "rows": profile.largest_capture_rows, "pages": profile.max_model_len // profile.page_size,
            "page": profile.page_size, "heads": profile.index_heads, "head_dim": profile.index_head_dim,
        },
    }  # fmt: skip


def ask(profiles: Sequence[Profile], pin: str, options: Options, progress: Progress) -> list[tuple[Answers, Answers]]:
    """What vLLM and b12x say of each profile at a pin, pristine and patched.

    Raises:
        NeaptideError: a series that does not plan clean, or a Python that cannot compute sizes.
    """
    overlay = options.root / "overlay"
    sizes = overlay_sizes(overlay)
    b12x = Question(FOLDER / "b12x_child.py", [b12x_spec(profile, sizes) for profile in profiles], COMMAND)
    told = {"profiles": [profile.for_child() for profile in profiles], "overlay": str(overlay)}
    vllm = Question(FOLDER / "vllm_child.py", told, COMMAND)
    with tempfile.TemporaryDirectory(prefix="neaptide-ledger-") as name, ThreadPoolExecutor(4) as pool:
        folder = Path(name)
        # The children of b12x, which take longest, run while vLLM is planned.
        source = read_source(options.root, pin, "b12x", progress)
        of_b12x = [pool.submit(b12x.answer, tree, options.python) for tree in whole_trees(source, folder / "b12x")]
        source = read_source(options.root, pin, "vllm", progress)
        trees = module_trees(source, MODULES, folder / "vllm")
        of_vllm = [pool.submit(vllm.answer, tree, options.python) for tree in trees]
        sides = [[one.result() for one in asked] for asked in (of_vllm, of_b12x)]
    by_target = [[Answers(*pair) for pair in zip(*two, strict=True)] for two in sides]
    return list(zip(*by_target, strict=True))
