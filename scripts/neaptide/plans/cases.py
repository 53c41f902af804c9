"""The plans that ``neaptide plans`` shows."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class PlanCase:
    """Capacities of a plan: query rows, tokens of context, ``fp8`` or ``mxfp4`` keys.

    Attributes:
        sms: multiprocessors of the device. A planner on a CPU takes 1; an RTX 6000 Pro Blackwell has 188.
        budget_mib: what the plan may take; 0 for no budget. Upstream has none, and plans without.
        heads: of the indexer.
        page: tokens of a page of its cache.
        topk: keys that a row keeps.
    """

    mode: str
    rows: int
    tokens: int
    keys: str = "fp8"
    sms: int = 1
    budget_mib: int = 0
    heads: int = 32
    page: int = 64
    topk: int = 2048

    @property
    def name(self) -> str:
        device = "" if self.sms == 1 else f", {self.sms} SMs"
        bound = f", under {self.budget_mib:,} MiB" if self.budget_mib else ""
        return f"{self.mode} {self.rows} rows, {self.tokens // 1024}K, {self.keys}{device}{bound}"


TOKENS = (65536, 524288, 1 << 20)
TOPK = {"fp8": 2048, "mxfp4": 512}
DECODE = (4, 16, 17, 48, 64)
PREFILL = (256, 512, 1024, 2048, 3072, 4096)
_WITHOUT_BUDGET = tuple(
    PlanCase(mode, rows, tokens, keys, sms, topk=TOPK[keys])
    for keys in ("fp8", "mxfp4")
    for mode, counts in (("decode", DECODE), ("prefill", PREFILL))
    for tokens in TOKENS
    for rows in counts
    for sms in ((1, 188) if keys == "fp8" and mode == "decode" and rows <= 16 else (1,))
)
CASES = (
    *_WITHOUT_BUDGET,
    *(PlanCase("prefill", rows, tokens, budget_mib=192) for tokens in TOKENS for rows in (3072, 4096)),
    *(
        PlanCase("prefill", rows, tokens, "mxfp4", budget_mib=1024, topk=TOPK["mxfp4"])
        for tokens in TOKENS
        for rows in (3072, 4096)
    ),
)


def as_spec() -> list[dict[str, Any]]:
    """What the child program is given."""
    return [asdict(case) for case in CASES]
