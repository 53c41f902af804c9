"""Bytes of channels: what the device's free memory drops by, beside the arithmetic, and what is left afterwards."""

from __future__ import annotations

from typing import Any

from devices import GRANULE_BYTES, rounded
from families import Family
from surfaces import surfaces

GROUP = "one at a time"
IDS = ("a", "b", "c", "d")


def sure_bytes(slab_bytes: int) -> int:
    """What the device's free memory must change by with a slab: small ones share a granule of the driver."""
    return slab_bytes if slab_bytes >= GRANULE_BYTES else 0


# The driver keeps a granule back while a pool has a channel, after upstream's rollback, too; none after close().
KEPT_BYTES = GRANULE_BYTES


class Meter:
    """Free memory, relative to when it was made."""

    def __init__(self, context: Any) -> None:
        self.context = context
        self.start = self._free()

    def _free(self) -> int:
        self.context.machine.settle()
        self.context.meet()
        found = int(self.context.machine.free_bytes())
        self.context.meet()
        return found

    def drop(self) -> int:
        return self.start - self._free()


def one_graph(context: Any, family: Family, pool: Any, name: str) -> None:
    """Capture a graph under ``name``, replay it once, and destroy it."""
    operations = family.eager(context)
    stream = context.machine.stream()
    with context.machine.on(stream), pool.pool.capture(stream, channel_id=name) as channel:
        pool.ready(channel, operations)

        def body() -> None:
            for operation in operations:
                pool.run(channel, operation)

        body()
        graph = context.machine.graph(stream, body)
    with context.machine.on(stream):
        graph.replay()
    context.machine.sync()


def opened_and_closed(context: Any, family: Family) -> None:
    """A pool with a channel, for what the first of its kind loads."""
    pool = family.pool(context).pool
    pool.prepare_channels(("warm",))
    pool.close()


def run_bytes(context: Any, family: Family) -> None:
    # Kernels, libraries and communicators are in the device's memory before it is read, and stay as long as this pool.
    keeper = family.pool(context)
    one_graph(context, family, keeper, "warm")
    opened_and_closed(context, family)
    whole = Meter(context)
    _isolated(context, family)
    _left(context, whole, "after-close")
    if surfaces().patched:
        _grouped(context, family)
        _left(context, whole, "after-close-of-group")
        _transient(context, family)
        _left(context, whole, "after-close-of-transient")
    keeper.forget()
    keeper.pool.close()


def _left(context: Any, meter: Meter, name: str) -> None:
    left = meter.drop()
    context.row(name, left_bytes=left, failed=left > 0)


def _isolated(context: Any, family: Family) -> None:
    meter = Meter(context)
    pool = family.pool(context).pool
    empty = meter.drop()
    pool.prepare_channels(IDS)
    slab = family.slab_bytes(context, pool._all_channels[0])
    context.row(
        "isolated", outcome="measured", ids=len(IDS), channels=len(pool._all_channels), empty_pool_drop_bytes=empty,
        free_drop_bytes=meter.drop(), slab_bytes=slab, arithmetic_bytes=len(IDS) * rounded(slab),
    )  # fmt: skip
    before = meter.drop()
    checkpoint = pool.checkpoint_channels()
    pool.prepare_channels(("e", "f"))
    made = meter.drop()
    pool.rollback_channels(checkpoint)
    del checkpoint
    left = meter.drop() - before
    context.row(
        "rollback",
        made_bytes=made - before,
        left_bytes=left,
        failed=left > KEPT_BYTES or made - before < 2 * sure_bytes(slab),
    )
    if surfaces().patched:
        pool.release(("b", "d"))
        after = meter.drop()
        context.row(
            "release-2-of-4", freed_bytes=before - after, free_drop_bytes=after, channels=len(pool._all_channels),
            failed=before - after < 2 * sure_bytes(slab) or len(pool._all_channels) != 2,
        )  # fmt: skip
    pool.close()


def _grouped(context: Any, family: Family) -> None:
    meter = Meter(context)
    pool = family.pool(context).pool
    pool.prepare_channels(IDS, replay_group=GROUP)
    drop, slab = meter.drop(), family.slab_bytes(context, pool._all_channels[0])
    context.row(
        "grouped", ids=len(IDS), channels=len(pool._all_channels), free_drop_bytes=drop, slab_bytes=slab,
        arithmetic_bytes=rounded(slab), failed=len(pool._all_channels) != 1,
    )  # fmt: skip
    pool.release(IDS[:3])
    kept = meter.drop()
    pool.release(IDS[3:])
    left = meter.drop()
    context.row(
        "release-group",
        kept_bytes=kept,
        left_bytes=left,
        failed=kept != drop or left > drop - sure_bytes(slab) + KEPT_BYTES,
    )
    pool.close()


def _transient(context: Any, family: Family) -> None:
    pool = family.pool(context)
    pool.pool.prepare_channels(("kept",))
    slab = family.slab_bytes(context, pool.pool._all_channels[0])
    meter = Meter(context)
    with pool.pool.transient_captures():
        for index in range(3):
            one_graph(context, family, pool, f"profiled-{index}")
            pool.forget()
        inside = meter.drop()
    left = meter.drop()
    context.row(
        "transient", captures=3, inside_bytes=inside, left_bytes=left, channels=len(pool.pool._all_channels),
        failed=left > KEPT_BYTES or inside < 3 * sure_bytes(slab) or len(pool.pool._all_channels) != 1,
    )  # fmt: skip
    pool.pool.close()
