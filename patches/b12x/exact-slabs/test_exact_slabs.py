"""Staging slots hold what the kernels stage, and no more. Runs on the b12x on the path, on a CPU."""

from __future__ import annotations

import importlib
import itertools
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

MIB = 1 << 20
ROWS, DIM, QUERY = 64, 512, 576
PUSH, TP2_REMOTE, TP2_PLAIN, TP4_REMOTE, TP8_OWNER = range(5)


def module(name: str) -> ModuleType:
    return importlib.import_module(f"b12x.comm.pcie.{name}")


def prepared_plans() -> bool:
    """Whether this b12x has transports with shards (1.5 and later)."""
    return hasattr(module("pcie_oneshot"), "_eager_storage_shards")


only_shards = pytest.mark.skipif(not prepared_plans(), reason="this b12x has no sharded transports")


def layout(world: int, heads: int, rows: int = ROWS, dim: int = DIM, query: int | None = QUERY) -> Any:
    signal = 266_240 if prepared_plans() else 266_368
    return module("pcie_dcp_a2a")._staging_layout(
        signal_bytes=signal,
        world_size=world,
        max_batch_size=rows,
        total_heads=heads,
        head_dim=dim,
        query_head_dim=query,
    )


def test_slabs_of_the_two_deployments() -> None:
    """Upstream: 14,471,168 bytes at DCP4 and 7,368,704 at DCP2 (b12x 1.5.1)."""
    signal = 266_240 if prepared_plans() else 266_496
    assert layout(4, 96).slab_bytes == signal + 2 * (6 * MIB + ROWS * 96 * 4)
    assert layout(2, 48).slab_bytes == signal + 2 * (3 * MIB + ROWS * 48 * 4)


SHAPES = [
    (world, per_rank * world, rows, dim, query)
    for world, per_rank, rows, dim, query in itertools.product(
        (2, 4, 8), (1, 3, 24), (1, 5, 64), (8, 72, 512), (None, 8, 24, 576, 4096)
    )
]


