"""Graphs that share a channel, replayed in every order, with eager calls between; and what sharing costs."""

from __future__ import annotations

import itertools
import random
import statistics
from dataclasses import dataclass
from typing import Any

import torch
from families import Family
from operations import Operation
from surfaces import Pool, surfaces

GROUP = "one at a time"
CHUNKS = 20
EAGER_EVERY = 11
TURNS, TURN_ROUNDS = 15, 200
ISOLATED_SHARE = 10


@dataclass
class Rig:
    """One pool with graphs on it.

    Attributes:
        plain: graphs of operations only.
        checked: the same operations in graphs that end by counting their own mismatches into ``wrong``.
        stream: where all of them are replayed, and eager calls made.
    """

    name: str
    pool: Pool
    stream: Any
    chains: list[list[Operation]]
    eager: list[Operation]
    plain: list[Any]
    checked: list[Any]
    wrong: torch.Tensor

    def everything(self) -> list[Operation]:
        return [*itertools.chain(*self.chains), *self.eager]


def make_rig(context: Any, family: Family, group: str | None) -> Rig:
    pool, machine = family.pool(context), context.machine
    joins = {} if group is None else {"replay_group": group}
    pool.pool.prepare_channels(("eager",), **joins)
    rig = Rig(
        "isolated" if group is None else "grouped", pool, machine.stream(), family.graphs(context),
        family.eager(context), [], [], torch.zeros((), dtype=torch.int64, device=context.device),
    )  # fmt: skip
    # Eager first: a group's channel is then bound to this stream, and captured on others all the same.
    _eager(context, rig)
    machine.sync()
    for index, chain in enumerate(rig.chains):
        rig.plain.append(_captured(context, rig, f"graph-{index}", joins, chain, check=False))
        rig.checked.append(_captured(context, rig, f"graph-{index}-checked", joins, chain, check=True))
    channels = len(pool.pool._all_channels)
    ids = 1 + len(rig.plain) + len(rig.checked)
    context.row(
        "channels", policy=rig.name, graphs=ids - 1, channels=channels, failed=channels != (ids if group is None else 1)
    )
    return rig


def _captured(context: Any, rig: Rig, name: str, joins: dict[str, str], chain: list[Operation], *, check: bool) -> Any:
    """A graph of these operations, captured on a stream of its own."""
    machine, stream = context.machine, context.machine.stream()

    def body() -> None:
        for operation in chain:
            rig.pool.run(channel, operation)
        if check:
            for operation in chain:
                rig.wrong.add_(operation.mismatches())

    with machine.on(stream), rig.pool.pool.capture(stream, channel_id=name, **joins) as channel:
        rig.pool.ready(channel, chain)
        body()
        return machine.graph(stream, body)


def _eager(context: Any, rig: Rig) -> None:
    with context.machine.on(rig.stream):
        for operation in rig.eager:
            rig.pool.eager("eager", operation)


def _refresh(context: Any, rig: Rig, seed: int) -> None:
    context.machine.sync()
    for index, operation in enumerate(rig.everything()):
        operation.refresh(seed * 100 + index)
    rig.wrong.zero_()
    context.machine.sync()
    context.meet()


def _wrong(context: Any, rig: Rig, *, whole: bool = True) -> int:
    """Mismatches that the graphs counted, and of all outputs as they are now."""
    context.machine.sync()
    return int(rig.wrong) + (sum(int(operation.mismatches()) for operation in rig.everything()) if whole else 0)


def every_order(context: Any, rig: Rig) -> None:
    wrong = orders = 0
    graphs = [*zip(rig.plain, rig.checked, strict=True)]
    for order in itertools.permutations(graphs):
        for kind in (0, 1):
            _refresh(context, rig, 1 + orders)
            with context.machine.on(rig.stream):
                for pair in order:
                    pair[kind].replay()
            _eager(context, rig)
            wrong += _wrong(context, rig)
            orders += 1
    context.row("every-order", policy=rig.name, orders=orders, mismatches=wrong, failed=wrong > 0)


