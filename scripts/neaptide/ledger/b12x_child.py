"""``python b12x_child.py SPEC RESULT``: what the b12x on the path would allocate for a profile's shapes.

The programs of ``neaptide slabs`` and ``neaptide plans`` compute it, in one process. Imports nothing of neaptide.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

# This folder's modules are no modules of anybody else.
sys.path.remove(str(Path(__file__).parent))

import torch

# Nothing is compiled here: its compiler takes two seconds to load.
vars(torch)["_dynamo"] = SimpleNamespace(disable=lambda function: function)


@functools.cache
def program(command: str) -> Any:
    """The child program of another command."""
    path = Path(__file__).resolve().parents[1] / command / "child.py"
    spec = importlib.util.spec_from_file_location(f"{command}_child", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def channels(spec: dict[str, Any]) -> dict[str, Any]:
    """Bytes of a channel of each kind; none where the profile has no shape for it."""
    slabs = program("slabs")
    kinds = {"exchange": slabs.exchange, "oneshot": slabs.oneshot, "dma": slabs.dma}
    return {kind: kinds[kind](shape) for kind, shape in spec.items() if shape is not None}


def plans(spec: dict[str, Any]) -> dict[str, Any]:
    """The plan of each case, by name."""
    return {name: program("plans").row(case) for name, case in spec.items()}


def indexer() -> str:
    """The package of the indexer, which was renamed."""
    return str(program("plans").module("scratch").__name__.split(".")[-2])


class Allocated(Exception):
    """A matrix of the size in question was asked for; ``args[0]`` is its bytes."""


class Device(str):
    """The CPU, which says that it is a CUDA device."""

    type, index = "cuda", 0  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return str(other) == "cpu"

    __hash__ = str.__hash__

    def __ne__(self, other: object) -> bool:
        return not self == other


class OnDevice(torch.Tensor):  # type: ignore[misc]
    """A tensor of the CPU that says that it is on a CUDA device."""

    device = Device("cpu")


def direct(spec: dict[str, int]) -> int:
    """Bytes of the logits that the direct paged route makes for rows over a whole context."""
    kernel = program("plans").module("kernel")
    rows, pages, heads = spec["rows"], spec["pages"], spec["heads"]
    least = rows * pages * spec["page"]

    def watched(make: Any) -> Any:
        def made(*size: Any, **options: Any) -> torch.Tensor:
            found = make(*size, **{**options, "device": "meta"})
            if found.numel() >= least:
                raise Allocated(found.numel() * found.element_size())
            return found.to("meta")

        return made

    nothing: dict[str, Any] = {
        name: lambda *_, **__: torch.zeros(1, dtype=torch.int32)
        for name in vars(kernel)
        if name.endswith(("_desc_ptrs", "_int32_scalar", "_persistent_ctas", "_scalar_load"))
    }
    queries = torch.zeros(rows, heads, spec["head_dim"]).to(torch.float8_e4m3fn).as_subclass(OnDevice)
    nothing["_to_kernel_tensor"] = lambda tensor, *_, **__: tensor
    stand_ins = patch.multiple(kernel, **nothing)
    with stand_ins, patch.multiple(torch, empty=watched(torch.empty), full=watched(torch.full)):
        try:
            kernel.run_paged_logits_kernel(
                q_fp8=queries, weights=torch.ones(rows, heads), page_size=spec["page"],
                index_k_cache=torch.zeros(1, spec["page"] * (spec["head_dim"] + 4), dtype=torch.uint8),
                real_page_table=torch.zeros(rows, pages, dtype=torch.int32),
                seqlens_per_query=torch.zeros(rows, dtype=torch.int32),
                schedule_metadata=torch.zeros(2, 2, dtype=torch.int32),
            )  # fmt: skip
        except Allocated as found:
            return int(found.args[0])
        except ValueError as error:
            # The patched route allocates nothing over its ceiling.
            if type(error).__name__ == "DirectLogitsTooLarge":
                return 0
            raise
    raise RuntimeError("the direct paged route allocates no logits")


def answer_to(spec: dict[str, Any]) -> dict[str, Any]:
    """The answer to one profile's shapes."""
    return {
        "channels": channels(spec["channels"]),
        "plans": plans(spec["plans"]),
        "indexer": indexer(),
        "direct_bytes": direct(spec["direct"]) if spec["direct"]["rows"] else 0,
    }


def main(spec_path: str, result_path: str) -> int:
    with open(spec_path) as handle:
        specs = json.load(handle)
    found = [answer_to(spec) for spec in specs]
    with open(result_path, "w") as handle:
        json.dump(found, handle)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
