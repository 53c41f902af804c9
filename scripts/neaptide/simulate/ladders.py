"""A prefill ladder as operations: the sparse indexer's logits, launch by launch, under each policy.

The overlay's own size functions say what a launch scores and allocates; upstream's split is that of
``_split_indexer_prefill_chunks`` in vLLM 0.33, which divides the budget by the unrounded width.
"""

from __future__ import annotations

import importlib
import re
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neaptide.errors import NeaptideError
from neaptide.simulate.settings import MIB
from neaptide.simulate.traces import TOTAL_BYTES, Operation, Trace

POLICIES = ("upstream", "constant-bytes", "fixed-width")
PACKAGES = ("vllm", "vllm.model_executor", "vllm.model_executor.layers")
LOGITS = "vllm.model_executor.layers.sparse_indexer_logits"


@dataclass(frozen=True)
class Ladder:
    """One prompt of ``total_tokens`` in chunks of ``chunk_tokens``.

    Attributes:
        columns: most keys that a row may have (``max_model_len``): the width of ``fixed-width``; at least the prompt.
        sm100: BF16 logits with an FP32 copy beside them; else FP32.
    """

    chunk_tokens: int
    total_tokens: int
    columns: int
    layers: int = 2
    heads: int = 32
    budget_bytes: int = 512 * MIB
    sm100: bool = False

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Rows and last column of each chunk."""
        for begin in range(0, self.total_tokens, self.chunk_tokens):
            end = min(begin + self.chunk_tokens, self.total_tokens)
            yield end - begin, end


def parse_ladder(text: str, columns: int | None = None, **more: Any) -> Ladder | None:
    """The ladder that ``CHUNK:TOTAL`` names; None if the text has another form.

    Raises:
        NeaptideError: no tokens, or fewer columns than tokens.
    """
    found = re.fullmatch(r"(\d+):(\d+)", text.replace(",", "").replace("_", ""))
    if found is None:
        return None
    chunk, total = int(found[1]), int(found[2])
    if not 0 < chunk <= total <= (columns or total):
        raise NeaptideError(
            f"ladder {text} of at most {columns or total} columns", wanted="0 < CHUNK <= TOTAL <= columns",
            todo="For example: neaptide simulate 8192:98304.", where="LADDER",
        )  # fmt: skip
    return Ladder(chunk, total, columns or total, **more)


@contextmanager
def stand_in_vllm(overlay: Path) -> Iterator[None]:
    """A ``vllm`` of the overlay's files alone, gone again afterwards."""
    before = {name: module for name, module in sys.modules.items() if name == "vllm" or name.startswith("vllm.")}
    for name in before:
        del sys.modules[name]
    for name in PACKAGES:
        package = types.ModuleType(name)
        package.__path__ = [str(overlay.joinpath(*name.split(".")))]
        sys.modules[name] = package
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]:
            del sys.modules[name]
        sys.modules.update(before)


def overlay_sizes(overlay: Path) -> Any:
    """The module of the overlay that decides sizes; it has no import beyond its pure neighbours."""
    with stand_in_vllm(overlay):
        return importlib.import_module(LOGITS)


@dataclass(frozen=True)
class Launches:
    """What each launch of a ladder allocates under one policy.

    Attributes:
        sizes: the overlay's module.
        launch: its size of every launch; None for upstream's.
    """

    ladder: Ladder
    policy: str
    sizes: Any
    layout: Any
    launch: Any

    @property
    def cached(self) -> tuple[int, ...]:
        """Blocks that ``keep_blocks_cached`` takes and gives back before each launch."""
        return () if self.launch is None or self.launch.fixed_columns else tuple(self.launch.allocations)

    @classmethod
    def under(cls, policy: str, ladder: Ladder, sizes: Any) -> Launches:
        """Launches of a policy.

        Raises:
            NeaptideError: a budget that the policy refuses.
        """
        layout = sizes.logits_layout(sm100=ladder.sm100, fp32_copy=True)
        arguments = (ladder.budget_bytes, ladder.chunk_tokens, ladder.columns, ladder.heads, layout)
        try:
            launch = sizes.prefill_launch(policy.replace("-", "_"), *arguments)
        except ValueError as error:
            raise NeaptideError(
                str(error), wanted="a budget that one step of rows fits", todo="Raise --budget-mib.",
                where="--budget-mib",
            ) from error  # fmt: skip
        return cls(ladder, policy, sizes, layout, launch)

    def of_chunk(self, rows: int, columns: int) -> Iterator[tuple[int, int]]:
        """Bytes of the logits of each launch and of their FP32 copy; 0 where none is made."""
        if self.launch is None:
            most = max(1, self.ladder.budget_bytes // self.sizes.FP32_BYTES // columns)
        else:
            most = self.launch.max_rows(max(columns, self.launch.fixed_columns))
        step = self.sizes.prefill_row_step(self.ladder.heads)
        for begin in range(0, rows, most):
            taken = min(most, rows - begin)
            width = columns if self.launch is None else self.launch.width(taken, columns)
            elements = self.sizes.round_up(taken, step) * self.layout.prefill_stride(width)
            yield elements * self.layout.element_bytes, elements * self.layout.copy_bytes


def ladder_trace(ladder: Ladder, policy: str, sizes: Any) -> tuple[Trace, int]:
    """The operations of a ladder, and how many of them belong to its first chunk.

    ``upstream`` holds a launch's logits until the next launch of the layer has its own; the overlay lets go of them
    before, and under ``constant-bytes`` has the allocator keep its blocks.
    """
    launches = Launches.under(policy, ladder, sizes)
    chunks = [list(launches.of_chunk(rows, columns)) for rows, columns in ladder.chunks()]
    made = list(operations_of(chunks, ladder.layers, launches.cached, holds_previous=policy == "upstream"))
    operations = [operation for chunk in made for operation in chunk]
    return Trace(policy, operations, total_bytes=TOTAL_BYTES), len(made[0])


def operations_of(
    chunks: Iterable[Sequence[Sequence[int]]], layers: int, cached: Sequence[int], *, holds_previous: bool
) -> Iterator[list[Operation]]:
    """Allocations and frees of each chunk of a prefill, in its order.

    BF16 logits end with their copy; what a layer still has of its last launch ends with the call of its op. Each
    launch has ``len(cached) + 2`` ids, from 1 on: its blocks', its logits', its copy's.

    Args:
        chunks: bytes of the logits and of the FP32 copy (0 for none) of each launch of each chunk.
        layers: how often a chunk's launches are made.
        cached: bytes of blocks that are taken and given back before each launch.
        holds_previous: whether a launch's logits are held until the next launch of the layer has its own.
    """
    next_key = 1
    for chunk in chunks:
        operations: list[Operation] = []
        for _ in range(layers):
            held = 0
            for logits_bytes, copy_bytes in chunk:
                if held and not holds_previous:
                    operations.append(["free", held])
                    held = 0
                logits = next_key + len(cached)
                operations += [["alloc", key, size] for key, size in enumerate(cached, next_key)]
                operations += [["free", key] for key in range(next_key, logits)]
                operations.append(["alloc", logits, logits_bytes])
                if copy_bytes:
                    operations += [["alloc", logits + 1, copy_bytes], ["free", logits]]
                if held:
                    operations.append(["free", held])
                held, next_key = logits + bool(copy_bytes), logits + 2
            operations.append(["free", held])
        yield operations
