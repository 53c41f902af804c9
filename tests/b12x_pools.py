"""Both PCIe channel pools of b12x on a CPU: channels without IPC memory, in one process or on two ranks.

A channel keeps upstream's own rule for streams and, for oneshot, its own capture scope; what it maps and frees is
counted. A pool allocates it as upstream does: a failure on one rank is an error on all of them.
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

A2A, ONESHOT = "a2a", "oneshot"
POOLS = (A2A, ONESHOT)
MODULES = {A2A: "pcie_dcp_a2a", ONESHOT: "pcie_oneshot"}
CHANNELS = {A2A: "PCIeDCPA2A", ONESHOT: "PCIeOneshotAllReduce"}
POOL_CLASSES = {A2A: "PCIeDCPA2APool", ONESHOT: "PCIeOneshotAllReducePool"}
# A collective whose peer does not come fails after this; the processes are killed after RUN_SECONDS.
EXCHANGE_SECONDS = 6
RUN_SECONDS = 90


def module(kind: str) -> ModuleType:
    return importlib.import_module(f"b12x.comm.pcie.{MODULES[kind]}")


def _named(kind: str, names: dict[str, str]) -> Any:
    return getattr(module(kind), names[kind])


class Slab:
    """The part of a channel that is replaced; upstream's class is the other base."""

    _closed = True  # no quarantine when it is collected

    def __init__(self, *, stream_affine: bool) -> None:
        self.device, self.exchange_group = torch.device("cuda:0"), None
        self._stream_affine, self._owner_stream_key = stream_affine, None
        self._eager_ptrs = ((1,), (2,))
        self.unmap_fails = self.unmapped = self.freed = False

    def _close_ipc_imports_strict(self) -> None:
        if self.unmap_fails:
            raise OSError("unmap failed")
        self.unmapped = True

    def _free_ipc_exports_strict(self) -> None:
        assert self.unmapped, "freed before it was unmapped"
        self.freed = True


class Machine:
    """Replaces the device under both pools. ``channels``: all that were made, in order."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.channels: list[Any] = []
        self.channel_class = {kind: type("Channel", (Slab, _named(kind, CHANNELS)), {}) for kind in POOLS}
        self.capturing = False
        self.fail_allocation = False
        self.synchronized = 0
        for kind in POOLS:
            there = module(kind)
            patch.setattr(there, "_require_full_grid_residency", lambda **_: None)
            patch.setattr(there, "_is_current_stream_capturing", lambda device: self.capturing)
            patch.setattr(_named(kind, POOL_CLASSES), "_new_channel", self._allocator(kind))
        patch.setattr(torch.cuda, "synchronize", self._synchronize)

    def _synchronize(self, device: object = None) -> None:
        self.synchronized += 1

    def _allocator(self, kind: str) -> Callable[[Any, int | None], Any]:
        there = module(kind)
        of_factory = _named(kind, POOL_CLASSES)._new_channel

        def new_channel(pool: Any, stream_key: int | None) -> Any:
            def make() -> Any:
                if self.fail_allocation:
                    raise MemoryError("no memory for a slab")
                return self.channel_class[kind](stream_affine=not pool.single_channel)

            if pool._channel_factory is not None:
                return of_factory(pool, stream_key)
            channel = there._run_collective_preallocation_setup(
                owner="slab", exchange_group=pool.exchange_group, setup=make
            )
            self.channels.append(channel)
            channel._bind_stream_key(stream_key)
            pool._all_channels.append(channel)
            return channel

        return new_channel

    def pool(self, kind: str, group: Any, **options: Any) -> Any:
        if kind == A2A:
            options = {"max_batch_size": 1, "total_heads": 2, "head_dim": 8} | options
        else:
            native = SimpleNamespace(meta_size=lambda: 256)
            ipc = SimpleNamespace(cudaSetDevice=lambda index: None)
            options = {"ext_module": native, "ipc": ipc} | options
        rank = dist.get_rank(group=group)
        return _named(kind, POOL_CLASSES)(rank=rank, world_size=2, device="cuda:0", exchange_group=group, **options)

    def factory_pool(self, kind: str, **options: Any) -> Any:
        """A pool that makes its channels by itself: no group, no ids."""

        def factory(stream_key: int | None) -> Any:
            self.channels.append(self.channel_class[kind](stream_affine=True))
            return self.channels[-1]

        if kind == A2A:
            options = {"max_batch_size": 1, "total_heads": 2, "head_dim": 8} | options
        return _named(kind, POOL_CLASSES)(rank=0, world_size=2, device="cuda:0", channel_factory=factory, **options)

    def alive(self) -> list[Any]:
        """Channels that are not freed."""
        return [channel for channel in self.channels if not channel.freed]


def alone(patch: pytest.MonkeyPatch) -> Machine:
    """One process; the peer always says what this rank says."""
    machine = Machine(patch)
    for kind in POOLS:
        patch.setattr(module(kind), "_broadcast_gather_object", lambda state, group: [state, state])
    patch.setattr(dist, "get_rank", lambda group=None: 0)
    patch.setattr(dist, "get_world_size", lambda group=None: 2)
    patch.setattr(dist, "barrier", lambda group=None, device_ids=None: None)
    return machine


class Rank:
    """What a scenario of two ranks gets: this rank's pool and machine, and a log that both ranks return."""

    def __init__(self, rank: int, kind: str, machine: Machine, group: Any) -> None:
        self.rank, self.kind, self.machine, self.group = rank, kind, machine, group
        self.log: dict[str, Any] = {}
        self.pool = machine.pool(kind, group)

    @contextmanager
    def error(self, name: str) -> Iterator[None]:
        """Log the error of this block, its type first; None for none."""
        self.log[name] = None
        try:
            yield
        except Exception as error:
            self.log[name] = f"{type(error).__name__}: {error}"

    def catalog(self) -> dict[str, int]:
        """Id to the number of its channel."""
        numbers = {id(channel): number for number, channel in enumerate(self.machine.channels)}
        return {name: numbers[id(channel)] for name, channel in sorted(self.pool._logical_channels.items())}

    def freed(self) -> list[bool]:
        return [channel.freed for channel in self.machine.channels]


