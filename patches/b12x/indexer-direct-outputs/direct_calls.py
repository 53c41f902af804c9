"""The direct logits routes of a tree on a CPU: the real functions on queries that pass for a device's.

A launch is replaced by one that puts out ``row * 4096 + token`` for the keys of a row, and nothing elsewhere.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

DIM, PAGE, LARGE = 128, 64, 4096
NO_SCORE = float("-inf")


def module(name: str) -> ModuleType:
    """A module of the indexer, whose package has another name before 1.3."""
    package = next(p for p in ("dsa_indexer", "nsa_indexer") if find_spec(f"b12x.attention.{p}"))
    return importlib.import_module(f"b12x.attention.{package}.{name}")


class Device(str):
    """The CPU, which says that it is a CUDA device."""

    type, index = "cuda", 0

    def __eq__(self, other: object) -> bool:
        return str(other) == "cpu"

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


class OnDevice(torch.Tensor):
    """A tensor of the CPU that says that it is on a CUDA device."""

    device = Device("cpu")  # type: ignore[assignment]


def queries(rows: int, heads: int = 1) -> torch.Tensor:
    return torch.zeros(rows, heads, DIM).to(torch.float8_e4m3fn).as_subclass(OnDevice)


class Made(TorchDispatchMode):
    """Bytes of every new storage, but of what a launch makes."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.outside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {one.untyped_storage()._cdata for one in _tensors((args, kwargs or {}))}
        if not self.outside:
            storages = [one.untyped_storage() for one in _tensors(out)]
            self.sizes += [storage.nbytes() for storage in storages if storage._cdata not in known]
        return out

    def large(self, nbytes: int) -> list[int]:
        """The sizes of ``nbytes`` and more."""
        return [size for size in self.sizes if size >= nbytes]


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [one for item in items for one in _tensors(item)]


@dataclass
class Launch:
    """What a launch was compiled for, the tensor that it wrote, and what its first element was before."""

    spec: object
    logits: torch.Tensor
    first: float


class Kernels:
    """Stand-ins for what a CPU cannot do, and the launches that were asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches: list[Launch] = []
        self.made = Made()
        for name, launch in (("kernel", self._pages), ("contiguous_kernel", self._keys)):
            there = module(name)
            for attribute in vars(there):
                if attribute.startswith("_build_"):
                    monkeypatch.setattr(there, attribute, lambda *_, kernel=attribute, **__: kernel)
                elif attribute.startswith(("_dummy_", "_cached_int32_scalar", "_resolve_", "_needs_")):
                    if attribute.endswith(("_desc_ptrs", "_int32_scalar", "_persistent_ctas", "_scalar_load")):
                        monkeypatch.setattr(there, attribute, lambda *_, **__: torch.zeros(1, dtype=torch.int32))
            monkeypatch.setattr(there, "_to_kernel_tensor", lambda tensor, *_, **__: tensor)
            monkeypatch.setattr(there, "current_cuda_stream", lambda: None)
            monkeypatch.setattr(there, "b12x_launch", launch)

    def run(self, call: Callable[..., torch.Tensor], **operands: Any) -> torch.Tensor:
        self.launches.clear()
        self.made.sizes.clear()
        with self.made:
            return call(**operands)

    def _pages(self, kernel: str, *, compile_spec: object, runtime_args: Any, **_: Any) -> None:
        lengths, logits = runtime_args[7], runtime_args[-2]
        if logits.ndim == 2:
            self._write(compile_spec, logits, torch.zeros_like(lengths), lengths)
        else:
            self._launched(compile_spec, logits)

    def _keys(self, kernel: str, *, compile_spec: object, runtime_args: Any, **_: Any) -> None:
        starts, ends, logits, tiles, fills = (*runtime_args[5:9], runtime_args[-2])
        if tiles.numel() == 1:
            self._write(compile_spec, logits, starts, ends, fills=bool(fills))
        else:
            self._launched(compile_spec, tiles)

    def _launched(self, spec: object, logits: torch.Tensor) -> None:
        self.launches.append(Launch(spec, logits, float(logits.flatten()[0])))

    def _write(
        self, spec: object, logits: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, fills: bool = False
    ) -> None:
        self._launched(spec, logits)
        self.made.outside = True
        for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
            if fills:
                logits[row] = NO_SCORE
            logits[row, start:end] = torch.arange(start, end) + float(row * LARGE)
        self.made.outside = False


def scores(rows: int, width: int, ends: list[int], starts: list[int] | None = None) -> torch.Tensor:
    """What a call puts out: the scores of each row's keys, and -inf elsewhere, in padding rows too."""
    out = torch.full((rows, width), NO_SCORE)
    for row, end in enumerate(ends):
        keys = torch.arange(0 if starts is None else starts[row], min(end, width))
        out[row, keys] = keys + float(row * LARGE)
    return out


def cache(pages: int = 1) -> torch.Tensor:
    return torch.zeros(pages, PAGE * (DIM + 4), dtype=torch.uint8)


