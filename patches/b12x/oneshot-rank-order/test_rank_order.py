"""The order in which each rank adds the terms of a oneshot sum: run as plain Python, on addresses instead of memory."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

WORLDS = (2, 3, 4, 8)
PACK, SHARD, INPUT, OUTPUT, STAGE = 16, 1000, 1 << 40, 1 << 41, 1 << 30


class Machine:
    """What the kernels do: sums, as the ranks whose terms they add."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world_size, self._threads, self._pack_elems = rank, world, 1, 8
        self._device_slot_selection, self._stage_input, self._transport, self._mode = False, True, "pull", "pull"
        self.peers = [STAGE * (1 + peer) for peer in range(world)]
        self.added: list[int] = []
        self.sums: list[list[int]] = []

    def _multi_gpu_barrier(self, signals: Any) -> None: ...

    def _copy_pack(self, source: int, destination: int) -> None: ...

    def _load_accumulate(self, accumulator: Any, address: int, initialize: bool) -> None:
        if initialize:
            self.added = []
        self.added.append(self._term_at(address))

    def _term_at(self, address: int) -> int:
        """The rank whose term lies at an address: of this rank's input, of a peer's slot, or of this rank's stage."""
        if INPUT <= address < OUTPUT:
            return self._rank
        if self._mode == "pull":
            return self.peers.index(address // STAGE * STAGE)
        return (address - self.peers[self._rank]) // PACK // SHARD

    def _store_accumulator(self, address: int, accumulator: Any) -> None:
        self.sums.append(self.added)


@pytest.fixture(scope="module")
def kernels() -> dict[str, Any]:
    """The methods of the tree on the path, without the compiler that their decorators stand for."""
    found = importlib.util.find_spec("b12x")
    assert found is not None
    assert found.origin is not None
    source = (Path(found.origin).parent / "comm/pcie/_oneshot_cute.py").read_text()
    methods: dict[str, Any] = {}
    for owner, node in _methods(ast.parse(source)):
        node.decorator_list = []
        module = ast.Module([ast.ImportFrom("__future__", [ast.alias("annotations")], 0), node], [])
        names = {
            "Int32": int, "Int64": int, "Uint32": int,
            "cute": SimpleNamespace(
                arch=SimpleNamespace(thread_idx=_zeros, block_idx=_zeros, grid_dim=lambda: (1, 1, 1)),
                make_rmem_tensor=lambda *shape: None,
            ),
            "cutlass": SimpleNamespace(range_constexpr=range, const_expr=bool, Float32=float),
        }  # fmt: skip
        exec(compile(ast.fix_missing_locations(module), owner, "exec"), names)
        methods[f"{owner}.{node.name}"] = names[node.name]
    return methods


def _zeros() -> tuple[int, int, int]:
    return 0, 0, 0


def _methods(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    wanted = {("_OneshotLaunch", "kernel"), ("_FusedOneshotLaunch", "_reduce_pack")}
    for owner in tree.body:
        for node in getattr(owner, "body", ()):
            named = isinstance(owner, ast.ClassDef) and isinstance(node, ast.FunctionDef)
            if named and (owner.name, node.name) in wanted:
                yield owner.name, node


@pytest.mark.parametrize("world", WORLDS)
def test_plain_sums(world: int, kernels: dict[str, Any]) -> None:
    pointer = {address: SimpleNamespace(toint=lambda address=address: address) for address in (INPUT, OUTPUT)}
    for rank in range(world):
        machine = Machine(rank, world)
        kernels["_OneshotLaunch.kernel"](
            machine, machine.peers, [0] * world, pointer[INPUT], pointer[OUTPUT], 3, *([0] * 6)
        )
        assert machine.sums == [list(range(world))] * 3


@pytest.mark.parametrize("mode", ["pull", "stage_pull", "stage_push", "stage_remote_push"])
@pytest.mark.parametrize("world", WORLDS)
def test_sums_before_the_norm(world: int, mode: str, kernels: dict[str, Any]) -> None:
    for rank in range(world):
        machine = Machine(rank, world)
        machine._mode = "pull" if mode == "stage_pull" else mode
        residual: list[int] = []
        terms = machine._load_accumulate

        def load(
            accumulator: Any, address: int, initialize: bool, terms: Any = terms, residual: Any = residual
        ) -> None:
            if address < 0:
                residual.append(address)
            else:
                terms(accumulator, address, initialize)

        machine._load_accumulate = load  # type: ignore[method-assign]
        kernels["_FusedOneshotLaunch._reduce_pack"](machine, machine.peers, INPUT, -1_000_000, 5, 100, SHARD, None)
        assert machine.added == list(range(world))
        assert len(residual) == 1
