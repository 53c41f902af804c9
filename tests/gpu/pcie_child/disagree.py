"""Ranks that ask for different things: an error on each of them, nothing left behind, and a retry that works."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from families import FAMILIES
from memory import Meter, opened_and_closed
from surfaces import surfaces


def _errors(context: Any, name: str, attempt: Callable[[], object]) -> None:
    """Every rank must get an error from ``attempt``."""
    message = ""
    try:
        attempt()
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    silent = [rank for rank, text in enumerate(context.everyones(message)) if not text]
    context.row(name, message=message[:400], ranks_without_error=silent, failed=bool(silent))


def run_disagree(context: Any) -> None:
    for name, family in FAMILIES.items():
        opened_and_closed(context, family)
        meter = Meter(context)
        pool = family.pool(context).pool
        _ids(context, name, pool)
        if surfaces().patched:
            _groups(context, name, pool)
            _releases(context, name, pool)
            _transient(context, name, pool)
        pool.close()
        del pool
        left = meter.drop()
        context.row(f"{name}-left", left_bytes=left, failed=left > 0)
    if surfaces().slotted:
        _rings(context)


def _count(context: Any, name: str, pool: Any, wanted: int) -> None:
    found = len(pool._all_channels)
    context.row(name, channels=found, wanted_channels=wanted, failed=found != wanted)


def _ids(context: Any, name: str, pool: Any) -> None:
    def capture() -> None:
        stream = context.machine.stream()
        with context.machine.on(stream), pool.capture(stream, channel_id=f"graph-{context.rank}"):
            pass

    _errors(context, f"{name}-ids", lambda: pool.prepare_channels((f"id-{context.rank}",)))
    _errors(context, f"{name}-captured-ids", capture)
    _count(context, f"{name}-ids-left", pool, 0)


def _groups(context: Any, name: str, pool: Any) -> None:
    group = f"group-{context.rank}"
    _errors(context, f"{name}-groups", lambda: pool.prepare_channels(("a",), replay_group=group))
    some = None if context.rank == 0 else "group"
    _errors(context, f"{name}-group-on-one-rank", lambda: pool.prepare_channels(("a",), replay_group=some))
    _count(context, f"{name}-groups-left", pool, 0)
    pool.prepare_channels(("a", "b"), replay_group="group")
    _count(context, f"{name}-groups-retry", pool, 1)


def _releases(context: Any, name: str, pool: Any) -> None:
    mine = ("a",) if context.rank == 0 else ("a", "b")
    _errors(context, f"{name}-releases", lambda: pool.release(mine))
    _count(context, f"{name}-releases-left", pool, 1)
    pool.release(("a", "b"))
    _count(context, f"{name}-releases-retry", pool, 0)


def _transient(context: Any, name: str, pool: Any) -> None:
    def attempt() -> None:
        with pool.transient_captures():
            pool.prepare_channels(("one",))
            if context.rank == context.world - 1:
                raise LookupError("a rank fails while it captures")
            pool.prepare_channels(("two",))

    _errors(context, f"{name}-transient", attempt)
    _count(context, f"{name}-transient-left", pool, 0)
    with pool.transient_captures():
        pool.prepare_channels(("one", "two"))
    _count(context, f"{name}-transient-retry", pool, 0)


def _rings(context: Any) -> None:
    first = context.rank == 0
    attempts: dict[str, dict[str, Any]] = {
        "ring-modes": {"fp8": "ring" if first else "ag", "max_bytes": 1 << 20},
        "ring-capacities": {"fp8": "ring", "max_bytes": (1 << 20) + 4096 * context.rank},
        "ring-invalid-mode": {"fp8": "nonsense" if first else "ring", "max_bytes": 1 << 20},
        "ring-invalid-capacity": {"fp8": "", "max_bytes": 0 if first else 1 << 20},
    }

    def made(**arguments: Any) -> Any:
        return surfaces().dma.PCIeDmaAllReduce(
            exchange_group=context.exchange, device=context.device, **arguments
        )  # fmt: skip

    meter = Meter(context)
    for name, arguments in attempts.items():
        _errors(context, name, partial(made, **arguments))
    left = meter.drop()
    context.row("ring-left", left_bytes=left, failed=left > 0)
    ring = made(fp8="ring", max_bytes=1 << 20)
    context.machine.sync()
    context.meet()
    ring.close()
    context.row("ring-retry")
