"""Both trees of both targets asked about a profile, at once."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from neaptide.both_trees import Question
from neaptide.ledger.profiles import Profile
from neaptide.ledger.trees import module_trees, read_source, whole_trees
from neaptide.ledger.vllm_modules import MODULES
from neaptide.output import Progress
from neaptide.plans.cases import PlanCase
from neaptide.session import Options
from neaptide.slabs.cases import Dma, Exchange, Oneshot

FOLDER = Path(__file__).parent
COMMAND = "ledger"


@dataclass(frozen=True)
class Answers:
    """What the two trees of a target say, each in its child's form."""

    upstream: dict[str, Any]
    overlay: dict[str, Any]


class Asked(Question):
    """A question whose trees are at hand."""

    def start(self, trees: Sequence[Path], options: Options, pool: ThreadPoolExecutor) -> list[Future[Any]]:
        """Asks the trees, each in a child process of its own."""
        return [pool.submit(self._answer, tree, options.python) for tree in trees]


def b12x_spec(profile: Profile) -> dict[str, Any]:
    """Shapes of a profile for ``b12x_child``."""
    world, dcp = profile.tensor_parallel, profile.decode_context_parallel
    exchange = Exchange(
        dcp, profile.exchange_rows, profile.exchanged_heads, profile.kv_lora_rank, profile.query_head_dim
    )
    shapes = {
        "exchange": asdict(exchange) if dcp > 1 and profile.exchange_rows else None,
        "oneshot": asdict(Oneshot(world, profile.oneshot_kib << 10)) if world > 1 else None,
        "dma": asdict(Dma(world, profile.widest_all_reduce, profile.ring_wire_mode)) if world > 1 else None,
    }
    decode = PlanCase("decode", profile.decode_rows, profile.max_model_len, sms=profile.multiprocessors)
    budget = profile.indexer_plan_budget_mib
    prefill = PlanCase("prefill", profile.max_num_batched_tokens, profile.max_model_len, budget_mib=budget)
    # More rows than the fused route takes, one plan for every rank of a deployment: a tiled plan needs no device.
    tiled = PlanCase("decode", max(profile.largest_capture_rows, 1), profile.max_model_len, sms=profile.multiprocessors)
    cases = {"decode": decode, "captures": tiled, "prefill": prefill}
    return {
        "channels": shapes,
        "plans": {
            "heads": profile.index_heads, "page": profile.page_size, "topk": profile.index_topk,
            "cases": {name: asdict(case) for name, case in cases.items()},
        },
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
    overlay = str(options.root / "overlay")
    b12x = Asked(FOLDER / "b12x_child.py", [b12x_spec(profile) for profile in profiles], COMMAND)
    told = {"profiles": [profile.for_child() for profile in profiles], "overlay": overlay}
    vllm = Asked(FOLDER / "vllm_child.py", told, COMMAND)
    with tempfile.TemporaryDirectory(prefix="neaptide-ledger-") as name, ThreadPoolExecutor(4) as pool:
        folder = Path(name)
        # The children of b12x, which take longest, run while vLLM is planned.
        source = read_source(options.root, pin, "b12x", progress)
        of_b12x = b12x.start(whole_trees(source, folder / "b12x"), options, pool)
        source = read_source(options.root, pin, "vllm", progress)
        of_vllm = vllm.start(module_trees(source, MODULES, folder / "vllm"), options, pool)
        sides = [[one.result() for one in asked] for asked in (of_vllm, of_b12x)]
    by_target = [[Answers(*pair) for pair in zip(*two, strict=True)] for two in sides]
    return list(zip(*by_target, strict=True))
