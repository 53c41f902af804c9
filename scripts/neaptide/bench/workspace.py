"""``neaptide bench workspace``: the workspace manager on a GPU, upstream's against the patched one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from neaptide.bench.engine import Bench, Variant
from neaptide.bench.parts import add_rows, chosen_cases, run_child
from neaptide.bench.results import MIB, headed_table
from neaptide.output import Progress

OVERFLOW = "VLLM_NEAPTIDE_WORKSPACE_OVERFLOW"
SWITCHES = (OVERFLOW, "VLLM_NEAPTIDE_WORKSPACE_OVERFLOW_MB")
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One thing to try; ``policy`` is the value of the overflow switch, for the patched vLLM alone.

    Attributes:
        settings: what the child reads for this kind; sizes in bytes.
    """

    name: str
    kind: str
    settings: Mapping[str, Any]
    policy: str | None = None
    patched_only: bool = False

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "kind": self.kind, **self.settings}


_STEPS = [n * 64 * MIB for n in range(1, 17)]
# Sizes of local-inference-lab/vllm#224, whose log counts MB of 2^20 bytes.
_SLOT = {"slot_bytes": round(578.50 * MIB), "requests_bytes": [round(607.70 * MIB), round(917.67 * MIB)]}
_LANES = {"max_model_len": 524288, "factor": 2}
_DECLARED = (
    Case("growth", "growth", {"sizes_bytes": _STEPS, "keep_views": False, "captured": ""}),
    Case("growth-views-kept", "growth", {"sizes_bytes": _STEPS, "keep_views": True, "captured": ""}),
    Case("growth-captured-first", "growth", {"sizes_bytes": _STEPS, "keep_views": False, "captured": "first"}),
    Case("growth-captured-planned", "growth", {"sizes_bytes": _STEPS, "keep_views": True, "captured": "planned"}),
    Case("overflow", "overflow", _SLOT),
    Case("overflow-error", "overflow", _SLOT, policy="error", patched_only=True),
    Case("lanes-whole", "lanes", {**_LANES, "graphs_only": False}),
    Case("lanes-graphs-only", "lanes", {**_LANES, "graphs_only": True}, patched_only=True),
)
CASES: dict[str, Case] = {c.name: c for c in _DECLARED}


def choose_cases(names: Sequence[str]) -> list[Case]:
    """Cases by name; all of them for none."""
    return chosen_cases(CASES, names, "bench workspace")


def measure(bench: Bench, upstream: Variant, patched: Variant, cases: Sequence[Case]) -> dict[str, Any]:
    """Every case with both variants: one process a variant and policy."""
    result: dict[str, Any] = {"rows": [], "versions": {}, "device": ""}
    for variant in (upstream, patched):
        for policy in sorted({c.policy for c in cases}, key=str):
            chosen = [c for c in cases if c.policy == policy and not (c.patched_only and variant is upstream)]
            if not chosen:
                continue
            environment = {} if policy is None else {OVERFLOW: policy}
            found = run_child(bench, variant, chosen, unset=SWITCHES, environment=environment)
            add_rows(result, found, [{"variant": variant.name, **row} for row in found["rows"]], bench)
    return result


GROWTH_COLUMNS = ("case", "variant", "peak", "views kept", "at the end, MiB", "moves", "refused", "dangling addresses")
OVERFLOW_COLUMNS = ("case", "variant", "requests", "slot moved", "replays equal", "in capture", "held after, MiB")
LANE_COLUMNS = ("case", "variant", "lane 0, MiB", "lane 1, MiB")


def _mib(value: int) -> str:
    return f"{value / MIB:,.2f}".removesuffix(".00")


def growth_line(row: Row) -> list[str]:
    sizes = [_mib(row[f"{key}_bytes"]) for key in ("peak_reserved", "reserved_views_kept", "reserved_end")]
    return [
        row["case"], row["variant"], *sizes, str(row["moves"]), str(row["refused"]),
        str(row.get("dangling_addresses", "")),
    ]  # fmt: skip


def overflow_line(row: Row) -> list[str]:
    said = ", ".join(outcome.split(":")[0] for outcome in row["requests"])
    equal = row["replays_equal"] and row["replays_equal_at_the_end"]
    return [
        row["case"], row["variant"], said, str(row["slot_moved"]), str(equal), row["in_capture"],
        _mib(row["held_after_bytes"]),
    ]  # fmt: skip


def lane_line(row: Row) -> list[str]:
    return [row["case"], row["variant"], _mib(row["lane_0_bytes"]), _mib(row["lane_1_bytes"])]


def show(rows: Sequence[Row], progress: Progress) -> None:
    done = [r for r in rows if r["outcome"] == "done"]
    tables = (
        ("growth", GROWTH_COLUMNS, [growth_line(r) for r in done if "moves" in r]),
        ("over the lock", OVERFLOW_COLUMNS, [overflow_line(r) for r in done if "requests" in r]),
        ("lanes", LANE_COLUMNS, [lane_line(r) for r in done if "lane_1_bytes" in r]),
    )
    for title, columns, lines in tables:
        if lines:
            headed_table(title, columns, lines, progress)