def run_ranks(scenarios: Path, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Run each function of a file that is named scenario_* on two ranks, for both pools.

    Returns:
        ``"{scenario}-{kind}"`` to the two logs. A scenario that raises logs it as ``raised``.

    Raises:
        AssertionError: a rank that did not end in time, with what it did last.
    """
    path = os.pathsep.join([str(Path(__file__).parent), str(scenarios.parent), *filter(None, sys.path)])
    command = [sys.executable, "-m", "b12x_pools", scenarios.stem, str(folder)]
    environment = {**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    children = [
        subprocess.Popen([*command, str(rank)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for rank in range(2)
    ]
    try:
        said = [child.communicate(timeout=RUN_SECONDS)[0].decode() for child in children]
    finally:
        for child in children:
            child.kill()
    assert [child.returncode for child in children] == [0, 0], "\n".join(said)
    logs = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    return {name: [log[name] for log in logs] for name in logs[0]}


def _main(scenarios: str, folder: str, rank: int) -> None:
    patch, results = pytest.MonkeyPatch(), {}
    limit = datetime.timedelta(seconds=EXCHANGE_SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    barrier = dist.barrier
    patch.setattr(module(ONESHOT), "_object_broadcast_device", lambda group: torch.device("cpu"))
    patch.setattr(dist, "barrier", lambda group=None, device_ids=None: barrier(group=group))
    there = importlib.import_module(scenarios)
    for name, scenario in vars(there).items():
        for kind in POOLS if name.startswith("scenario_") else ():
            machine_patch = pytest.MonkeyPatch()
            # A group of its own: what one scenario breaks, another does not meet.
            state = Rank(rank, kind, Machine(machine_patch), dist.new_group([0, 1], timeout=limit))
            began = time.monotonic()
            try:
                scenario(state)
            except Exception:
                state.log["raised"] = traceback.format_exc(limit=-2, chain=False)
            state.log["seconds"] = time.monotonic() - began
            results[f"{name.removeprefix('scenario_')}-{kind}"] = state.log
            machine_patch.undo()
    Path(folder, f"{rank}.json").write_text(json.dumps(results))
    # Not a clean end: a group that a scenario broke would be waited for.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
