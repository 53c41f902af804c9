"""Cases of the indexer bench: prefill ladders and decode steps, each a small declared object."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Ladder:
    """One prompt, prefilled chunk by chunk.

    Attributes:
        chunk: query rows of a step (``max_num_batched_tokens``).
        total: tokens of the prompt, and the longest context.
        kpool: tokens of a pool; above 1 the GLM kpool op runs instead of the shared one.
        layers: indexer layers that score each chunk.
    """

    name: str
    chunk: int
    total: int
    kpool: int = 1
    layers: int = 2

    def as_dict(self) -> dict[str, Any]:
        return {"kind": "prefill", **asdict(self)}


@dataclass(frozen=True)
class Decode:
    """One decode step of ``rows`` sequences, half to all of ``columns`` long, ``next_n`` query rows of each."""

    name: str
    rows: int
    columns: int
    next_n: int = 1

    def as_dict(self) -> dict[str, Any]:
        return {"kind": "decode", **asdict(self)}


LADDERS = (
    Ladder("8192-to-98304", 8192, 98304),
    Ladder("4608-to-184320", 4608, 184320),
    Ladder("3072-to-196608", 3072, 196608),
    Ladder("3072-to-522240", 3072, 522240),
    Ladder("kpool4-4608-to-225792", 4608, 225792, kpool=4),
)
_SHAPES = [(rows, columns) for columns in (131072, 1048576) for rows in (6, 48, 64, 256, 786)]
DECODES = (
    *(Decode(f"decode-{rows}-of-{columns}", rows, columns) for rows, columns in _SHAPES),
    *(Decode(f"decode-128x{next_n}-of-1048576", 128, 1048576, next_n) for next_n in (2, 4)),
)
CASES: dict[str, Ladder | Decode] = {**{c.name: c for c in LADDERS}, **{c.name: c for c in DECODES}}
