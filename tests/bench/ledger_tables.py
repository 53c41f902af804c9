"""The tables of ``docs/ledger.md``: what ``neaptide ledger turnkey`` and ``gate`` print (``make plots``)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from neaptide.bench.results import between_markers
from neaptide.errors import NeaptideError
from neaptide.ledger import command
from neaptide.ledger.asking import ask
from neaptide.ledger.profiles import load_profile
from neaptide.ledger.regions import Region
from neaptide.ledger.show import COLUMNS, SUM_COLUMNS, region_row, sum_rows
from neaptide.output import Progress
from neaptide.pins import DEFAULT_PIN
from neaptide.session import Options

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "ledger.md"
NAMES = ("turnkey", "gate")


def marker(name: str) -> str:
    return f"ledger {name}"


def tables(regions: Sequence[Region], kv_bytes_per_token: int) -> str:
    """Regions and sums of one rank, as the command's tables have them."""
    both = ((COLUMNS, [region_row(one) for one in regions]), (SUM_COLUMNS, sum_rows(regions, kv_bytes_per_token)))
    return "\n".join("\n".join([_line(head), "|---" * len(head) + "|", *map(_line, rows), ""]) for head, rows in both)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> int:
    options, progress = Options(root=ROOT, build=ROOT / "build"), Progress()
    profiles = [load_profile(ROOT, name) for name in NAMES]
    try:
        answers = ask(profiles, DEFAULT_PIN, options, progress)
    except NeaptideError as error:
        progress.note(f"error: {error}")
        return int(error.code)
    for profile, both in zip(profiles, answers, strict=True):
        regions = command.ledger(profile, DEFAULT_PIN, options, both)
        between_markers(PAGE, marker(profile.name), tables(regions, profile.kv_bytes_per_token))
    return 0


if __name__ == "__main__":
    sys.exit(main())
