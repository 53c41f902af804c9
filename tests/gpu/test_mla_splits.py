"""Split accumulators of FLASH_ATTN_MLA_SPARSE's FlashAttention 3 call on a real GPU, against the sizes of the overlay.

Needs a device of compute capability 9.0 and a vLLM with ``_vllm_fa3_C``. ``python3 test_mla_splits.py OUT.json`` runs
the same cases without pytest and writes one row a case and variant.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SPLITS = ROOT / "overlay/vllm/v1/attention/backends/mla/fa3_splits.py"
TOPK, WIDTH, ROPE, POOL = 2048, 512, 64, 1 << 16
BUDGET = 520 << 20
# What FA3 allocates beside the accumulators (output, LSE, scheduler) is computed; blocks are rounded up to 512 B.
SLACK = 64 << 10
# Rows, heads, and keys of the first row and of the others.
CASES = {
    "100-rows": (100, 64, 2048, 2048),
    "512-rows": (512, 64, 2048, 2048),
    "688-rows-one-long": (688, 64, 2048, 64),
    "912-rows": (912, 64, 2048, 2048),
    "912-rows-one-long": (912, 64, 2048, 1),
    "912-rows-half": (912, 64, 2048, 1024),
    "992-rows-one-long": (992, 64, 2048, 64),
    "1000-rows": (1000, 64, 2048, 2048),
    "912-rows-16-heads": (912, 16, 2048, 1),
    # As a captured graph with one request in it: rows without keys are no work to FA3.
    "512-rows-one-with-keys": (512, 64, 2048, 0),
}
REORDERED = {"512-rows-one-with-keys"}


def missing() -> str:
    """Why this machine cannot run these cases; empty if it can."""
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("vllm") is None:
        return "torch and vLLM are not installed beside this Python"
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return "needs a CUDA device of compute capability 9.0"
    try:
        interface = importlib.import_module("vllm.vllm_flash_attn.flash_attn_interface")
    except ImportError as error:
        return f"FlashAttention is not there: {error}"
    return "" if interface.FA3_AVAILABLE else f"FlashAttention 3 is not there: {interface.FA3_UNAVAILABLE_REASON}"


@cache
def splits() -> Any:
    spec = importlib.util.spec_from_file_location("fa3_splits", SPLITS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def inputs(rows: int, heads: int, first: int, others: int) -> dict[str, Any]:
    """The backend's own arguments: BF16 cache rows of 576, a page a key, one query a row."""
    import torch

    torch.manual_seed(rows + heads)
    cache_rows = torch.randn(POOL, WIDTH + ROPE, device="cuda", dtype=torch.bfloat16)
    counts = torch.full((rows,), others, dtype=torch.int32, device="cuda")
    counts[0] = first
    return {
        "q": torch.randn(rows, heads, ROPE, device="cuda", dtype=torch.bfloat16),
        "q_v": torch.randn(rows, heads, WIDTH, device="cuda", dtype=torch.bfloat16),
        "k": cache_rows[:, WIDTH:].unsqueeze(1).unsqueeze(1),
        "v": cache_rows[:, :WIDTH].unsqueeze(1).unsqueeze(1),
        "max_seqlen_q": 1,
        "cu_seqlens_q": torch.arange(rows + 1, dtype=torch.int32, device="cuda"),
        "max_seqlen_k": TOPK,
        "seqused_k": counts,
        "block_table": torch.randint(POOL, (rows, TOPK), dtype=torch.int32, device="cuda"),
        "softmax_scale": 0.1,
        "causal": True,
        "fa_version": 3,
    }


def call(arguments: dict[str, Any], count: int) -> tuple[Any, int]:
    """The output, and the most bytes that the call allocates."""
    import torch

    attention = importlib.import_module("vllm.vllm_flash_attn.flash_attn_interface").flash_attn_varlen_func
    attention(**arguments, num_splits=count)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = attention(**arguments, num_splits=count)
    torch.cuda.synchronize()
    return found, torch.cuda.max_memory_allocated() - before


def measure(name: str) -> list[dict[str, Any]]:
    """Upstream's own count, and the count within the budget."""
    import torch

    rows, heads, first, others = CASES[name]
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    case = splits().SplitCase(heads, WIDTH, TOPK, processors)
    arguments, own = inputs(rows, heads, first, others), splits().upstream_splits(case, rows)
    within = splits().splits_within(case, rows, BUDGET)
    found, reference = [], None
    for variant, count, asked in (("upstream", own, 0), ("patched", within, 0 if within == own else within)):
        output, peak = call(arguments, asked)
        reference = output if reference is None else reference
        output_and_lse = rows * heads * (WIDTH * 2 + 4)
        found.append(
            {
                "case": name,
                "variant": variant,
                "rows": rows,
                "heads": heads,
                "splits": count,
                "accumulator_bytes": case.bytes_of(rows, count),
                "peak_bytes": peak,
                "peak_bytes_not_explained": peak - case.bytes_of(rows, count) - output_and_lse,
                "unequal_rows": int((output != reference).flatten(1).any(dim=1).sum()),
                "most_absolute_difference": float((output.float() - reference.float()).abs().max()),
            }
        )
    return found


def check(rows: list[dict[str, Any]]) -> None:
    """The sizes are those that the GPU shows, the budget holds, and the results are the same bits."""
    for row in rows:
        assert 0 <= row["peak_bytes_not_explained"] <= SLACK, row
        # Another order of sums may not be seen in BF16; it must be small if it is.
        assert row["unequal_rows"] == 0 or row["case"] in REORDERED, row
        assert row["most_absolute_difference"] < 0.02, row
    assert rows[1]["accumulator_bytes"] <= BUDGET
    assert rows[1]["peak_bytes"] <= rows[0]["peak_bytes"]


def main(path: str) -> None:
    why = missing()
    if why:
        raise SystemExit(why)
    rows = [row for name in CASES for row in measure(name)]
    Path(path).write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    for row in rows:
        print(json.dumps(row, sort_keys=True))
    for name in CASES:
        check([row for row in rows if row["case"] == name])


if __name__ == "__main__":
    main(sys.argv[1])
else:
    import pytest

    pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(missing()), reason=missing() or "runs")]

    @pytest.mark.parametrize("name", CASES)
    def test_the_bound_keeps_bits_and_bytes(name: str) -> None:
        check(measure(name))
