"""One rank: its groups, its device, its journal, and the cases in order."""

from __future__ import annotations

import datetime
import json
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from devices import Cpu, Gpu

HOST_SECONDS = 120


@dataclass
class Context:
    """What a case gets.

    Attributes:
        exchange: the group that b12x exchanges handles and contracts over; NCCL, which both releases take.
        host: a gloo group for this program's own meetings, so that they never meet b12x's.
        machine: streams, graphs and memory.
    """

    rank: int
    world: int
    spec: dict[str, Any]
    exchange: Any
    host: Any
    machine: Gpu | Cpu
    journal: Callable[[dict[str, Any]], None]
    case: str = ""
    failed: list[str] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        return self.machine.device

    @property
    def reduced(self) -> bool:
        return bool(self.spec["sizes"] == "reduced")

    def row(self, name: str, *, failed: bool = False, **quantities: Any) -> None:
        """One result. A failed one does not end the case."""
        outcome = quantities.pop("outcome", "failed" if failed else "passed")
        head = {"case": self.case, "variant": self.spec["variant"], "name": name, "rank": self.rank}
        self.journal({"event": "row", "row": {**head, "outcome": outcome, **quantities}})

    def meet(self) -> None:
        dist.barrier(group=self.host)

    def everyones(self, mine: object) -> list[Any]:
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, mine, group=self.host)
        return found


def where(error: BaseException) -> list[str]:
    return [f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in traceback.extract_tb(error.__traceback__)]


def versions(planned: bool) -> dict[str, str]:
    from importlib import metadata

    found = {"planned": str(planned)}
    for name in ("b12x", "torch", "nvidia-cutlass-dsl"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


def be_rank(rank: int, spec: dict[str, Any], path: Path) -> int:
    """Run the cases of ``spec`` as this rank; leaves with status 1 at the first exception, as its peers may hang."""
    handle = open(path, "a")  # noqa: SIM115 - open until the process ends

    def journal(entry: dict[str, Any]) -> None:
        handle.write(json.dumps(entry, default=str) + "\n")
        handle.flush()

    world = int(spec["world_size"])
    if spec["dry"]:
        import standins

        standins.install()
    machine: Gpu | Cpu = Cpu(rank) if spec["dry"] else Gpu(rank)
    dist.init_process_group(
        "gloo" if spec["dry"] else "nccl", init_method=f"file://{spec['rendezvous']}", rank=rank, world_size=world,
        timeout=datetime.timedelta(seconds=HOST_SECONDS),
    )  # fmt: skip
    host = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=HOST_SECONDS))
    context = Context(rank, world, spec, dist.group.WORLD, host, machine, journal)
    from surfaces import surfaces

    journal({"event": "facts", "facts": {"versions": versions(surfaces().planned), "device": machine.name}})
    status = run_cases(context, spec["cases"])
    if spec["clean_exit"] and not status:
        dist.destroy_process_group()
        return 0
    # Neither torch's nor a peer's teardown is under test, and either may hang.
    os._exit(status)


def run_cases(context: Context, cases: Sequence[str]) -> int:
    from catalog import CASES

    for name in cases:
        context.case = name
        context.meet()
        context.journal({"event": "start", "case": name})
        began = time.monotonic()
        try:
            CASES[name](context)
            context.machine.settle()
        except BaseException as error:
            message = f"{type(error).__name__}: {error}"[:2000]
            context.row("exception", failed=True, message=message, where=where(error))
            return 1
        context.row("time", outcome="measured", case_seconds=round(time.monotonic() - began, 3))
        context.meet()
        context.journal({"event": "end", "case": name})
    return 0