def interleaved(context: Any, rig: Rig, replays: int) -> None:
    """Graphs in random order, the same on all ranks; every chunk has new inputs and is checked."""
    choice = random.Random(replays)
    per_chunk = max(1, -(-replays // CHUNKS))
    wrong = checked = eager = done = 0
    seconds = 0.0
    for chunk in range(CHUNKS):
        _refresh(context, rig, 1000 + chunk)
        picks = [choice.randrange(2 * len(rig.plain)) for _ in range(per_chunk)]
        # Every output is checked at the end of the chunk, so each graph comes up once.
        picks += range(2 * len(rig.plain))
        everything = [*rig.plain, *rig.checked]

        def body(picks: list[int] = picks, everything: list[Any] = everything) -> None:
            for index, pick in enumerate(picks):
                everything[pick].replay()
                if index % EAGER_EVERY == 0:
                    _eager(context, rig)

        seconds += context.machine.seconds(rig.stream, body)
        wrong += _wrong(context, rig)
        done += len(picks)
        checked += sum(pick >= len(rig.plain) for pick in picks)
        eager += len(range(0, len(picks), EAGER_EVERY)) * len(rig.eager)
    context.row(
        "interleaved", policy=rig.name, replays=done, checked_replays=checked, eager_calls=eager, chunks=CHUNKS,
        mismatches=wrong, mean_replay_seconds=seconds / done, failed=wrong > 0 or done < replays,
    )  # fmt: skip


def compare(context: Any, grouped: Rig, isolated: Rig) -> None:
    """Time of the same graphs, shared and not, in turns."""
    found: dict[str, list[float]] = {"grouped": [], "isolated": []}
    rounds = 20 if context.reduced else TURN_ROUNDS
    for turn in range(TURNS + 2):
        for rig in (grouped, isolated) if turn % 2 == 0 else (isolated, grouped):
            context.machine.sync()
            context.meet()

            def body(rig: Rig = rig) -> None:
                for _ in range(rounds):
                    for graph in rig.plain:
                        graph.replay()

            took = context.machine.seconds(rig.stream, body) / (rounds * len(rig.plain))
            if turn >= 2:
                found[rig.name].append(took)
    medians = {name: statistics.median(values) for name, values in found.items()}
    context.row(
        "replay-time", outcome="measured", turns=TURNS, replays_a_turn=rounds * len(grouped.plain),
        grouped_replay_seconds=medians["grouped"], isolated_replay_seconds=medians["isolated"],
        replay_time_ratio=medians["grouped"] / medians["isolated"],
        fastest_ratio=min(found["grouped"]) / min(found["isolated"]),
    )  # fmt: skip


def released(context: Any, family: Family, rig: Rig) -> None:
    """Drop two graphs, release their ids, replay the others, and capture one of the ids again."""
    rig.plain[0] = rig.checked[1] = None
    context.machine.settle()
    rig.pool.pool.release(("graph-0", "graph-1-checked"))
    rig.plain[0] = _captured(context, rig, "graph-0", {"replay_group": GROUP}, rig.chains[0], check=False)
    _refresh(context, rig, 5)
    with context.machine.on(rig.stream):
        for graph in (*rig.plain, rig.checked[0], rig.checked[2], *rig.plain):
            graph.replay()
    _eager(context, rig)
    wrong, channels = _wrong(context, rig), len(rig.pool.pool._all_channels)
    context.row("released", mismatches=wrong, channels=channels, failed=wrong > 0 or channels != 1)


def run_groups(context: Any, family: Family) -> None:
    replays = int(context.spec["replays"])
    isolated = make_rig(context, family, None)
    every_order(context, isolated)
    interleaved(context, isolated, max(1, replays // ISOLATED_SHARE))
    rigs = [isolated]
    if surfaces().patched:
        grouped = make_rig(context, family, GROUP)
        rigs.append(grouped)
        every_order(context, grouped)
        interleaved(context, grouped, replays)
        compare(context, grouped, isolated)
        released(context, family, grouped)
    for rig in rigs:
        rig.plain.clear()
        rig.checked.clear()
        context.machine.settle()
        rig.pool.forget()
        rig.pool.pool.close()