def test_every_operation_that_is_let_through_fits_its_slot() -> None:
    """The checks admit what output_capacity_elems allows; what that stages ends before the LSE."""
    for world, heads, rows, dim, query in SHAPES:
        found, wide = layout(world, heads, rows, dim, query), query or dim
        capacity = found.output_capacity_elems
        assert capacity >= rows * heads * max(dim, wide), "the constructor asks for this"
        staged = {
            "reduce-scatter": rows * heads * dim * 2,
            "gather, 2 bytes": rows * (heads // world) * wide * 2,
            "gather, fp8": rows * (heads // world) * wide,
            "pair, as Python checks it": rows * wide,
            "pair with Kimi's top-k, as far as upstream's slot goes": min(
                -(-10_752 // world), rows * heads * max(dim, wide) * 2
            ),
            # The native backend compares all ranks' bytes with the capacity, and one rank's are staged.
            "pair, as the native backend checks it": capacity * 2 // world,
        }
        assert max(staged.values()) <= found.lse_offset, (world, heads, rows, dim, query, staged)
        assert found.lse_offset + rows * heads * 4 <= found.slot_bytes
        assert found.staging1_offset - found.staging0_offset == found.slot_bytes
        assert found.slab_bytes == found.staging1_offset + found.slot_bytes
        assert found.lse_offset % 256 == found.slot_bytes % 256 == 0


def test_layout_and_size_function_agree() -> None:
    sizes = module("slab_sizes")
    for world, heads, rows, dim, query in SHAPES:
        found = layout(world, heads, rows, dim, query)
        staged = sizes.a2a_staged_bytes(world, rows, heads, dim, query)
        assert found.slab_bytes == sizes.a2a_slab_bytes(found.signal_bytes, staged, rows, heads)


def policy(*on: int) -> tuple[bool, ...]:
    return tuple(index in on for index in range(5))


DEFAULT = policy(TP2_PLAIN, TP8_OWNER)
SLOTS = [
    # world size, policy, eager bytes, slot bytes
    (8, DEFAULT, 8 * MIB, 8 * MIB),
    (8, DEFAULT, 512 << 10, 8 * 98_304),
    (8, DEFAULT, 84 << 10, 8 * (84 << 10)),
    (4, DEFAULT, 84 << 10, 84 << 10),
    (4, policy(TP4_REMOTE), 8 * MIB, 8 * MIB),
    (4, policy(TP4_REMOTE), 1 * MIB, 4 * 393_216),
    (2, DEFAULT, 84 << 10, 3 * (84 << 10)),
    (2, DEFAULT, 8 * MIB, 8 * MIB + 2 * 4 * MIB),
    (2, policy(TP2_PLAIN, TP2_REMOTE), 84 << 10, 4 * (84 << 10)),
    (8, policy(PUSH), 1 * MIB, 8 * MIB),
    (6, policy(TP8_OWNER), 1000, 1024),
]


@pytest.mark.parametrize(("world", "switches", "eager", "wanted"), SLOTS)
def test_slots(world: int, switches: tuple[bool, ...], eager: int, wanted: int) -> None:
    sizes = module("slab_sizes")
    assert sizes.eager_slot_bytes(world, switches, eager) == wanted
    if prepared_plans():
        shards = module("pcie_oneshot")._eager_storage_shards(world, switches)
        assert wanted <= -(-eager * shards // 256) * 256


@only_shards
def test_the_pool_allocates_these_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    oneshot = module("pcie_oneshot")
    asked: list[int] = []

    class Stop(Exception):
        pass

    def allocate(group: Any, size: int, **rest: Any) -> None:
        asked.append(size)
        raise Stop

    pool = object.__new__(oneshot.PCIeOneshotAllReducePool)
    vars(pool).update(
        rank=0, world_size=8, device=torch.device("cpu"), exchange_group=object(), _channel_factory=None, _ipc=object(),
        _ext=object(), _signal_bytes=150_528, _eager_storage_shards=8, _transport_policy=DEFAULT,
        eager_buffer_bytes=8 * MIB, max_size=8 * MIB, _closed=True,
    )  # fmt: skip
    monkeypatch.setattr(oneshot.PCIeOneshotAllReduce, "_allocate_shared_buffer", staticmethod(allocate))
    with pytest.raises(Stop):
        pool._new_channel(None)
    assert asked == [module("slab_sizes").eager_slab_bytes(150_528, 8 * MIB)]
    assert asked == [16_927_744]


def native(world: int, switches: tuple[bool, ...], eager: int) -> Any:
    """A channel's real native state with registered staging buffers."""
    oneshot = module("pcie_oneshot")
    backend, data = oneshot._CuTeOneshotBackend(), torch.zeros(4096, dtype=torch.uint8)
    state = oneshot._CuTeOneshotState(
        rank=0, world_size=world, signal_ptrs=tuple(range(16, 16 + world)), rank_data=data,
        signal_table_address=data.data_ptr(), next_table_offset=128, registered_tables={},
    )  # fmt: skip
    backend._states[1] = state
    backend.register_pcie_buffers(1, list(range(1, 1 + world)), list(range(100, 100 + world)), eager, switches)
    return state


@only_shards
@pytest.mark.parametrize("eager", [8_208, 84 << 10, 100_016, 512 << 10, 8 * MIB])
def test_every_sharded_payload_that_a_transport_takes_fits(eager: int) -> None:
    """Over the shapes for which the backend itself chooses a transport."""
    oneshot, sizes, seen = module("pcie_oneshot"), module("slab_sizes"), set()
    for world, switch in ((8, TP8_OWNER), (4, TP4_REMOTE), (2, TP2_REMOTE), (4, PUSH)):
        switches = policy(switch)
        state = native(world, switches, eager)
        region = sizes.eager_region_bytes(world, switches, eager)
        assert region >= eager // 16 * 16, "payloads are whole packs"
        # A caller's own slot, made to upstream's size.
        assert region <= eager * oneshot._eager_storage_shards(world, switches)
        for rows, hidden in itertools.product(range(1, 37), (1024, 4096, 6144, 8192)):
            inp = torch.empty(rows, hidden, dtype=torch.bfloat16, device="meta")
            nbytes = inp.numel() * 2
            if nbytes > eager:
                continue  # should_allreduce refuses it
            mode = oneshot._CuTeOneshotBackend._fused_launch_config(state, inp)[0]
            packs = sizes.fused_shard_packs(state, mode, nbytes)
            if mode in sizes.SHARDED_MODES:
                seen.add(mode)
                assert nbytes <= packs * 16
                assert world * packs * 16 <= region
    # A TP8 payload is at least two rows of 4,096.
    assert seen == {mode for mode in sizes.SHARDED_MODES if mode != "stage_tp8_owner" or eager >= 16_384}


@only_shards
def test_a_payload_wider_than_its_shard_is_refused() -> None:
    state = native(8, DEFAULT, 8 * MIB)
    with pytest.raises(RuntimeError, match="98320 bytes does not fit its shard of 98304 bytes"):
        module("slab_sizes").fused_shard_packs(state, "stage_tp8_owner", 98_320)
    assert module("slab_sizes").fused_shard_packs(state, "stage_pull", 8 * MIB) == 98_304 // 16


@only_shards
@pytest.mark.parametrize("eager", [8_200, 84 << 10, 100_016, 1 << 20, 8 * MIB])
def test_tp2_records_lie_behind_the_region_and_within_the_slot(eager: int) -> None:
    oneshot, sizes = module("pcie_oneshot"), module("slab_sizes")
    for switches in (policy(TP2_PLAIN), policy(TP2_PLAIN, TP2_REMOTE), policy(TP2_PLAIN, PUSH)):
        state = native(2, switches, eager)
        region, capacity = state.plain_remote_push_region_packs * 16, sizes.incoming_packs(eager)
        assert region == sizes.eager_region_bytes(2, switches, eager)
        # The clear at an epoch's end writes 32 bytes for each pack of the capacity.
        assert region + capacity * 32 <= sizes.eager_slot_bytes(2, switches, eager)
        # A caller's own slot, made to upstream's size.
        assert region + capacity * 32 <= eager * oneshot._eager_storage_shards(2, switches)
        for rows in (1, 64, 512, 513):
            inp = torch.empty(rows, 4096, dtype=torch.bfloat16, device="meta")
            geometry = oneshot._CuTeOneshotBackend._tp2_plain_remote_push_geometry(state, inp, graph_channel=True)
            if geometry is not None:
                assert inp.numel() * 2 // 16 <= capacity


@only_shards
def test_prepared_launches_use_the_same_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain and fused launches of a channel of 8 MiB get the capacity and the shard of this module."""
    oneshot, sizes = module("pcie_oneshot"), module("slab_sizes")
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(oneshot, "_is_current_stream_capturing", lambda device: False)
    launched: list[tuple[Any, ...]] = []
    for world, switches in ((8, DEFAULT), (2, DEFAULT)):
        state = native(world, switches, 8 * MIB)
        channel = object.__new__(oneshot.PCIeOneshotAllReduce)
        vars(channel).update(_ptr=1, _ext=SimpleNamespace(
            _state=lambda pointer, state=state: state, _select_table=lambda state, pointer: (7, True),
            _plain_graph_plan_key=lambda inp: "key",
        ), _coordinated_close_complete=True)  # fmt: skip
        state.plain_graph_plans["key"] = SimpleNamespace(remote_push_slot_ptrs=(1, 2, 3, 4))
        inp = torch.zeros(4, 4096, dtype=torch.bfloat16)
        call = {"hidden_packs": 512, "rows": 4, "ctas_per_row": 1, "blocks": 4, "mode": "stage_tp8_owner",
                "size_packs": 2048, "remote_push_region_packs": state.plain_remote_push_region_packs,
                "eager_blocks": 4}  # fmt: skip
        launchers = {(False, 0): lambda *args: launched.append(args)}
        if world == 8:
            channel._run_prepared_fused(inp, inp, inp, inp, inp, 1e-6, SimpleNamespace(call=call), launchers)
        else:
            channel._run_prepared_plain(inp, inp, SimpleNamespace(call=call), launchers)
    fused, plain = launched
    assert fused[10] == 98_304 // 16
    assert plain[5:7] == (8 * MIB // 16, sizes.incoming_packs(8 * MIB)) == (8 * MIB // 16, 4 * MIB // 16)


def resident_bytes(runtime: Any) -> int:
    """What the plan of a gather on this channel reports."""
    preparation = module("_dcp_preparation")
    query = preparation.PcieQuery(
        surface="DcpAllToAll.all_gather_heads", world_size=4, rank=0, topology="pcie_ipc",
        call=preparation.FrozenMapping({}), setup=preparation.FrozenMapping({}),
    )  # fmt: skip
    (memory,) = preparation.plan(query, runtime=runtime)._memory_requirements(None, None).persistent
    assert memory.required_nbytes == memory.resident_nbytes
    return int(memory.required_nbytes)


@only_shards
def test_reported_residency_is_what_a_channel_owns() -> None:
    found = layout(4, 96)
    runtime = SimpleNamespace(
        _slot_bytes=found.slot_bytes, _signal_ptrs=(4096, 9), _owned_buffers=[object()],
        _staging0_ptrs=(4096 + found.staging0_offset, 9 + found.staging0_offset), rank=0, world_size=4, device=None,
    )  # fmt: skip
    assert resident_bytes(runtime) == found.slab_bytes
    # Pointers of the caller's own, from allocations that have nothing to do with each other.
    runtime._owned_buffers, runtime._staging0_ptrs = [], (64, 64)
    assert resident_bytes(runtime) == 2 * found.slot_bytes
    eager = native(8, DEFAULT, 8 * MIB)
    owner = SimpleNamespace(
        rank_data=torch.zeros(8192, dtype=torch.uint8), world_size=8, _ext=SimpleNamespace(meta_size=lambda: 150_528),
        _owned_buffers=[object()],
    )  # fmt: skip
    assert module("_oneshot_preparation")._owned_resident_layout(owner, eager) == (8192, 16_927_744, 1)
