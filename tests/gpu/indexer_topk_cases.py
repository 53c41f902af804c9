"""The cases of ``indexer_topk_child.py``: plans, calls of them, and the scores and lengths that a call has."""

from __future__ import annotations

from dataclasses import dataclass

import torch

DEVICE = torch.device("cuda", 0)
SHORT = (0, 1, 5, 2047, 2048, 2049, 16383, 16384, 16385, 32767, 32768, 32769, 33000, 70000)


@dataclass(frozen=True)
class Case:
    """A plan of ``rows`` over ``tokens``, and a call with ``live_rows`` over ``live_tokens`` of them, or all.

    ``budget_bytes`` is the plan's budget, in a tree that has budgets.
    """

    name: str
    rows: int
    tokens: int
    fold: str = "auto"
    physical: bool = False
    prefill: bool = False
    lengths: str = "long"
    scores: str = "normal"
    live_rows: int = 0
    live_tokens: int = 0
    budget_bytes: int = 0


CASES = [
    *(
        Case(f"{name}-{rows}x{tokens}", rows, tokens, fold, physical)
        for rows, tokens in ((48, 524_288), (64, 524_288), (48, 768_000))
        for name, fold, physical in (("fold", "auto", False), ("carry", "off", False), ("physical", "auto", True))
    ),
    *(
        Case(f"{what}-{name}", 48, 524_288, fold, physical, lengths=lengths, scores=scores)
        for what, lengths, scores in (("short", "short", "normal"), ("ties", "long", "ties"), ("near", "long", "near"))
        for name, fold, physical in (("fold", "auto", False), ("carry", "off", False), ("physical", "auto", True))
    ),
    Case("few-pages-fold", 48, 524_288, live_tokens=33_280),
    Case("no-fold-below-two-slices", 48, 524_288, live_tokens=4096),
    Case("fewer-rows-fold", 48, 524_288, live_rows=17),
    Case("fewer-rows-carry", 48, 524_288, "off", live_rows=17),
    Case("prefill-400x524288", 400, 524_288, prefill=True),
    Case("prefill-400x524288-carry", 400, 524_288, "off", prefill=True),
    Case("prefill-fewer-rows", 400, 524_288, prefill=True, live_rows=300),
    Case("prefill-few-rows", 400, 524_288, prefill=True, live_rows=16),
    Case("prefill-short", 400, 524_288, prefill=True, lengths="short"),
    Case("prefill-budget", 3072, 65_536, prefill=True, budget_bytes=192 << 20),
    Case("prefill-budget-fewer-rows", 3072, 65_536, prefill=True, budget_bytes=192 << 20, live_rows=3000),
]


def scores_of(case: Case, rows: int, tokens: int) -> torch.Tensor:
    """Scores [rows, tokens] fp32: normal, of some 200 values only, or so near that a radix sees one bin."""
    generator = torch.Generator(DEVICE).manual_seed(len(case.name) * rows)
    scores = torch.randn((rows, tokens), generator=generator, device=DEVICE)
    if case.scores == "ties":
        scores = (scores * 24).round() / 24
    elif case.scores == "near":
        scores = 1000 + scores / 64
    return scores


def lengths_of(case: Case, rows: int, tokens: int) -> torch.Tensor:
    if case.lengths == "short":
        lengths = [min(SHORT[row % len(SHORT)], tokens) for row in range(rows)]
        lengths[-1] = tokens
        return torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    return torch.linspace(tokens // 2, tokens, rows, device=DEVICE).to(torch.int32)
