# SPDX-License-Identifier: Apache-2.0
"""The regions of the paged indexer's scratch: what lies in each, on which route, for how long, and where.

Layout, views and report follow from :func:`regions_of`. The counts are upstream's own, from its layout; what is
decided here is which regions a plan has, and which of them share bytes.

A call runs, for each supertile: *gather* (packed keys, packed_contiguous only), *score* (tile logits), *select* (into
the carry, or into the fold's candidates), and at the end *finish* (the last selection goes to the caller's outputs).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .fold_sizes import FoldPolicy, FoldShape, fold_policy, reserved_for

ALIGNMENT = 1024
WORD = 4
KEY_BYTES = 128
FUSED, PACKED = "paged_fused", "packed_contiguous"
ABSENT = -1


@dataclass(frozen=True)
class Region:
    """``name`` is upstream's, of the field ``<name>_offset_bytes``; our own are told by :attr:`ours`.

    Attributes:
        nbytes: 0 for a region that this plan never touches.
        live: the first and the last step of its contents, or "call" for all of it.
        shares: regions of one such name stand next to each other in the list. Upstream's lie in a row, as they are used
            together; each of ours lies over that row, for no call uses both.
        absent_because: why it has no bytes.
    """

    name: str
    nbytes: int
    written_by: str
    read_by: str
    live: str
    shares: str = ""
    ours: bool = False
    absent_because: str = ""


@dataclass(frozen=True)
class Placed:
    """A region at its offset; :data:`ABSENT` for one without bytes."""

    region: Region
    offset: int


@dataclass(frozen=True)
class PagedMemory:
    """Where everything lies.

    Attributes:
        placed: the regions in their order.
        nbytes: of the whole scratch.
        fold_offset, fold_bytes: where a fold's candidates go; 0 bytes for no fold.
        policy: of the fold, as it was when the plan was made.
        notes: what was left out or shared, and why.
    """

    placed: tuple[Placed, ...]
    nbytes: int
    fold_offset: int
    fold_bytes: int
    policy: FoldPolicy
    notes: tuple[str, ...]

    @property
    def folds(self) -> bool:
        """Whether the policy lets calls fold."""
        return self.policy.mode != "off"

    @property
    def fold_limit(self) -> int:
        """The most of ``fold_bytes`` that a call may take, by the policy."""
        return min(self.fold_bytes, self.policy.budget) if self.policy.mode == "auto" else self.fold_bytes

    def offset_of(self, name: str) -> int:
        """Offset of a region in bytes, or :data:`ABSENT`."""
        return next((placed.offset for placed in self.placed if placed.region.name == name), ABSENT)


def aligned(size: int) -> int:
    """``size`` rounded up to the alignment of regions."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def logits_nbytes(rows: int, width: int) -> int:
    """Bytes of logits [rows, width], fp32."""
    return rows * width * WORD


