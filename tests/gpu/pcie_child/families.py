"""The two pools under test: shapes, operations and the arithmetic of their slabs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from operations import Operation, add_rms_norm, all_reduce, gather, reduce_scatter
from surfaces import Pool, surfaces

ROWS, HEADS, HEAD_DIM, QUERY_DIM = 64, 48, 512, 576
HIDDEN = 4096
PAYLOAD_BYTES = 84 << 10


@dataclass(frozen=True)
class Family:
    """One kind of pool.

    Attributes:
        pool: makes one.
        numerics: operations whose results are checked; the flag says whether also in a graph.
        graphs: for each graph of a replay group, its operations.
        eager: operations between replays.
        slab_bytes: of one channel, from the release's own arithmetic.
    """

    pool: Callable[[Any], Pool]
    numerics: Callable[[Any], list[tuple[Operation, bool]]]
    graphs: Callable[[Any], list[list[Operation]]]
    eager: Callable[[Any], list[Operation]]
    slab_bytes: Callable[[Any, Any], int]


def _rows(context: Any) -> int:
    return 8 if context.reduced else ROWS


def _exchange_pool(context: Any) -> Pool:
    made = surfaces().exchange.PCIeDCPA2APool.from_exchange_group(
        exchange_group=context.exchange, device=context.device, max_batch_size=_rows(context), total_heads=HEADS,
        head_dim=HEAD_DIM, query_head_dim=QUERY_DIM,
    )  # fmt: skip
    return Pool(made, "DcpAllToAllPool")


def _exchange_slab(context: Any, channel: Any) -> int:
    module = surfaces().exchange
    # 1.1 keeps the signals' size in what it compiles, 1.5 in the module.
    signals = getattr(module, "_SIGNAL_BYTES", 0) or int(module._load_extension().meta_size())
    layout = module._staging_layout(
        signal_bytes=signals, world_size=context.world, max_batch_size=_rows(context), total_heads=HEADS,
        head_dim=HEAD_DIM, query_head_dim=QUERY_DIM,
    )  # fmt: skip
    return int(layout.slab_bytes)


def _exchange_numerics(context: Any) -> list[tuple[Operation, bool]]:
    found = []
    for rows in (1, 7, _rows(context)):
        found.append((gather(context, rows, HEADS, QUERY_DIM, torch.bfloat16), True))
        found += [(reduce_scatter(context, rows, HEADS, HEAD_DIM, natural), True) for natural in (True, False)]
    if torch.float8_e4m3fn in surfaces().exchange.SUPPORTED_GATHER_DTYPES:
        found.append((gather(context, _rows(context), HEADS, QUERY_DIM, torch.float8_e4m3fn), True))
    return found


def _exchange_chain(context: Any, count: int, rows: int) -> list[Operation]:
    """A gather, a reduce-scatter, and so on."""
    return [
        gather(context, rows, HEADS, QUERY_DIM, torch.bfloat16)
        if index % 2 == 0
        else reduce_scatter(context, rows, HEADS, HEAD_DIM, True)
        for index in range(count)
    ]


def _oneshot_pool(context: Any) -> Pool:
    made = surfaces().oneshot.PCIeOneshotAllReducePool.from_exchange_group(
        exchange_group=context.exchange, device=context.device, eager_buffer_bytes=PAYLOAD_BYTES,
        max_size=PAYLOAD_BYTES,
    )  # fmt: skip
    return Pool(made, "OneshotAllReducePool")


def _oneshot_slab(context: Any, channel: Any) -> int:
    """From the distance of a live channel's two slots, since the releases compute it in different places."""
    signals, (first, second) = channel.signal_ptrs[0], (pointers[0] for pointers in channel._eager_ptrs)
    return int(second - signals + second - first)


def _oneshot_numerics(context: Any) -> list[tuple[Operation, bool]]:
    widths = {torch.bfloat16: 2, torch.float16: 2, torch.float32: 4}
    found = [(all_reduce(context, (PAYLOAD_BYTES // width,), dtype), True) for dtype, width in widths.items()]
    found += [(all_reduce(context, (16 // width,), dtype), False) for dtype, width in widths.items()]
    # Rows of this width take the plain TP2 push in a graph, each with a geometry of its own.
    pushed = (1, 3) if context.reduced else (1, 2, 4, 6, 8, 10)
    found += [(all_reduce(context, (rows, HIDDEN), torch.bfloat16), True) for rows in pushed]
    found.append((all_reduce(context, (2, HIDDEN), torch.float16), True))
    fused = (1, 8) if context.reduced else range(1, 9)
    return found + [(add_rms_norm(context, rows, HIDDEN), True) for rows in fused]


def _oneshot_chain(context: Any, count: int, rows: int) -> list[Operation]:
    """A fused norm, a plain sum, and so on: the two advance different slot counters where push is on."""
    return [
        add_rms_norm(context, rows, HIDDEN) if index % 2 == 0 else all_reduce(context, (rows, HIDDEN), torch.bfloat16)
        for index in range(count)
    ]


FAMILIES = {
    "exchange": Family(
        _exchange_pool,
        _exchange_numerics,
        lambda context: [
            _exchange_chain(context, count, rows) for count, rows in ((2, _rows(context)), (3, 7), (5, 1))
        ],
        lambda context: _exchange_chain(context, 3, 7),
        _exchange_slab,
    ),
    "oneshot": Family(
        _oneshot_pool,
        _oneshot_numerics,
        lambda context: [_oneshot_chain(context, count, rows) for count, rows in ((2, 8), (3, 4), (5, 1))],
        lambda context: _oneshot_chain(context, 3, 2),
        _oneshot_slab,
    ),
}
