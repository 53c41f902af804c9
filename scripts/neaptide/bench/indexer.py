"""``neaptide bench indexer``: the sparse indexer's own functions on a GPU, policy against policy."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from neaptide.bench.engine import UPSTREAM, Variant
from neaptide.bench.indexer_cases import CASES, Decode, Ladder
from neaptide.bench.view import make_view
from neaptide.errors import NeaptideError
from neaptide.output import Progress

CHILD = Path(__file__).with_name("indexer_child.py")
POLICY = "VLLM_NEAPTIDE_INDEXER_LOGITS_POLICY"
SWITCHES = (POLICY, "VLLM_SPARSE_INDEXER_FIXED_LOGITS_WIDTH")
PATCHED_UPSTREAM = "policy upstream"
POLICIES = (UPSTREAM, "constant_bytes", "fixed_width")
MIB = 1 << 20
Row = dict[str, Any]


def choose_cases(names: Sequence[str]) -> list[Ladder | Decode]:
    """Cases by name; all of them for none."""
    unknown = [n for n in names if n not in CASES]
    if unknown:
        raise NeaptideError(
            f"no case {unknown[0]!r}", wanted=f"one of {', '.join(CASES)}", todo="Check the spelling.",
            where="bench indexer",
        )  # fmt: skip
    return [CASES[n] for n in names] or list(CASES.values())


def run_child(
    python: Path,
    package: Path,
    variant: Variant,
    policies: Sequence[str | None],
    cases: Sequence[Ladder | Decode],
    timeout: int,
) -> dict[str, Any]:
    """Rows of all cases from one child process; what it had written when it failed, and why."""
    with tempfile.TemporaryDirectory(prefix="neaptide-bench-") as name:
        folder = Path(name)
        path = [os.environ.get("PYTHONPATH", "")]
        if variant.files:
            make_view(package, variant.files, folder / "view")
            path.insert(0, str(folder / "view"))
        env = {k: v for k, v in os.environ.items() if k not in SWITCHES} | {
            "PYTHONPATH": os.pathsep.join(filter(None, path))
        }
        spec, result = folder / "spec.json", folder / "result.json"
        spec.write_text(json.dumps({"cases": [c.as_dict() for c in cases], "policies": list(policies)}))
        command = [str(python), str(CHILD), str(spec), str(result)]
        try:
            done = subprocess.run(
                command, env=env, cwd=folder, capture_output=True, text=True, check=False, timeout=timeout
            )
            said = done.stderr[-1500:]
        except subprocess.TimeoutExpired:
            said = f"no end after {timeout} s"
        found: dict[str, Any] = json.loads(result.read_text()) if result.is_file() else {"rows": []}
        written = {row["case"] for row in found["rows"]}
        found["rows"] += [{"case": c.name, "outcome": "failed", "error": said} for c in cases if c.name not in written]
        return found


def measure(
    python: Path,
    package: Path,
    upstream: Variant,
    patched: Variant,
    cases: Sequence[Ladder | Decode],
    timeout: int,
    progress: Progress,
) -> dict[str, Any]:
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
        found = run_child(python, package, variant, policies, chosen, timeout)
        for row in found["rows"]:
            name = variant_name(row, policies, decode=chosen is decodes)
            result["rows"].append({"variant": name, **row})
            progress.note(f"{row['case']} {name}: {row['outcome']} {row.get('error', '')}".rstrip())
        result |= {key: found[key] for key in ("versions", "device") if key in found}
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
        heading = [] if progress.console.is_terminal else [list(columns)]
        if lines:
            progress.table(title, columns, [*heading, *lines])


def plot(rows: Sequence[Row], path: Path) -> None:
    """Reserved bytes over the chunks of each ladder, one line a variant."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NeaptideError(
            "matplotlib is not installed", wanted="it for --plot", todo="pip install 'neaptide[bench]'.", where="--plot"
        ) from error
    done = [r for r in rows if "reserved_bytes" in r]
    cases = list(dict.fromkeys(r["case"] for r in done))
    figure = Figure(figsize=(9, 3 * max(1, len(cases))), layout="constrained")
    for place, case in enumerate(cases, 1):
        axes = figure.add_subplot(len(cases), 1, place)
        for number, row in enumerate(r for r in done if r["case"] == case):
            axes.plot(
                [b / 2**30 for b in row["reserved_bytes"]], label=row["variant"], drawstyle="steps-post",
                linestyle=("-", "-", ":")[number % 3], linewidth=2,
            )  # fmt: skip
        axes.set(title=f"prefill {case}", xlabel="chunk", ylabel="reserved above the start, GiB")
        axes.legend()
        axes.grid(alpha=0.3)
    figure.savefig(path)