def fold_shape(caps: Any, layout: Any) -> FoldShape:
    """The call of a plan's capacities."""
    page_size = int(caps.page_size)
    return FoldShape(
        int(caps.max_q_rows),
        int(caps.topk),
        int(caps.max_page_table_width),
        page_size,
        max(1, int(layout.supertile_tokens) // page_size),
    )


def regions_of(caps: Any, layout: Any, policy: FoldPolicy) -> list[Region]:
    """The regions of a plan, but for MSA, in the order in which they lie.

    Args:
        caps: upstream's paged caps, with ``output_physical_slots`` and ``caller_outputs``.
        layout: upstream's layout of them, for its counts.
    """
    rows, topk, fused, packed = int(caps.max_q_rows), int(caps.topk), layout.route == FUSED, layout.route == PACKED
    scores = "" if not fused else "the fused route scores and selects in one launch"
    gathers = "" if packed else "only the packed route gathers keys"
    own = "the caller passes the outputs" if caps.caller_outputs else scores
    halves = 2 * rows * topk * WORD if layout.max_chunks > 1 else 0
    single = scores or ("" if halves else "one supertile holds the whole context")
    folds, no_fold = reserved_for(
        fold_shape(caps, layout), policy, decode=caps.mode == "decode", physical=bool(caps.output_physical_slots)
    )
    choice = getattr(caps, "choice", None)  # of a plan with a budget
    if folds and choice is not None and not choice.fold:
        folds, no_fold = 0, "the plan's budget"
    called = rows if choice is None else int(choice.call_rows)  # a direct call has no chunks
    direct = logits_nbytes(called, int(caps.paged_logits_k_rows)) if caps.reserve_paged_logits else 0
    no_direct = "" if direct else "the caps reserve no logits for direct calls"

    def region(name: str, nbytes: int, writer: str, reader: str, live: str, absent: str = "", **more: Any) -> Region:
        return Region(name, 0 if absent else nbytes, writer, reader, live, absent_because=absent, **more)

    keys, pack = int(layout.gather_k_rows), int(layout.fused_pack_elements)
    no_pack = "" if fused else "only the fused route merges across blocks"
    return [
        region("gather_k_quant", keys * KEY_BYTES, "gather", "score", "gather-score", gathers),
        region("gather_k_scale", keys * WORD, "gather", "score", "gather-score", gathers),
        region("contiguous_lengths", rows * WORD, "gather", "score", "gather-score", gathers),
        region("runtime_lengths", rows * WORD, "gather", "score", "gather-score", gathers),
        region("tile_logits", int(layout.tile_logits_elements) * WORD, "score", "select", "score-select", scores),
        region("topk_values", rows * topk * WORD, "finish", "caller", "finish", own),
        region("topk_indices", rows * topk * WORD, "finish", "caller", "finish", own),
        region("candidate_values", halves, "select", "select, finish", "call", single, shares="selection"),
        region("candidate_indices", halves, "select", "select, finish", "call", single, shares="selection"),
        region("fold", folds, "select", "finish", "call", scores or no_fold, shares="selection", ours=True),
        region("merge_positions", 0, "nobody", "nobody", "never", "upstream merges in the selection"),
        region("active_width", WORD, "bind", "score", "call"),
        region("fused_pack_values", pack * WORD, "fused launch", "fused launch", "call", no_pack),
        region("fused_pack_indices", pack * WORD, "fused launch", "fused launch", "call", no_pack),
        region("fused_merge_state", int(layout.fused_state_words) * WORD, "bind", "fused launch", "plan", no_pack),
        region("paged_logits", direct, "direct call", "caller", "call", no_direct, ours=True),
    ]  # fmt: skip


def place(regions: Sequence[Region]) -> tuple[tuple[Placed, ...], int]:
    """Offsets one behind the other, and the size of all.

    Regions that share lie where the first of them stands: upstream's in a row, each of ours from there.

    Raises:
        ValueError: regions that share do not stand next to each other.
    """
    cursor, placed = 0, []
    bases: dict[str, int] = {}
    ends: dict[str, int] = {}
    for region in regions:
        if not region.nbytes:
            placed.append(Placed(region, ABSENT))
            continue
        if region.shares in bases and placed[-1].region.shares != region.shares:
            raise ValueError(
                f"region {region.name} shares {region.shares!r}, and others lie between; put them in a row"
            )
        base = bases.setdefault(region.shares, cursor) if region.shares else cursor
        start = base if region.ours else ends.get(region.shares, base)
        placed.append(Placed(region, start))
        end = start + aligned(region.nbytes)
        if region.shares and not region.ours:
            ends[region.shares] = end
        cursor = max(cursor, end)
    return tuple(placed), cursor


def memory_of(caps: Any, layout: Any, policy: FoldPolicy | None = None) -> PagedMemory | None:
    """The memory of a plan; None for MSA, whose scratch is upstream's."""
    if str(caps.score_mode) == "msa":
        return None
    policy = fold_policy() if policy is None else policy
    placed, nbytes = place(regions_of(caps, layout, policy))
    shared = [item for item in placed if item.region.shares and item.region.nbytes]
    start = min((item.offset for item in shared), default=0)
    end = max((item.offset + aligned(item.region.nbytes) for item in shared), default=0)
    notes = [f"{item.region.name}: none, {item.region.absent_because}" for item in placed if item.region.absent_because]
    notes += getattr(getattr(caps, "choice", None), "reasons", ())
    if len(shared) > 2:
        notes.append("fold and carry share their bytes: a call has one of them")
    return PagedMemory(
        placed,
        max(nbytes, ALIGNMENT),
        fold_offset=start,
        fold_bytes=end - start,
        policy=policy,
        notes=tuple(notes),
    )


def laid_out(caps: Any, layout: Any) -> Any:
    """Upstream's layout with our offsets and size; as it was for MSA."""
    memory = memory_of(caps, layout)
    if memory is None:
        return layout
    offsets: Mapping[str, int] = {
        f"{item.region.name}_offset_bytes": item.offset for item in memory.placed if not item.region.ours
    }
    return replace(layout, nbytes=memory.nbytes, memory=memory, **offsets)
