"""The b12x under test: its classes, and how a call of its release is made ready and made."""

from __future__ import annotations

import importlib
import itertools
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from operations import Operation

_REQUESTS = itertools.count()
# Its prepare call, where it has to do more than nothing.
_PLAIN = "OneshotAllReducePool.all_reduce"


@dataclass(frozen=True)
class Surfaces:
    """What this b12x offers.

    Attributes:
        planned: maths wants a prepared plan (1.5).
        patched: pools have replay groups, release and transient captures.
        slotted: rings have slots by wire mode.
    """

    exchange: Any
    oneshot: Any
    dma: Any
    planned: bool
    patched: bool
    slotted: bool


@lru_cache(maxsize=1)
def surfaces() -> Surfaces:
    exchange, oneshot, dma = (
        importlib.import_module(f"b12x.comm.pcie.{name}") for name in ("pcie_dcp_a2a", "pcie_oneshot", "pcie_dma")
    )
    if torch.cuda.is_available():
        from extensions import share

        share()
    return Surfaces(
        exchange, oneshot, dma,
        planned="require_prepared" in vars(exchange),
        patched=hasattr(exchange.PCIeDCPA2APool, "release"),
        slotted="fits" in vars(dma),
    )  # fmt: skip


@lru_cache(maxsize=1)
def session(device: torch.device) -> Any:
    """One session for all plans: at the end of each preparation a session drops kernels that are not its plans'."""
    from b12x.preparation import PreparationSession, detect_device

    return PreparationSession(device=detect_device(device), autotune=False, compile_workers=0)


def prepared_plan(runtime: Any, surface: str, call: dict[str, Any]) -> Any:
    """A plan for calls like this one on a live channel, its kernels compiled; launches nothing."""
    from b12x.comm.pcie import plan, query_from_runtime
    from b12x.preparation import PreparedCall

    made = plan(query_from_runtime(runtime, surface=surface, call=call), runtime=runtime)

    def bind(state: Any) -> Any:
        # A plain oneshot call needs the graph's metadata bound to the channel; upstream does it as it primes.
        if surface == _PLAIN:
            state.bind_input(call["inp"])
        return PreparedCall(run=lambda: None)

    request = made.request(name=f"pcie-child-{next(_REQUESTS)}", prepare_call=bind)
    session(runtime.device).prepare((request,), autotune=False)
    return made


@dataclass
class Pool:
    """A pool under test, and the plans of what runs on its channels."""

    pool: Any
    prefix: str
    plans: dict[tuple[object, ...], Any] = field(default_factory=dict)

    def ready(self, channel: Any, operations: list[Operation]) -> None:
        """Make plans for a channel; before any capture, on the stream of use."""
        if not surfaces().planned:
            return
        for operation in operations:
            key = (id(channel), *operation.key)
            if key not in self.plans:
                self.plans[key] = prepared_plan(channel, f"{self.prefix}.{operation.method}", operation.call)

    def forget(self) -> None:
        """Drop the plans, and with them the channels that they refer to; after their graphs."""
        if self.plans:
            session(self.pool.device).release_many(tuple(self.plans.values()))
        self.plans.clear()

    def run(self, channel: Any, operation: Operation, channel_id: str | None = None) -> None:
        """Enqueue one operation: within a capture scope, or on the channel of an id."""
        more = {"plan": self.plans[(id(channel), *operation.key)]} if surfaces().planned else {}
        getattr(self.pool, operation.method)(**operation.call, **more, channel_id=channel_id)

    def eager(self, channel_id: str, operation: Operation) -> None:
        channel = self.pool.for_stream(channel_id=channel_id)
        self.ready(channel, [operation])
        self.run(channel, operation, channel_id)
