"""``neaptide bench indexer``: the sparse indexer's own functions on a GPU, policy against policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from neaptide.bench.engine import UPSTREAM, Bench, Variant
from neaptide.bench.indexer_cases import CASES, Decode, Ladder
from neaptide.bench.parts import add_rows, chosen_cases, run_child
from neaptide.bench.results import MIB, headed_table
from neaptide.output import Progress
from neaptide.plotting import plot_bytes

POLICY = "VLLM_NEAPTIDE_INDEXER_LOGITS_POLICY"
SWITCHES = (POLICY, "VLLM_SPARSE_INDEXER_FIXED_LOGITS_WIDTH")
PATCHED_UPSTREAM = "policy upstream"
POLICIES = (UPSTREAM, "constant_bytes", "fixed_width")
Row = dict[str, Any]


def choose_cases(names: Sequence[str]) -> list[Ladder | Decode]:
    """Cases by name; all of them for none."""
    return chosen_cases(CASES, names, "bench indexer")


def measure(bench: Bench, upstream: Variant, patched: Variant, cases: Sequence[Ladder | Decode]) -> dict[str, Any]:
    """Ladders of upstream in one process and of all policies in another, in turns; decode steps in a third."""
    ladders = [c for c in cases if isinstance(c, Ladder)]
    decodes = [c for c in cases if isinstance(c, Decode)]
    runs: list[tuple[Variant, Sequence[str | None], Sequence[Ladder | Decode]]] = [
        (upstream, [None], ladders), (patched, POLICIES, ladders), (patched, [None], decodes),
    ]  # fmt: skip
    result: dict[str, Any] = {"rows": [], "versions": {}, "device": ""}
    for variant, policies, chosen in runs:
        if not chosen:
            continue
        found = run_child(bench, variant, chosen, {"policies": list(policies)}, unset=SWITCHES)
        named = [{"variant": variant_name(r, policies, decode=chosen is decodes), **r} for r in found["rows"]]
        add_rows(result, found, named, bench)
    compare_ladders(result["rows"])
    return result


def variant_name(row: Mapping[str, Any], policies: Sequence[str | None], *, decode: bool) -> str:
    """What a row is of: ``upstream``, a policy of the patched vLLM, or its tiled decode."""
    if decode:
        return "tiled"
    if list(policies) == [None]:
        return UPSTREAM
    policy = row.get("policy")
    return PATCHED_UPSTREAM if policy in (None, UPSTREAM) else str(policy)


def compare_ladders(rows: Sequence[Row]) -> None:
    """Put every ladder beside upstream's: launches, time, and rows whose set of indices is another.

    A policy's time is compared with that of policy ``upstream`` in its own process, where they ran in turns.
    """
    done = [r for r in rows if r["outcome"] == "done"]
    base, same = ({r["case"]: r for r in done if r["variant"] == name} for name in (UPSTREAM, PATCHED_UPSTREAM))
    for row in rows:
        mine, other = row.get("hashes"), base.get(row["case"], {})
        if mine is not None and "hashes" in other:
            timed = other if row["variant"] == UPSTREAM else same.get(row["case"], other)
            row["launch_ratio"] = row["launches"] / other["launches"]
            row["time_ratio"] = row["seconds"] / timed["seconds"]
            row["rows_of_other_sets"] = sum(a != b for a, b in zip(mine, other["hashes"], strict=True))
    for row in rows:
        row.pop("hashes", None)


LADDER_COLUMNS = (
    "case", "variant", "launches / upstream", "growth first chunk / after, MiB", "cudaMallocs", "live, MiB",
    "time / upstream", "rows of other sets",
)  # fmt: skip
DECODE_COLUMNS = (
    "case", "tiles", "rows of unequal scores / other sets / other scores in them", "peak untiled / tiled, MiB",
    "graph untiled / tiled, MiB", "rows of other scores in the replay", "time tiled / untiled",
)  # fmt: skip


def _mib(value: int | None) -> str:
    return "" if value is None else f"{round(value / MIB):,}"


def ladder_line(row: Mapping[str, Any]) -> list[str]:
    ratio = f"{row['launch_ratio']:.3f}" if "launch_ratio" in row else ""
    return [
        row["case"], row["variant"], f"{row['launches']} / {ratio}",
        f"{_mib(row['growth_first_chunk_bytes'])} / {_mib(row['growth_after_first_chunk_bytes'])}",
        str(row["cuda_mallocs"]), _mib(row["peak_bytes"]),
        f"{row['time_ratio']:.3f}" if "time_ratio" in row else "", str(row.get("rows_of_other_sets", "")),
    ]  # fmt: skip


def decode_line(row: Mapping[str, Any]) -> list[str]:
    replayed = row.get("tiled_graph_replay_rows_of_other_set_scores", row.get("tiled_graph_error", ""))
    return [
        row["case"],
        str(row["tiles"]),
        " / ".join(str(row[f"rows_of_{what}"]) for what in ("unequal_scores", "other_sets", "other_set_scores")),
        f"{_mib(row['untiled_peak_bytes'])} / {_mib(row['tiled_peak_bytes'])}",
        f"{_mib(row.get('untiled_graph_bytes'))} / {_mib(row.get('tiled_graph_bytes'))}",
        str(replayed),
        f"{row['time_ratio']:.3f}",
    ]


def show(rows: Sequence[Row], progress: Progress) -> None:
    done = [r for r in rows if r["outcome"] == "done"]
    ladders = [ladder_line(r) for r in done if "launches" in r]
    decodes = [decode_line(r) for r in done if "tiles" in r]
    for title, columns, lines in (("prefill", LADDER_COLUMNS, ladders), ("decode", DECODE_COLUMNS, decodes)):
        if lines:
            headed_table(title, columns, lines, progress)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Reserved bytes over the chunks of each ladder, one line a variant."""
    panels: dict[str, list[tuple[str, list[int]]]] = {}
    for row in rows:
        if "reserved_bytes" in row:
            panels.setdefault(f"prefill {row['case']}", []).append((row["variant"], row["reserved_bytes"]))
    plot_bytes(panels, "chunk", "reserved above the start, GiB", path)
