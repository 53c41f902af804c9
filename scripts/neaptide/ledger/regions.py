"""A region of memory, and what a list of them adds up to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any


class Lifetime(StrEnum):
    """How long a region is held: by captured graphs, for a call, or until the process ends."""

    CAPTURE = "capture"
    CALL = "call"
    PROCESS = "process"


class Term(StrEnum):
    """The term of vLLM's budget in which a region is counted when the KV cache is sized."""

    ACTIVATION = "peak activation"
    GRAPHS = "graph estimate"
    NON_TORCH = "non-torch"
    NONE = "none"


@dataclass(frozen=True)
class Region:
    """A named piece of one rank's memory.

    Attributes:
        owner: the module that allocates it.
        patches: those that change it.
        upstream_bytes, overlay_bytes: None where there is no size: it takes a device, or a planner refused.
        upstream_term, overlay_term: where each side's is counted.
        upstream_over, overlay_over: bytes of a side beyond what its term has reserved, and so counted in none.
        reached: whether this pin's engine, as the profile has it, gets there.
        part_of: the region whose bytes these are; "" for one of its own.
        note: what the numbers rest on; why it is not reached, or which command measures it.
        missing: what stands in place of a size that is None.
        finding: what somebody should look into; "" for nothing.
    """

    name: str
    owner: str
    patches: tuple[str, ...]
    upstream_bytes: int | None
    overlay_bytes: int | None
    lifetime: Lifetime
    upstream_term: Term
    overlay_term: Term
    note: str
    reached: bool = True
    part_of: str = ""
    upstream_over: int = 0
    overlay_over: int = 0
    missing: str = "device"
    finding: str = ""

    @property
    def saved_bytes(self) -> int | None:
        """Upstream's bytes less the overlay's; None unless both are known."""
        if self.upstream_bytes is None or self.overlay_bytes is None:
            return None
        return self.upstream_bytes - self.overlay_bytes

    @property
    def computed(self) -> bool:
        return self.saved_bytes is not None

    @property
    def summed(self) -> bool:
        """Whether it is in the sums: reached, of a known size, and in no other region."""
        return self.reached and self.computed and not self.part_of

    @property
    def counted(self) -> Region:
        """The same, with no term on a side that has no bytes, or none that its term has room for."""
        found = self
        if self.upstream_bytes == self.upstream_over:
            found = replace(found, upstream_term=Term.NONE, upstream_over=0)
        if self.overlay_bytes == self.overlay_over:
            found = replace(found, overlay_term=Term.NONE, overlay_over=0)
        return found

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "patches": list(self.patches), "summed": self.summed}


@dataclass(frozen=True)
class Sum:
    """Both sides of some regions, in bytes of one rank."""

    upstream_bytes: int
    overlay_bytes: int

    @property
    def saved_bytes(self) -> int:
        return self.upstream_bytes - self.overlay_bytes

    def as_dict(self, kv_bytes_per_token: int) -> dict[str, int]:
        return {**asdict(self), "saved_bytes": self.saved_bytes, "saved_kv_tokens": kv_tokens(self, kv_bytes_per_token)}


def kv_tokens(total: Sum, kv_bytes_per_token: int) -> int:
    """Tokens of KV cache that the saving holds on each rank; whole ones, and negative where the overlay takes more."""
    return int(total.saved_bytes / kv_bytes_per_token)


def total(regions: Iterable[Region]) -> Sum:
    """The sum of the regions that are summed."""
    chosen = [region for region in regions if region.summed]
    return Sum(sum(r.upstream_bytes or 0 for r in chosen), sum(r.overlay_bytes or 0 for r in chosen))


def by_lifetime(regions: Sequence[Region]) -> dict[str, Sum]:
    """Sums of each lifetime; together they are the total."""
    return {life.value: total(r for r in regions if r.lifetime is life) for life in Lifetime}


def by_term(regions: Sequence[Region]) -> dict[str, Sum]:
    """Sums of each term of the budget, each side's where that side is counted; together they are the total."""
    upstream, overlay = dict.fromkeys(Term, 0), dict.fromkeys(Term, 0)
    for region in regions:
        if region.summed:
            upstream[region.upstream_term] += (region.upstream_bytes or 0) - region.upstream_over
            upstream[Term.NONE] += region.upstream_over
            overlay[region.overlay_term] += (region.overlay_bytes or 0) - region.overlay_over
            overlay[Term.NONE] += region.overlay_over
    return {term.value: Sum(upstream[term], overlay[term]) for term in Term}


def check_sums(regions: Sequence[Region]) -> None:
    """Refuse a ledger whose parts do not make its totals.

    Raises:
        AssertionError: two regions of one name, a part of nothing, or parts that are more than their region.
    """
    names = [region.name for region in regions]
    assert len(set(names)) == len(names), f"two regions of one name among {names}"
    known = {region.name: region for region in regions}
    for region in regions:
        assert not region.part_of or region.part_of in known, f"{region.name} is part of {region.part_of}, no region"
    for name in {region.part_of for region in regions if region.part_of}:
        parts = [region for region in regions if region.part_of == name]
        for side in ("upstream_bytes", "overlay_bytes"):
            whole, most = getattr(known[name], side), max(getattr(part, side) or 0 for part in parts)
            assert whole is None or most <= whole, f"a part of {name} is larger than it: {most} of {whole}"
