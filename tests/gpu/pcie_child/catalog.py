"""The cases by name."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from disagree import run_disagree
from families import FAMILIES
from groups import run_groups
from memory import run_bytes
from numerics import run_numerics
from ring import run_ring


def _well(context: Any) -> None:
    context.row("well", ranks=context.everyones(context.rank))


def _raises(context: Any) -> None:
    if context.rank == 1:
        raise ValueError("as asked")
    context.meet()


def _hangs(context: Any) -> None:
    context.row("before")
    time.sleep(3600 if context.rank == 1 else 0)


def _dies(context: Any) -> None:
    if context.rank == 0:
        os._exit(7)
    time.sleep(3600)


CASES: dict[str, Callable[[Any], None]] = {
    "ring-numerics": run_ring,
    "disagree": run_disagree,
    # Of this program itself.
    "self-well": _well,
    "self-raises": _raises,
    "self-hangs": _hangs,
    "self-dies": _dies,
}
for _name, _family in FAMILIES.items():
    CASES[f"{_name}-bytes"] = partial(run_bytes, family=_family)
    CASES[f"{_name}-numerics"] = partial(run_numerics, family=_family)
    CASES[f"{_name}-groups"] = partial(run_groups, family=_family)
