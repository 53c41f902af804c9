# SPDX-License-Identifier: Apache-2.0
"""What sparse MLA allocates from its query to its output when a whole batch takes the MQA path. Pure, without torch.

A long sparse prefill sends every token of the batch through the absorbed (MQA) attention, under decode context
parallelism also through the query gather and the combine. Upstream's profile run ends before all of it. Formulas follow
vLLM 0.33.0: ``MLAAttention.forward_impl``, ``DeepseekV32Attention._sparse_indexer_and_attn``,
``v1/attention/ops/dcp.py``, ``CudaCommunicator.all_gather`` and ``reduce_scatter``. Sizes come from the configuration
and the batch's rows only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

FP32_BYTES = 4
INT32_BYTES = 4

NCCL = "nccl"
DIRECT = "direct"
NO_GATHER = "none"
AG_RS = "ag_rs"
A2A = "a2a"


@dataclass(frozen=True)
class MqaCall:
    """One layer's attention over all rows of a batch, on one rank.

    Attributes:
        rows: query tokens.
        heads: query heads of this rank, before any gather.
        latent: width of the compressed KV (``kv_lora_rank``), also of one head's output.
        rope: width of the rotary part of the query.
        element_bytes: one element of activations and output.
        query_bytes: one element of the query that the kernel reads; 1 if it is quantised to FP8.
        world: ranks of the DCP group; 1 without.
        replicated: every rank already has all heads' queries (``dcp_q_replicate``).
        absorbed: the batch's absorbed and packed queries are the caller's own (DeepSeek V3.2's layer makes
            them before its profile branch); if not, they are made, and kept, inside.
    """

    rows: int
    heads: int
    latent: int
    rope: int
    element_bytes: int
    query_bytes: int
    world: int = 1
    replicated: bool = False
    absorbed: bool = False

    @property
    def seen_heads(self) -> int:
        """Heads that the kernel computes: those of the whole DCP group."""
        return self.heads * self.world

    @property
    def own_heads(self) -> int:
        """Heads whose query this rank has before the gather."""
        return self.seen_heads if self.replicated else self.heads

    @property
    def quantised(self) -> bool:
        return self.query_bytes < self.element_bytes

    @property
    def output(self) -> int:
        """Bytes of the kernel's output [rows, seen_heads, latent]."""
        return self.rows * self.seen_heads * self.latent * self.element_bytes

    @property
    def lse(self) -> int:
        """Bytes of its log-sum-exp [rows, seen_heads]."""
        return self.rows * self.seen_heads * FP32_BYTES

    def query(self, heads: int, element_bytes: int) -> int:
        """Bytes of a packed query [rows, heads, latent + rope]."""
        return self.rows * heads * (self.latent + self.rope) * element_bytes


@dataclass(frozen=True)
class Route:
    """How the query comes together and the output is combined: ``gather`` is NCCL, DIRECT (symmetric memory, which
    is in no transient) or NO_GATHER; ``combine`` is AG_RS, A2A (NCCL) or DIRECT. Without DCP neither matters."""

    gather: str = NO_GATHER
    combine: str = AG_RS


@dataclass(frozen=True)
class Kernel:
    """What ``forward_mqa`` allocates.

    Attributes:
        during: name and bytes of what is alive with its query at its fullest, the output included.
        after: the same when it makes its result compact, None if it does not.
        output: bytes that it returns and that die with the result; 0 if they lie in the shared workspace.
    """

    during: tuple[tuple[str, int], ...]
    output: int
    after: tuple[tuple[str, int], ...] | None = None


@dataclass(frozen=True)
class Moment:
    """What is alive at once, each with its bytes."""

    name: str
    tensors: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.tensors.values())


def moments(call: MqaCall, route: Route, kernel: Kernel) -> Iterator[Moment]:
    """The steps from the absorbed query to the combined output, with all that each keeps alive."""
    kept = {} if call.absorbed else {"absorbed query": call.rows * call.own_heads * call.latent * call.element_bytes}
    packed = call.query(call.own_heads, call.query_bytes)
    if call.quantised and not call.absorbed:
        concat = call.query(call.own_heads, call.element_bytes)
        yield Moment("quantise", kept | {"concat": concat, "packed query": packed})
    # Without DCP the kernel takes the two parts of an unquantised query as they are.
    packs = not call.absorbed if call.quantised else call.world > 1
    seen = kept | {"packed query": packed} if packs else kept
    if call.world > 1 and route.gather == NCCL:
        gathered = packed * call.world
        # A gather along the heads is one along the rows and a copy.
        yield Moment("gather", seen | {"gathered by rank": gathered, "gathered by head": gathered})
        seen = kept | {"gathered query": gathered}
    elif call.world > 1 and route.gather == DIRECT:
        seen = kept
    yield Moment("attention", seen | dict(kernel.during))
    if kernel.after is not None:
        yield Moment("compact", seen | dict(kernel.after))
    if call.world > 1:
        yield Moment("combine", seen | {"output": kernel.output, "lse": call.lse} | combine_tensors(call, route))


def combine_tensors(call: MqaCall, route: Route) -> dict[str, int]:
    """What a combine allocates beside the output and LSE it is given.

    AG_RS (``cp_lse_ag_out_rs``): the corrected LSE, then in the reduce-scatter a head-major copy of the output, its
    share, and the share token-major again. A2A (``dcp_a2a_lse_reduce``): a buffer to send and one to receive,
    with the LSE packed behind each head, and the result. DIRECT (``DirectDCPA2AWorkspace.lse_reduce``): the result.
    """
    share = call.output // call.world
    if route.combine == DIRECT:
        return {"result": share}
    if route.combine == A2A:
        packed = FP32_BYTES // call.element_bytes
        buffer = call.rows * call.seen_heads * (call.latent + packed) * call.element_bytes
        return {"send": buffer, "receive": buffer, "result": share}
    return {"final lse": call.lse, "head-major output": call.output, "share": share, "result": share}


def largest(call: MqaCall, route: Route, kernel: Kernel) -> Moment:
    """The moment that holds most; the first of equals."""
    return max(moments(call, route, kernel), key=lambda moment: moment.total)
