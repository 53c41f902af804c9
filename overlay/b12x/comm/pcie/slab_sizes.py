# SPDX-License-Identifier: Apache-2.0
"""Bytes of the staging slots in a channel's IPC slab, by what the kernels put there.

Sizes follow from the configuration alone, so they are the same on all ranks; the pools compare that configuration
before anything is allocated. A transport policy is the five switches that b12x 1.5 compares: push, TP2 remote push,
TP2 plain remote push, TP4 remote push, TP8 owner-reduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

ALIGNMENT_BYTES = 256
PACK_BYTES = 16
# Widest payloads of the fused transports that write into a shard for each source rank: rows x hidden size x 2 bytes.
TP8_OWNER_BYTES = 8 * 6144 * 2
TP4_REMOTE_BYTES = 32 * 6144 * 2
TP2_REMOTE_BYTES = 32 * 4096 * 2
# Widest payload of the plain TP2 push; its records are twice as wide, for the epoch that travels with the data.
TP2_PLAIN_BYTES = 512 * 4096 * 2
# All ranks' payload of the pair gather with Kimi's top-k: 3,584 BF16 and 896 FP32.
KIMI_BYTES = 3584 * 2 + 896 * 4
SHARDED_MODES = ("stage_remote_push", "stage_tp8_owner", "stage_push")


def align(value: int, alignment: int = ALIGNMENT_BYTES) -> int:
    return -(-value // alignment) * alignment


def a2a_staged_bytes(
    world_size: int, max_batch_size: int, total_heads: int, head_dim: int, query_head_dim: int | None = None
) -> int:
    """Bytes that one operation of a DCP exchange stages in a slot, without the LSE.

    A reduce-scatter stages all heads of ``head_dim``; a gather stages this rank's heads of ``query_head_dim``; a
    gather of a pair stages ``query_head_dim`` bytes a row, which is never more than that. The pair gather with Kimi's
    top-k has a payload of its own, which newer releases do not check: it keeps what upstream's slot has for it.

    Args:
        max_batch_size: rows.
        total_heads: heads of all ranks, a multiple of ``world_size``.
        head_dim, query_head_dim: elements of 2 bytes; the latter defaults to the former.

    Returns:
        A multiple of 256, never more than upstream's.
    """
    query = head_dim if query_head_dim is None else query_head_dim
    upstream = max_batch_size * total_heads * max(head_dim, query) * 2
    reduce_scatter = max_batch_size * total_heads * head_dim * 2
    gather = max_batch_size * (total_heads // world_size) * query * 2
    kimi = min(upstream, -(-KIMI_BYTES // world_size))
    return align(max(reduce_scatter, gather, max_batch_size * query, kimi))


def a2a_slab_bytes(signal_bytes: int, staged_bytes: int, max_batch_size: int, total_heads: int) -> int:
    """A DCP exchange's slab: signals, and two slots of staged outputs with their FP32 LSE."""
    return align(signal_bytes) + 2 * (staged_bytes + align(max_batch_size * total_heads * 4))


def owned_a2a_bytes(runtime: Any) -> int:
    """What a live DCP channel holds: two slots, and the signals in front of them where the slab is its own.

    Args:
        runtime: a channel, or None.
    """
    slots = 2 * int(getattr(runtime, "_slot_bytes", 0))
    if not getattr(runtime, "_owned_buffers", ()):
        return slots
    rank = int(runtime.rank)
    return slots + int(runtime._staging0_ptrs[rank]) - int(runtime._signal_ptrs[rank])


def eager_shard_bytes(world_size: int, policy: Sequence[bool], eager_bytes: int) -> int:
    """Bytes of each source rank's shard in a oneshot slot; 0 where no transport has shards.

    Args:
        policy: the five transport switches.
        eager_bytes: the widest payload of the channel.
    """
    push, tp2_remote, _, tp4_remote, tp8_owner = policy
    if push:
        widest = eager_bytes
    elif world_size == 8 and tp8_owner:
        widest = TP8_OWNER_BYTES
    elif world_size == 4 and tp4_remote:
        widest = TP4_REMOTE_BYTES
    elif world_size == 2 and tp2_remote:
        widest = TP2_REMOTE_BYTES
    else:
        return 0
    return min(widest, eager_bytes) // PACK_BYTES * PACK_BYTES


def eager_region_bytes(world_size: int, policy: Sequence[bool], eager_bytes: int) -> int:
    """The part of a oneshot slot that pull and fused transports use: one payload, or the shards.

    A multiple of 16, as payloads are, and never more than ``eager_bytes`` times upstream's shards: a slot that a
    caller made to upstream's size holds it.
    """
    shards = world_size * eager_shard_bytes(world_size, policy, eager_bytes)
    return max(eager_bytes // PACK_BYTES * PACK_BYTES, shards)


def incoming_packs(eager_bytes: int | None) -> int:
    """Payload packs of 16 bytes that the incoming region of the plain TP2 push holds, in records of 32 bytes."""
    return min(eager_bytes or 0, TP2_PLAIN_BYTES) // PACK_BYTES


def eager_slot_bytes(world_size: int, policy: Sequence[bool], eager_bytes: int) -> int:
    """A oneshot staging slot; a multiple of 256. Upstream multiplies ``eager_bytes`` by the number of shards."""
    incoming = 2 * PACK_BYTES * incoming_packs(eager_bytes) if world_size == 2 and policy[2] else 0
    return align(eager_region_bytes(world_size, policy, eager_bytes) + incoming)


def eager_slab_bytes(signal_bytes: int, slot_bytes: int) -> int:
    """A oneshot channel's slab: signals and two slots."""
    return align(signal_bytes) + 2 * slot_bytes


def owned_oneshot_bytes(channel: Any) -> int:
    """What a live oneshot channel holds: its slab with staging slots, if it has any, and its tables of peers.

    Args:
        channel: of a oneshot pool, as b12x makes it.
    """
    native, tables = channel._ext._state(channel._ptr), channel.rank_data
    held = int(tables.numel() * tables.element_size())
    if native.eager_buffer_bytes is None:
        return held
    policy = tuple(bool(value) for value in native.transport_policy)
    slot = eager_slot_bytes(int(channel.world_size), policy, int(native.eager_buffer_bytes))
    return held + eager_slab_bytes(int(channel._ext.meta_size()), slot) * len(channel._owned_buffers)


def region_packs(world_size: int, policy: Sequence[bool], eager_bytes: int | None) -> int:
    """Packs of 16 bytes in front of the incoming region of the plain TP2 push."""
    return eager_region_bytes(world_size, policy, eager_bytes or 0) // PACK_BYTES


def fused_shard_packs(state: Any, mode: str, payload_bytes: int) -> int:
    """Packs of 16 bytes from one source's shard to the next, for a fused launch.

    Args:
        state: the native state of a channel.
        mode: the launch's transport.
        payload_bytes: of the input.

    Raises:
        RuntimeError: a payload of a sharded transport that its shard does not hold; nothing was launched.
    """
    if state.eager_buffer_bytes is None:
        return payload_bytes // PACK_BYTES
    shard = eager_shard_bytes(state.world_size, state.transport_policy, int(state.eager_buffer_bytes))
    if mode in SHARDED_MODES and payload_bytes > shard:
        raise RuntimeError(
            f"a fused {mode} payload of {payload_bytes} bytes does not fit its shard of {shard} bytes (world size "
            f"{state.world_size}, eager_buffer_bytes {state.eager_buffer_bytes}); this transport takes wider shapes "
            "than slab_sizes knows"
        )
    return shard // PACK_BYTES
