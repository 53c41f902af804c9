# SPDX-License-Identifier: Apache-2.0
"""What the two-level fold of the paged indexer needs, and whether it gets it. Arithmetic only, without torch.

A supertile of scores is cut into slices of 16,384 tokens; the top-k of every slice is a candidate, and one last
pass selects from all of them. The other route, the carry chain, selects after each supertile from the last selection
and the new scores. Both are exact; sets can differ among equal scores at the cut, as between any two runs.

The number of slices is not monotone in the width: a supertile has one slice at least, and above 32 slices they grow.
So a fold that was reserved for the planned width does not bound narrower calls: each asks :func:`fold_within`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

SLICE_TOKENS = 16384
MOST_SLICES = 32
CANDIDATE_BYTES = 8
LENGTH_BYTES = 4
DEFAULT_BUDGET_MIB = 256
MODE = "B12X_INDEXER_TWO_LEVEL_FOLD"
BUDGET_MIB = "B12X_INDEXER_TWO_LEVEL_FOLD_MAX_MIB"
# Count of each supertile, and how many come before it.
Slices = tuple[tuple[int, int], ...]
PHYSICAL = "physical output requires the carry chain"
SHORT = "the context is below two slices"
OFF = "the plan's policy has the fold off"
_MODES = {
    **dict.fromkeys(("0", "false", "off", "no"), "off"),
    **dict.fromkeys(("1", "true", "on", "yes"), "on"),
    "auto": "auto",
}


@dataclass(frozen=True)
class FoldPolicy:
    """Upstream's switches as they were when a plan was made: ``mode`` is auto, on or off.

    In ``auto`` no fold takes more than ``budget`` bytes.
    """

    mode: str
    budget: int


def fold_policy(environment: Mapping[str, str] = os.environ) -> FoldPolicy:
    """The policy that upstream's variables ask for.

    Raises:
        ValueError: a mode or a budget that upstream refuses, too.
    """
    raw = environment.get(MODE, "auto").strip().lower()
    if raw not in _MODES:
        raise ValueError(f"{MODE} is {raw!r}, wanted one of {', '.join(_MODES)}")
    mebibytes = environment.get(BUDGET_MIB, str(DEFAULT_BUDGET_MIB))
    try:
        budget = int(mebibytes)
    except ValueError as error:
        raise ValueError(f"{BUDGET_MIB} is {mebibytes!r}, wanted a whole number of MiB, 0 or more") from error
    if budget < 0:
        raise ValueError(f"{BUDGET_MIB} is {budget}, wanted a whole number of MiB, 0 or more")
    return FoldPolicy(_MODES[raw], budget << 20)


@dataclass(frozen=True)
class FoldShape:
    """One call: ``rows`` queries, ``topk`` of each, over a page table of ``width`` pages of ``page_size`` tokens,
    scored in supertiles of ``supertile_pages``."""

    rows: int
    topk: int
    width: int
    page_size: int
    supertile_pages: int

    def __post_init__(self) -> None:
        wrong = [name for name, value in vars(self).items() if value < 1]
        if wrong:
            raise ValueError(f"a fold of {wrong[0]} {getattr(self, wrong[0])}, wanted 1 or more")

    @property
    def tokens(self) -> int:
        return self.width * self.page_size

    def slice_counts(self) -> tuple[int, ...]:
        """Slices of each supertile; none below two slices of context."""
        if self.tokens < 2 * SLICE_TOKENS:
            return ()
        least = -(-self.tokens // MOST_SLICES)
        extent = SLICE_TOKENS if least <= SLICE_TOKENS else -(-least // self.page_size) * self.page_size
        whole, rest = divmod(self.width, self.supertile_pages)
        chunks = [self.supertile_pages] * whole + ([rest] if rest else [])
        return tuple(-(-pages * self.page_size // extent) for pages in chunks)

    def nbytes(self) -> int:
        """Bytes of the candidates' values and indices and of the lengths; 0 where there is no fold."""
        slices = sum(self.slice_counts())
        return self.rows * (slices * self.topk * CANDIDATE_BYTES + LENGTH_BYTES) if slices else 0


@dataclass(frozen=True)
class Fold:
    """How one call folds: ``slices`` has the count of each supertile and the candidates before it; none for a carry.

    Has the fields of upstream's plan, whose place it takes.
    """

    slices: Slices = ()
    total_slices: int = 0
    candidate_nbytes: int = 0
    budget_nbytes: int = 0
    reason: str = "carry"


def reserved_for(shape: FoldShape, policy: FoldPolicy, *, decode: bool, physical: bool) -> tuple[int, str]:
    """Bytes to reserve so that a call of ``shape`` folds, or 0 and why.

    The fold puts slices side by side where rows alone do not fill the device: few rows, long context. So
    ``auto`` reserves for decode plans only, within upstream's budget; ``on`` reserves always.

    Args:
        physical: the call puts out physical slots, which only the carry chain does.
    """
    needed, auto = shape.nbytes(), policy.mode == "auto"
    for given_up, why in (
        (physical, PHYSICAL),
        (not needed, SHORT),
        (policy.mode == "off", OFF),
        (auto and not decode, "a prefill plan folds in the carry's bytes, where they are enough"),
        (auto and needed > policy.budget, f"it would take {needed} B, over the policy's {policy.budget}"),
    ):
        if given_up:
            return 0, why
    return needed, ""


def fold_within(shape: FoldShape, reserved: int, *, allowed: bool, physical: bool) -> Fold:
    """The fold of a call if ``reserved`` bytes, which its plan lets it use, hold it; else none.

    Args:
        allowed: whether the plan's policy lets calls fold.
    """
    counts = shape.slice_counts()
    needed = shape.nbytes()
    for given_up, why in (
        (physical, PHYSICAL),
        (not counts, SHORT),
        (not allowed, OFF),
        (needed > reserved, f"it needs {needed} B, the plan has {reserved} for it"),
    ):
        if given_up:
            return Fold(candidate_nbytes=needed, budget_nbytes=reserved, reason=why)
    *before, total = accumulate(counts, initial=0)
    return Fold(tuple(zip(counts, before, strict=True)), total, needed, reserved, "within the reserved bytes")