def table(rows: int, pages: int) -> torch.Tensor:
    return torch.zeros(rows, pages, dtype=torch.int32)


def lengths(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def kernel_call(rows: int, pages: int, ends: list[int], heads: int = 1) -> dict[str, Any]:
    """Operands of the paged kernel; with its schedule, which the scheduled routes want."""
    return {
        "q_fp8": queries(rows, heads), "weights": torch.ones(rows, heads), "index_k_cache": cache(),
        "real_page_table": table(rows, pages), "seqlens_per_query": lengths(*ends),
        "schedule_metadata": torch.zeros(2, 2, dtype=torch.int32),
    }  # fmt: skip


def paged_metadata(pages: int, ends: list[int]) -> Any:
    return module("_impl").IndexerPagedDecodeMetadata(
        real_page_table=table(len(ends), pages), cache_seqlens_int32=lengths(*ends),
        paged_mqa_schedule_metadata=torch.zeros(2, 2, dtype=torch.int32),
    )  # fmt: skip


def decode_call(rows: int, pages: int, ends: list[int], **more: Any) -> dict[str, Any]:
    """Operands of paged_decode_logits over ``rows`` rows of queries, the last of which may be padding."""
    named = {"metadata": paged_metadata(pages, ends)} if "binding" not in more else {}
    return {"q_fp8": queries(rows), "weights": torch.ones(rows, 1), "index_k_cache": cache(), **named, **more}


def msa_call(rows: int, heads: int, pages: int, ends: list[int], **more: Any) -> dict[str, Any]:
    return {
        "q_fp8": queries(rows, heads), "q_scale": torch.ones(rows, heads), "index_k_cache": cache(),
        "metadata": paged_metadata(pages, ends), **more,
    }  # fmt: skip


def keys_call(rows: int, width: int, starts: list[int], ends: list[int]) -> dict[str, Any]:
    """Operands of the contiguous kernel."""
    return {
        "q_fp8": queries(rows), "weights": torch.ones(rows, 1), "k_start": lengths(*starts), "k_end": lengths(*ends),
        "k_quant": torch.zeros(width, DIM).to(torch.float8_e4m3fn), "k_scale": torch.ones(width),
    }  # fmt: skip


def contiguous_call(rows: int, width: int, starts: list[int], ends: list[int], **more: Any) -> dict[str, Any]:
    """Operands of contiguous_logits."""
    given = keys_call(rows, width, starts, ends)
    given["kv_fp8"] = given.pop("k_quant"), given.pop("k_scale")
    given["metadata"] = module("_impl").IndexerContiguousMetadata(
        k_start=given.pop("k_start"), k_end=given.pop("k_end")
    )
    return given | more


def wrong(rows: int, width: int) -> dict[str, torch.Tensor]:
    """Outputs that are no contiguous fp32 [rows, width] on the CPU, each wrong in one way."""
    return {
        "type": torch.zeros(rows, width, dtype=torch.float16),
        "same size, other type": torch.zeros(rows, width, dtype=torch.int32),
        "fewer rows": torch.zeros(rows - 1, width),
        "more rows": torch.zeros(rows + 1, width),
        "narrower": torch.zeros(rows, width - 64),
        "wider": torch.zeros(rows, width + 64),
        "flat": torch.zeros(rows * width),
        "three dimensions": torch.zeros(1, rows, width),
        "columns first": torch.zeros(width, rows).t(),
        "left part of a wider one": torch.zeros(rows, width + 64)[:, :width],
        "every second row": torch.zeros(2 * rows, width)[::2],
        "one row for all": torch.zeros(1, width).expand(rows, width),
        "device": torch.zeros(rows, width, device="meta"),
    }


WRONG = list(wrong(2, 128))


def plan(rows: int = 9, mode: str = "decode", **caps: Any) -> Any:
    scratch = module("scratch")
    given = {"num_q_heads": 32, "topk": 24, "page_size": 64, "shared_page_table": mode == "prefill"} | caps
    return scratch.plan_indexer_paged_scratch(
        scratch.B12XIndexerPagedScratchCaps(
            device="cpu", max_page_table_width=64, max_q_rows=rows, mode=mode, **given
        )
    )  # fmt: skip


def bound(planned: Any, pages: int = 5, ends: Any = (1,)) -> Any:
    return planned.bind(
        scratch=torch.zeros(planned.layout.nbytes, dtype=torch.uint8),
        real_page_table=torch.zeros(len(ends), pages, dtype=torch.int32),
        cache_seqlens_int32=torch.tensor(ends, dtype=torch.int32),
        shared_page_table=planned.layout.route == "packed_contiguous",
    )


def spans(planned: Any) -> dict[str, tuple[int, int]]:
    """Offset and end of every region with bytes."""
    placed = planned.layout.memory.placed
    return {item.region.name: (item.offset, item.offset + item.region.nbytes) for item in placed if item.region.nbytes}
