"""One of two gloo ranks that make something together, or do not; argv: rank, rendezvous. Prints a line a case."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

# A rank whose peer does not come is told by then.
PATIENCE_SECONDS = 3
PREFIX = "VLLM_NEAPTIDE_PCIE_"


class Served:
    """What is made: it takes part in captures, as the real one does."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def join_captures(self) -> None:
        from vllm.distributed.capture_scopes import register_capture_participant

        register_capture_participant(self, self.group)

    def held_bytes(self) -> int:
        return 123

    def checkpoint(self) -> None: ...

    def rollback(self) -> None: ...


class Case:
    """A group, a b12x and a host of this case alone."""

    def __init__(self, rank: int, group: Any, collectives: Any) -> None:
        self.rank, self.group, self.collectives = rank, group, collectives
        self.device_index, self.fails = rank, ""
        self.environment: dict[str, str] = {"COLLECTIVES": "1"}

    def make(self) -> Served:
        if self.fails == "early":
            raise OSError("cannot map peers")
        made = Served(self.group)
        if self.fails:
            raise OSError("cannot map peers")
        return made

    def together(self) -> Any:
        import torch

        device = torch.device("cuda", self.device_index)
        return self.collectives.made_together("tp:0", self.group, device, self.make, "all-reduce")

    def attached(self) -> Any:
        import torch

        device = torch.device("cuda", self.device_index)
        communicator = SimpleNamespace(unique_name="tp:0", world_size=2, device=device, cpu_group=self.group)
        self.collectives.attach_pcie_all_reduce(communicator)
        return communicator.pcie_ar_comm


class AllReduce(Served):
    """Its ring is made with the peers, as b12x's is."""

    def __init__(self, group: Any, device: Any, limits: Any) -> None:
        import torch.distributed as dist

        if limits.ring_from_bytes:
            dist.barrier(group=group)
        super().__init__(group)


def all_serve(case: Case) -> Any:
    return case.together()


def attached_on_both(case: Case) -> Any:
    case.environment |= {"RING_KB": "1024"}
    return case.attached()


def one_has_no_b12x(case: Case) -> Any:
    if case.rank == 1:
        case.collectives._runtime = lambda: "no b12x"
    return case.together()


def one_cannot_make_it(case: Case) -> Any:
    case.fails = "early" if case.rank == 1 else ""
    return case.together()


def one_fails_at_the_end_and_captures_go_on(case: Case) -> Any:
    from vllm.distributed.capture_scopes import disposable_captures

    case.fails = "late" if case.rank == 1 else ""
    made = case.together()
    gc.collect()
    with disposable_captures():
        pass
    return made


def the_upper_half_of_the_devices(case: Case) -> Any:
    case.device_index = 2 + case.rank
    return case.together()


def one_is_switched_off(case: Case) -> Any:
    case.environment["COLLECTIVES"] = "01"[1 - case.rank]
    return case.together()


def one_has_a_ring(case: Case) -> Any:
    case.environment["RING_KB"] = "1024" if case.rank == 1 else "0"
    return case.attached()


def one_has_a_wrong_value(case: Case) -> Any:
    case.environment["RING_KB"] = "many" if case.rank == 1 else "0"
    return case.attached()


CASES: dict[str, Callable[[Case], Any]] = {
    case.__name__: case
    for case in (
        all_serve, attached_on_both, one_has_no_b12x, one_cannot_make_it, one_fails_at_the_end_and_captures_go_on,
        the_upper_half_of_the_devices, one_is_switched_off, one_has_a_ring, one_has_a_wrong_value,
    )
}  # fmt: skip


def stand_in(collectives: Any) -> None:
    """Four cards: 0 reaches 1, and 2 reaches 3."""
    import torch

    collectives.current_platform = SimpleNamespace(
        is_cuda=lambda: True, is_fully_connected=lambda devices: False,
        visible_device_id_to_physical_device_id=lambda index: index,
    )  # fmt: skip
    collectives._on_cuda = lambda device: True
    collectives.PcieAllReduce = AllReduce
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(major=12, minor=0, name="card")
    torch.cuda.device_count = lambda: 4

    def access(*devices: Any) -> bool:
        one, other = (device if isinstance(device, int) else torch.device(device).index for device in devices)
        return one // 2 == other // 2

    torch.cuda.can_device_access_peer = access


def be_rank(rank: int, rendezvous: str) -> None:
    import torch.distributed as dist
    from vllm.distributed import capture_scopes
    from vllm.distributed.device_communicators import pcie_collectives as collectives

    capture_scopes.PATIENCE_SECONDS = capture_scopes.PATIENCE_AFTER_FAILURE_SECONDS = PATIENCE_SECONDS
    dist.init_process_group(
        "gloo", init_method=f"tcp://{rendezvous}", rank=rank, world_size=2, timeout=timedelta(seconds=30)
    )
    stand_in(collectives)
    lines: list[str] = []
    said = SimpleNamespace(info_once=lambda text, *args, **options: lines.append(text % args))
    said.warning_once = said.warning = said.info = said.info_once
    collectives.logger = said
    for name, run in CASES.items():
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=PATIENCE_SECONDS))
        capture_scopes._registry = capture_scopes._Registry()
        collectives._runtime = lambda: ""
        case, made, error, began = Case(rank, group, collectives), None, "", time.monotonic()
        environment = Environment(case.environment)
        collectives.envs = environment
        try:
            made = run(case)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        found = {"made": made is not None, "error": error, "lines": lines[:], "seconds": time.monotonic() - began}
        print(json.dumps([name, found]), flush=True)
        lines.clear()
        dist.barrier()


class Environment:
    """``vllm.envs`` of this rank: its switches are read anew."""

    def __init__(self, values: dict[str, str]) -> None:
        self.values = values

    def __getattr__(self, name: str) -> Any:
        import vllm.envs
        from vllm import neaptide_switches

        if not name.startswith(PREFIX):
            return getattr(vllm.envs, name)
        for key in [key for key in os.environ if key.startswith(PREFIX)]:
            del os.environ[key]
        os.environ.update({PREFIX + key: value for key, value in self.values.items()})
        return neaptide_switches.VARIABLES[name]()


if __name__ == "__main__":
    be_rank(int(sys.argv[1]), sys.argv[2])
