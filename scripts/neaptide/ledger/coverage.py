"""Which patches of the series promise bytes that no region of the ledger shows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from neaptide.ledger.regions import Region
from neaptide.model import Patch

# Why a patch that recovers bytes has no region, by its id. At present each has one.
WITHOUT_REGION: dict[str, str] = {}


def uncovered(patches: Iterable[Patch], regions: Sequence[Region]) -> list[str]:
    """Patches whose header recovers bytes, and that neither a region nor a reason speaks of."""
    named = {name for region in regions for name in region.patches} | set(WITHOUT_REGION)
    promising = [patch for patch in patches if any(recovery.bytes for recovery in patch.header.recovers)]
    return [patch.id for patch in promising if patch.id not in named]
