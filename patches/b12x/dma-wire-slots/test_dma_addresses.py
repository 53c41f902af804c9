"""What the ring's own code reads and writes lies in the slot of its step, and inputs that would not fit are refused.

Runs the constructor and the per-call code of the b12x on the path for every rank (``dma_machine``).
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dma_machine import Machine, has_module, module

MODES = ("", "ag", "i8", "mx", "ring", "i8_ring", "mx_ring", "a2a", "i8_a2a", "mx_a2a")
WORLDS = (2, 4, 8)
MIB = 1 << 20
MACHINES = [(mode, 36 * MIB, world) for mode in MODES for world in WORLDS]
# Compressed shards that end between two units of alignment.
MACHINES += [(mode, 7 * MIB + 3000, 4) for mode in MODES]


@pytest.fixture
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Built inside of the test's own call, so that a failure there is the test's."""
    return lambda *ring: Machine(monkeypatch, *ring)


def shards(max_bytes: int, world: int, itemsize: int, unit: int) -> list[int]:
    """Elements of a shard, up to the capacity: multiples of ``unit``, at least eight elements."""
    return list(range(unit, max_bytes // world // itemsize + 1, unit))


@pytest.mark.parametrize(("mode", "max_bytes", "world"), MACHINES)
def test_bf16_up_to_the_capacity(machine: Any, mode: str, max_bytes: int, world: int) -> None:
    ring = machine(mode, max_bytes, world)
    whole = shards(max_bytes, world, 2, 128)
    calls = [(n * world, torch.bfloat16) for n in (whole[-1], whole[0], whole[len(whole) // 2], whole[-1])]
    assert all(ring.takes(*call) for call in calls)
    for seed in range(3):
        ring.all_reduce(calls, seed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("mode", "max_bytes", "world"), MACHINES)
def test_uncompressed_inputs_are_taken_exactly_as_far_as_they_fit(
    machine: Any, monkeypatch: pytest.MonkeyPatch, mode: str, max_bytes: int, world: int, dtype: torch.dtype
) -> None:
    ring = machine(mode, max_bytes, world)
    odd = [n for n in shards(max_bytes, world, dtype.itemsize, 8) if dtype != torch.bfloat16 or n % 128]
    taken = bisect_left(odd, True, key=lambda n: not ring.takes(n * world, dtype))
    compressed = (shards(max_bytes, world, 2, 128)[-1] * world, torch.bfloat16)
    # Between compressed calls, which leave their bytes in the same slots.
    ring.all_reduce([compressed, (odd[taken - 1] * world, dtype), compressed])
    if mode == "":
        assert taken == len(odd), "a bf16 ring takes what upstream takes"
        return
    assert 0 < taken < len(odd)
    beyond = [*odd[taken : taken + 40], *odd[-40:]]  # whole blocks among them, which bf16 would compress
    assert not any(ring.takes(n * world, dtype) for n in beyond)
    for rank in ring.rings:
        monkeypatch.setattr(rank, "should_allreduce", lambda inp: True)
    with pytest.raises(AssertionError, match="lie outside of every slot"):
        ring.all_reduce([(odd[taken] * world, dtype)])


@pytest.mark.parametrize("pieces", [3, 8])
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("mode", MODES)
def test_any_number_of_pieces(
    machine: Any, monkeypatch: pytest.MonkeyPatch, mode: str, world: int, pieces: int
) -> None:
    monkeypatch.setenv("B12X_PCIE_DMA_PIECES", str(pieces))
    monkeypatch.setenv("B12X_PCIE_DMA_A2A_CHUNKS", str(pieces))
    shard = 3 * 5 * 8 * 128 * 640 // 8
    ring = machine(mode, 2 * shard * world, world)
    ring.all_reduce([(shard * world, torch.bfloat16)])
    used = {r.index for r in ring.regions if r.kind == "slot"}
    assert len(used) == 2 * (world - 1)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("mode", MODES)
def test_bandwidth_probe(machine: Any, caplog: pytest.LogCaptureFixture, mode: str, world: int) -> None:
    if not hasattr(module("pcie_dma").PCIeDmaAllReduce, "_log_peer_copy_bandwidth"):
        pytest.skip("this release has no bandwidth probe")
    caplog.set_level(logging.DEBUG, logger=module("pcie_dma").logger.name)
    ring = machine(mode, 7 * MIB, world)  # slots below the probe's own limit of 4 MiB
    probes = [op for kernels in ring.kernels for op in kernels.ops]
    assert len(probes) >= world
    assert {ring.locate(*op.writes[0][:2]).index for op in probes} == {1}
    assert {ring.locate(*op.reads[0][:2]).index for op in probes} == {0}


def needs_preparation() -> None:
    if not has_module("_dma_preparation"):
        pytest.skip("this release prepares nothing")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("mode", "max_bytes", "world"), MACHINES)
def test_the_query_refuses_what_the_ring_refuses(
    machine: Any, mode: str, max_bytes: int, world: int, dtype: torch.dtype
) -> None:
    needs_preparation()
    query, ring = module("_dma_preparation").query_from_metadata, machine(mode, max_bytes, world)
    sizes = shards(max_bytes, world, dtype.itemsize, 8)
    edge = bisect_left(sizes, True, key=lambda n: n % 128 != 0 and not ring.takes(n * world, dtype))
    for shard in {*sizes[:2], *sizes[edge - 20 : edge + 20], *sizes[-2:]}:
        runtime, shape = ring.rings[world - 1], (shard, world)
        if ring.takes(shard * world, dtype):
            setup = query(runtime, shape=shape, dtype=dtype).setup
            assert setup["slab_nbytes"] == ring.slab_bytes[0]
            assert setup["stage_nbytes"] == sum(ring.stage_bytes[:1])
        else:
            with pytest.raises(ValueError, match=f"{shape[0] * dtype.itemsize} bytes, through slots of .* bytes"):
                query(runtime, shape=shape, dtype=dtype)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("max_bytes", [256, 4096, 36 * MIB])
def test_priming_stays_in_its_buffers(machine: Any, mode: str, world: int, max_bytes: int) -> None:
    needs_preparation()
    ring = machine(mode, max_bytes * world, world)
    state = SimpleNamespace(require_runtime=lambda runtime: None, launchers=None)
    ring.rings[0]._prime_prepared(state)
    used = {ring.locate(start, size).kind for op in ring.kernels[0].ops for start, size, _ in (*op.reads, *op.writes)}
    assert used == {"flags", "counters", *(["stage"] if mode else [])}


def test_eager_replay_is_refused_before_it_allocates(machine: Any) -> None:
    if not hasattr(module("pcie_dma").PCIeDmaAllReduce, "prepare_eager_replay"):
        pytest.skip("this release has no eager replay")
    ring = machine("", 36 * MIB, 4)
    before = ring.allocated
    with pytest.raises(RuntimeError, match="lacks; nothing was allocated"):
        ring.rings[0].prepare_eager_replay(torch.bfloat16)
    assert ring.allocated == before
