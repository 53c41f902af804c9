"""``python child.py SPEC RESULT``: what the indexer of the b12x on the path reserves for each plan, without a device.

Its own planner computes every size. Imports nothing of neaptide.
"""

from __future__ import annotations

import importlib
import json
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch


def module(name: str) -> Any:
    """A module of the indexer, whose package was renamed at 1.3."""
    for package in ("dsa_indexer", "nsa_indexer"):
        try:
            return importlib.import_module(f"b12x.attention.{package}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"b12x.attention.{package}":
                raise
    raise ModuleNotFoundError("b12x has no sparse indexer")


def planned(case: dict[str, Any]) -> Any:
    """The plan of a case."""
    scratch = module("scratch")
    prefill = case["mode"] == "prefill"
    keys: dict[str, Any] = {} if case["keys"] == "fp8" else {"cache_format": case["keys"]}
    if case["budget_mib"] and "plan_budget" in scratch.B12XIndexerScratchCaps.__dataclass_fields__:
        keys["plan_budget"] = module("plan_budget").Budget(plan_bytes=case["budget_mib"] << 20)
    properties = SimpleNamespace(multi_processor_count=case["sms"], major=12, minor=0)
    with patch.object(torch.cuda, "get_device_properties", lambda *_: properties):
        return scratch.plan_indexer_scratch(
            scratch.B12XIndexerScratchCaps(
                device="cpu" if case["sms"] == 1 else "cuda:0", source_layout="paged",
                num_q_heads=case["heads"], topk=case["topk"], page_size=case["page"],
                max_page_table_width=case["tokens"] // case["page"],
                max_q_rows=case["rows"], mode=case["mode"], shared_page_table=prefill, **keys,
            )
        )  # fmt: skip


def regions_of(plan: Any) -> list[dict[str, Any]]:
    """Name and bytes of each region, in order; upstream's are told by where the next one begins."""
    views = getattr(plan.inner, "views", None)
    if views is not None:
        return [{"name": name, "nbytes": nbytes} for name, _, _, _, nbytes in views]
    memory = getattr(plan.layout, "memory", None)
    if memory is not None:
        return [
            {
                "name": item.region.name,
                "nbytes": item.region.nbytes,
                "offset": item.offset,
                "shares": item.region.shares,
                "written_by": item.region.written_by,
                "read_by": item.region.read_by,
                "live": item.region.live,
            }
            for item in memory.placed
            if item.region.nbytes
        ]
    fields = {name: value for name, value in vars(plan.layout).items() if name.endswith("_offset_bytes")}
    begins = sorted((offset, name.removesuffix("_offset_bytes")) for name, offset in fields.items())
    ends = [*(offset for offset, _ in begins[1:]), plan.layout.nbytes]
    return [
        {"name": name, "nbytes": end - begin, "offset": begin}
        for (begin, name), end in zip(begins, ends, strict=True)
        if end > begin
    ]


def transient_bytes(case: dict[str, Any], plan: Any) -> int:
    """What a call at the plan's capacities allocates beside it: the fold's candidates, where nothing holds them."""
    paged = module("paged")
    prepared = hasattr(module("api"), "Binding")
    if getattr(plan.layout, "memory", None) is not None or prepared:
        return 0
    if plan.layout.route == "paged_fused":
        return 0
    fold = paged._plan_two_level_fold(
        q_rows=case["rows"], topk=case["topk"], page_size=case["page"],
        page_table_width=case["tokens"] // case["page"],
        supertile_pages=plan.layout.supertile_tokens // case["page"], output_physical_slots=False,
    )  # fmt: skip
    return int(fold.candidate_nbytes) if fold.slices else 0


def row(case: dict[str, Any]) -> dict[str, Any]:
    """One case: bytes of the plan and of a call beside it, or why there is no plan."""
    try:
        plan = planned(case)
    except (TypeError, ValueError) as error:
        unknown = "cache_format" in str(error) and isinstance(error, TypeError)
        return {"case": case, "none": "this release has no such keys" if unknown else str(error)}
    (nbytes,) = (spec.shape[0] for spec in plan.scratch_specs())
    fp8 = case["keys"] == "fp8"
    memory = getattr(plan.layout, "memory", None) if fp8 else None
    choice = getattr(plan.inner.caps, "choice", None)
    return {
        "case": case,
        "nbytes": nbytes,
        "transient_bytes": transient_bytes(case, plan) if fp8 else 0,
        "regions": regions_of(plan),
        "route": plan.layout.route if fp8 else "mxfp4",
        "notes": [] if memory is None else list(memory.notes),
        "launches": 1 if choice is None else -(-choice.call_rows // choice.rows),
        "given_up": [] if choice is None else list(choice.reasons),
    }


def main(spec_path: str, result_path: str) -> int:
    with open(spec_path) as handle:
        cases = json.load(handle)
    rows = [row(case) for case in cases]
    with open(result_path, "w") as handle:
        json.dump(rows, handle)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
