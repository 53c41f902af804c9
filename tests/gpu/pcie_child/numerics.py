"""Results of single operations, eager and in a graph, against references of this program's own."""

from __future__ import annotations

from typing import Any

from families import Family
from operations import Operation

SEEDS = (1, 2, 3)


def run_numerics(context: Any, family: Family) -> None:
    pool = family.pool(context)
    machine, stream = context.machine, context.machine.stream()
    pool.pool.prepare_channels(("eager",))
    for index, (operation, in_graph) in enumerate(family.numerics(context)):
        with machine.on(stream):

            def eager(operation: Operation = operation) -> None:
                pool.eager("eager", operation)

            _check(context, operation, "eager", eager)
        if in_graph:
            _check_graph(context, pool, operation, f"graph-{index}")
    machine.sync()
    pool.forget()
    pool.pool.close()


def _check_graph(context: Any, pool: Any, operation: Operation, name: str) -> None:
    machine, stream = context.machine, context.machine.stream()
    with machine.on(stream), pool.pool.capture(stream, channel_id=name) as channel:
        pool.ready(channel, [operation])
        pool.run(channel, operation)
        graph = machine.graph(stream, lambda: pool.run(channel, operation))
    with machine.on(stream):
        _check(context, operation, "graph", graph.replay)
    machine.sync()


def _check(context: Any, operation: Operation, how: str, run: Any) -> None:
    """Run with several inputs; one row."""
    worst, wrong = 0.0, 0
    for seed in SEEDS:
        operation.refresh(seed)
        context.machine.sync()
        context.meet()
        run()
        context.machine.sync()
        wrong += int(operation.mismatches())
        worst = max(worst, operation.max_abs_error())
    context.row(
        operation.label, how=how, max_abs_error=worst, tolerance=operation.tolerance, mismatches=wrong,
        failed=wrong > 0,
    )  # fmt: skip
