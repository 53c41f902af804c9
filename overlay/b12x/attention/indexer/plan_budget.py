# SPDX-License-Identifier: Apache-2.0
"""How a plan of the paged indexer comes within a budget: in this order, each step only as far as it has to.

1. Regions that the route never touches have no bytes, and carry and fold share theirs: always, whatever the budget.
2. The fold gives up what it has beyond the carry.
3. Supertiles of 16,384 tokens instead of 32,768. Not below: a supertile is one slice of the fold at least, so smaller
   ones grow its candidates, and each costs another pass over the carry.
4. Fewer query rows in one launch, in chunks of one size, a multiple of 32; the last may be smaller. A row's scores and
   selection depend on that row alone, so chunks change no result but the choice among equal scores at the cut, as
   between any two runs.

MXFP4 plans have step 4 alone: their selection reads a row at its whole width, and callers that reduce scores over ranks
read the matrix itself, so supertiles would change what the plan is; chunks change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace
from typing import Any

ROW_MULTIPLE = 32
LEAST_SUPERTILE = 16384
# FP8 chunks of fewer rows have the scorer's tile of 256 keys instead of 512; the MXFP4 scorers have one for all.
LEAST_CHUNK = 1024
OPERAND = "plan_budget"


@dataclass(frozen=True)
class Budget:
    """What a plan may take, in bytes.

    Attributes:
        plan_bytes: the budget; 0 for none.
        arena_bytes: what the arena that the plan lies in holds anyway, for its second-largest consumer: nothing is
            saved below it.
        least_chunk_rows: the smallest launch, a multiple of 32; 0 for the smallest with the kernels of a whole one,
            1,024 rows of FP8 keys or 32 of MXFP4.
    """

    plan_bytes: int = 0
    arena_bytes: int = 0
    least_chunk_rows: int = 0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"plan_budget.{name} is {value!r}, wanted an integer of 0 or more")
        if self.least_chunk_rows % ROW_MULTIPLE:
            raise ValueError(
                f"plan_budget.least_chunk_rows is {self.least_chunk_rows}, wanted a multiple of {ROW_MULTIPLE}, or 0"
            )
        if not self.plan_bytes and (self.arena_bytes or self.least_chunk_rows):
            raise ValueError("plan_budget has no plan_bytes, wanted them with arena_bytes and least_chunk_rows")

    @property
    def bound(self) -> int:
        """The most bytes of a plan; 0 for no bound."""
        return max(self.plan_bytes, self.arena_bytes)


@dataclass(frozen=True)
class Choice:
    """How a plan is made.

    Attributes:
        call_rows: query rows of a call.
        rows: query rows of one launch.
        supertile: tokens of a supertile.
        fold: whether the fold keeps what it has beyond the carry.
        nbytes: of the plan.
        reasons: what was given up, in order, and why.
    """

    call_rows: int
    rows: int
    supertile: int
    fold: bool
    nbytes: int
    reasons: tuple[str, ...] = ()


class BudgetTooSmall(ValueError):
    """No plan that is allowed is within the budget."""


def chosen(budget: Budget, *, rows: int, supertile: int, size: Callable[[int, int, bool], int], least: int) -> Choice:
    """The plan of the first step that is within the budget.

    Args:
        rows: all query rows.
        supertile: tokens of a supertile without a budget.
        size: bytes of a plan by rows, supertile and whether the fold keeps its bytes.
        least: the smallest launch where the budget names none.

    Raises:
        BudgetTooSmall: not even the last step is.
    """
    choice = Choice(rows, rows, supertile, True, size(rows, supertile, True))
    bound, reasons = budget.bound, []
    smaller = min(supertile, LEAST_SUPERTILE)
    for tried, why in (
        ((rows, supertile, False), "the fold has the carry's bytes only"),
        ((rows, smaller, False), f"supertiles of {smaller:,} tokens"),
    ):
        if choice.nbytes > bound and (nbytes := size(*tried)) < choice.nbytes:
            reasons.append(f"{why}: {choice.nbytes:,} B -> {nbytes:,} B")
            choice = Choice(rows, *tried, nbytes, tuple(reasons))
    if choice.nbytes <= bound:
        return choice
    return _in_chunks(bound, choice, min(budget.least_chunk_rows or least, rows), size)


def _in_chunks(bound: int, whole: Choice, least: int, size: Callable[[int, int, bool], int]) -> Choice:
    """The fewest launches that are within the bound."""
    for launches in range(2, -(-whole.rows // least) + 1):
        chunk = max(least, -(-whole.rows // launches // ROW_MULTIPLE) * ROW_MULTIPLE)
        if (nbytes := size(chunk, whole.supertile, False)) <= bound:
            why = f"{launches} launches of {chunk:,} rows: {whole.nbytes:,} B -> {nbytes:,} B"
            return replace(whole, rows=chunk, fold=False, nbytes=nbytes, reasons=(*whole.reasons, why))
    raise BudgetTooSmall(
        f"a plan of {whole.rows:,} rows takes {size(least, whole.supertile, False):,} B in launches of {least:,} rows, "
        f"wanted {bound:,} B or less; raise plan_bytes, or lower least_chunk_rows"
    )


def refuse_unbounded(caps: Any) -> None:
    """Nothing for caps without a budget, and for those that a planner bounds.

    Raises:
        ValueError: a budget for a contiguous source or for MSA.
    """
    source, mode = getattr(caps, "source_layout", "paged"), str(caps.score_mode)
    if caps.plan_budget.bound and (source != "paged" or mode == "msa"):
        raise ValueError(
            f"plan_budget for a plan of source_layout {source!r} and score_mode {mode!r}, wanted a paged one, not msa; "
            "leave the budget out"
        )


def within_budget(caps: Any, layout_of: Callable[[Any], Any]) -> Any:
    """Paged caps of one launch of the plan that ``caps`` ask for; as they are without a budget.

    Args:
        layout_of: upstream's layout of paged caps, in bytes ``nbytes`` with ``supertile_tokens``.

    Raises:
        BudgetTooSmall: no plan is within it.
    """
    budget = caps.plan_budget
    if not budget.bound:
        return caps

    def launch(choice: Choice) -> Any:
        batch = min(choice.rows, caps.max_batch)
        return replace(
            caps, max_q_rows=choice.rows, max_batch=batch, paged_tile_logits_k_rows=choice.supertile,
            plan_budget=Budget(), choice=choice,
        )  # fmt: skip

    call_rows, supertile = int(caps.max_q_rows), int(layout_of(caps).supertile_tokens)

    def size(rows: int, supertile: int, fold: bool) -> int:
        return int(layout_of(launch(Choice(call_rows, rows, supertile, fold, 0))).nbytes)

    return launch(chosen(budget, rows=call_rows, supertile=supertile, size=size, least=LEAST_CHUNK))


def mxfp4_within_budget(caps: Any, plan_of: Callable[[Any], Any]) -> Any:
    """Caps of one launch of the MXFP4 plan that ``caps`` ask for; as they are without a budget.

    Args:
        plan_of: upstream's plan of such caps, in bytes ``nbytes``. One that it refuses is too large.

    Raises:
        BudgetTooSmall: no plan is within the budget.
    """
    budget = _asked(caps)
    if not budget.bound:
        return caps

    def launch(rows: int, choice: Choice | None = None) -> SimpleNamespace:
        return SimpleNamespace(**{**vars(caps), "max_q_rows": rows, "plan_budget": Budget(), "choice": choice})

    def size(rows: int, *_: object) -> int:
        try:
            return int(plan_of(launch(rows)).nbytes)
        except ValueError:  # more scores than its selection can address
            return max(-(-rows // ROW_MULTIPLE) * int(plan_of(launch(ROW_MULTIPLE)).nbytes), budget.bound + 1)

    choice = chosen(budget, rows=int(caps.max_q_rows), supertile=0, size=size, least=ROW_MULTIPLE)
    return launch(choice.rows, choice)


def with_budget(operands: Mapping[str, Any], caps: Any) -> Any:
    """A declaration's operands with the budget of its caps, which is part of what the plan is; as they were without."""
    budget = _asked(caps)
    if not budget.bound:
        return operands
    frozen = type(operands)
    return frozen({**dict(operands), OPERAND: frozen(asdict(budget))})


def _asked(caps: Any) -> Budget:
    """None asked for by caps of a caller's own class, which upstream takes here."""
    budget: Budget = getattr(caps, "plan_budget", Budget())
    return budget


def budget_of(query: Any) -> Budget:
    """The budget of a declaration."""
    return Budget(**dict(query.operands.get(OPERAND, {})))
