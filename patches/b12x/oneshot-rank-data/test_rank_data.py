"""Rank data of channels with eager buffers is as large as its pointer tables, and 40 inputs register.

Runs on the b12x (or sparkinfer) on the path, on a CPU: the CuTe backend's real table writer where there is one, and
the runtime class with a counting extension.
"""

from __future__ import annotations

import importlib
import inspect
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch

PACKAGE = "b12x" if find_spec("b12x") and find_spec("b12x.comm") else "sparkinfer"
UPSTREAM_BYTES = 8 << 20
KIB = 1024


def module(name: str) -> ModuleType:
    return importlib.import_module(f"{PACKAGE}.comm.pcie.{name}")


def always_eager() -> list[Any]:
    """Every factory that configures eager buffers whatever it is given."""
    oneshot = module("pcie_oneshot")
    channel, pool = oneshot.PCIeOneshotAllReduce, oneshot.PCIeOneshotAllReducePool
    found = [channel.from_exchange_group, channel.from_process_group]
    found += [pool.__init__, pool.from_exchange_group, pool.from_process_group]
    if find_spec(f"{PACKAGE}.comm.pcie.pcie_allreduce"):
        facade = module("pcie_allreduce").PCIeAllReduce
        found += [facade.from_exchange_group, facade.from_process_group]
    return found


def default_of(function: Any) -> int:
    return inspect.signature(function).parameters["rank_data_bytes"].default


@pytest.mark.parametrize("function", always_eager(), ids=lambda f: f.__qualname__)
def test_factories_ask_for_what_their_tables_need(function: Any) -> None:
    assert default_of(function) == 8 * KIB


def test_a_caller_with_its_own_pointers_keeps_upstreams_size() -> None:
    channel = module("pcie_oneshot").PCIeOneshotAllReduce
    assert default_of(channel.__init__) == default_of(channel.from_ipc) == UPSTREAM_BYTES


@pytest.mark.parametrize(
    ("tables", "inputs", "wanted"),
    [(2, 0, 4 * KIB), (3, 0, 4 * KIB), (3, 29, 4 * KIB), (3, 30, 8 * KIB), (3, 40, 8 * KIB), (2, 1022, 128 * KIB)],
)
def test_size(tables: int, inputs: int, wanted: int) -> None:
    assert module("rank_data").rank_data_bytes(tables, inputs) == wanted


@pytest.mark.parametrize(("tables", "inputs"), [(1, 0), (2, -1)])
def test_size_refuses_nonsense(tables: int, inputs: int) -> None:
    with pytest.raises(ValueError, match="wanted at least 2 tables"):
        module("rank_data").rank_data_bytes(tables, inputs)


def test_forty_inputs_fit_the_backends_own_tables() -> None:
    oneshot = module("pcie_oneshot")
    size = default_of(oneshot.PCIeOneshotAllReducePool.__init__)
    if not hasattr(oneshot, "_CuTeOneshotBackend"):
        assert size // 128 >= 2 + 40, "the native backend writes two tables, then one an input"
        return
    backend, data = oneshot._CuTeOneshotBackend(), torch.zeros(size, dtype=torch.uint8)
    state = oneshot._CuTeOneshotState(
        rank=1, world_size=2, signal_ptrs=(16, 32), rank_data=data, signal_table_address=data.data_ptr(),
        next_table_offset=128, registered_tables={},
    )  # fmt: skip
    backend._write_table(state, state.signal_ptrs, offset=0)
    backend._states[1] = state
    backend.register_pcie_buffers(1, (100, 200), (300, 400))
    for i in range(40):
        backend.register_buffer(1, (1000 + i, 2000 + i))
    tables = data.view(torch.int64).view(-1, 16)[:, :2]
    assert tables[:3].tolist() == [[16, 32], [100, 200], [300, 400]]
    assert tables[3:43].tolist() == [[1000 + i, 2000 + i] for i in range(40)]
    assert state.eager_tables is not None
    assert state.eager_tables[1] - state.eager_tables[0] == 128, "the kernel steps 16 pointers"


class Extension:
    """Counts what reaches the backend."""

    supports_eager_storage_contract = False

    def __init__(self) -> None:
        self.registered: list[tuple[int, ...]] = []

    def init_custom_ar(self, signals: Any, rank_data: torch.Tensor, rank: int) -> int:
        return 7

    def register_pcie_buffers(self, handle: int, first: Any, second: Any) -> None: ...

    def register_buffer(self, handle: int, pointers: Any) -> None:
        self.registered.append(tuple(pointers))

    def dispose(self, handle: int) -> None: ...


def channel(size: int, *, eager: bool) -> tuple[Any, Extension]:
    cls = module("pcie_oneshot").PCIeOneshotAllReduce
    pointers: dict[str, Any] = {}
    if eager:
        pointers = {"eager_buffer_ptrs0": (3, 4), "eager_buffer_ptrs1": (5, 6)}
        if "eager_buffer_bytes" in inspect.signature(cls.__init__).parameters:
            pointers["eager_buffer_bytes"] = 1024
    extension = Extension()
    runtime = cls(
        rank=0, world_size=2, device="cpu", signal_ptrs=(1, 2), max_size=1024, rank_data_bytes=size,
        ext_module=extension, **pointers,
    )  # fmt: skip
    return runtime, extension


@pytest.mark.parametrize("eager", [True, False])
def test_an_input_without_room_is_refused_before_the_backend(eager: bool) -> None:
    size = 4 * KIB
    runtime, extension = channel(size, eager=eager)
    fixed = module("pcie_oneshot").RANK_DATA_TABLES - (0 if eager else 2)
    for i in range(size // 128 - fixed):
        runtime.register_buffer((100 + i, 200 + i))
    with pytest.raises(RuntimeError, match=f"rank data of {size} bytes holds 32 pointer tables.*at least {size + 128}"):
        runtime.register_buffer((1, 2))
    assert len(extension.registered) == 32 - fixed
    runtime.register_buffer((100, 200))  # registered before: no new table


def test_an_explicit_size_is_taken_as_it_is() -> None:
    runtime, _ = channel(12 * KIB, eager=True)
    assert runtime.rank_data.numel() == 12 * KIB
