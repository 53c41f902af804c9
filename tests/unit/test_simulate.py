"""``neaptide simulate``: rules one by one, traces, ladders, limits, and what is written."""

from __future__ import annotations

import argparse
import json
import lzma
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest
from neaptide.cli import main
from neaptide.errors import ExitCode, NeaptideError
from neaptide.output import Progress
from neaptide.simulate import command, view
from neaptide.simulate.ladders import POLICIES, Ladder, Launches, ladder_trace, overlay_sizes, parse_ladder
from neaptide.simulate.replay import Run, run_trace
from neaptide.simulate.settings import GIB, MIB, Settings, parse_settings
from neaptide.simulate.traces import Trace, read_trace

ROOT = Path(__file__).resolve().parents[2]
GRAPH = [["graph_begin", 7, 3, 7], ["alloc", 1, 4 * MIB, 3, 7], ["graph_end", 7]]


def ran(*operations: list[Any], settings: str = "", limit_bytes: int | None = None) -> Run:
    return run_trace(Trace("test", operations), settings, limit_bytes)


def reserved(run: Run) -> list[int]:
    """MiB after each operation."""
    return [counters.reserved_bytes // MIB for counters in run.after]


@pytest.mark.parametrize(
    ("settings", "asked", "block", "segment"),
    [
        ("", 1, 512, 2 * MIB),
        ("", 513, 1024, 2 * MIB),
        ("", MIB, MIB, 2 * MIB),
        ("", MIB + 1, MIB + 512, 20 * MIB),
        ("", 10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        ("", 10 * MIB, 10 * MIB, 10 * MIB),
        ("", 10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        ("large_segment_size_mb:12", 5 * MIB, 5 * MIB, 12 * MIB),
        ("roundup_power2_divisions:8", 33 * MIB, 36 * MIB, 36 * MIB),
        ("roundup_power2_divisions:8", 4097, 4608, 2 * MIB),
        ("roundup_power2_divisions:8", 4096, 4096, 2 * MIB),
        ("roundup_power2_divisions:[64:2,128:4,>:1]", 33 * MIB, 48 * MIB, 48 * MIB),
        ("roundup_power2_divisions:[64:2,128:4,>:1]", 129 * MIB, 160 * MIB, 160 * MIB),
        ("roundup_power2_divisions:[64:2,128:4,>:1]", 257 * MIB, 257 * MIB, 258 * MIB),
    ],
)
def test_sizes_of_blocks_and_segments(settings: str, asked: int, block: int, segment: int) -> None:
    parsed = parse_settings(settings)
    assert parsed.rounded(asked) == block
    assert parsed.segment_bytes(block) == segment


def test_settings_as_pytorch_writes_them() -> None:
    text = (
        "expandable_segments:True, max_split_size_mb:64,garbage_collection_threshold:0.8,pinned_num_register_threads:4"
    )
    assert parse_settings(text) == Settings(expandable=True, max_split_bytes=64 * MIB, collect_above=0.8)


@pytest.mark.parametrize(
    "text",
    [
        "max_split_size_mb:19", "max_split_size_mb:x", "expandable_segments:1", "roundup_power2_divisions:3",
        "unknown:1",        "roundup_power2_divisions:[3:2]", "expandable_segments", "backend:cudaMallocAsync",
        "garbage_collection_threshold:1.5",
    ],
)  # fmt: skip
def test_settings_that_are_refused(text: str) -> None:
    with pytest.raises(NeaptideError, match="allocator setting"):
        parse_settings(text)


def test_streams_share_no_blocks_and_a_freed_one_is_cut() -> None:
    run = ran(
        ["alloc", 1, 30 * MIB], ["free", 1], ["alloc", 2, 4 * MIB, 1], ["alloc", 3, 4 * MIB], ["alloc", 4, 26 * MIB]
    )
    assert reserved(run) == [30, 30, 50, 50, 50]
    assert run.addresses[4] == run.addresses[3] + 4 * MIB


def test_a_block_that_another_stream_uses_waits() -> None:
    run = ran(
        ["alloc", 1, 30 * MIB], ["free", 1, 3], ["alloc", 2, 30 * MIB], ["alloc", 3, 30 * MIB], ["free", 2, 99],
        ["empty_cache"],
    )  # fmt: skip
    assert reserved(run) == [30, 30, 60, 60, 60, 30], "not yet; then reused; emptying waits for the streams"


def test_a_capture_looks_at_no_waiting_block() -> None:
    run = ran(["alloc", 1, 30 * MIB], ["free", 1, 0], ["graph_begin", 7, 3, 7], ["alloc", 2, 30 * MIB])
    assert reserved(run)[-1] == 60


def test_a_private_pool_is_released_once_its_last_graph_is_gone() -> None:
    again = [["graph_begin", 8, 3, 7], ["alloc", 2, 4 * MIB, 3, 7], ["graph_end", 8]]
    freed = [["free", 1], ["free", 2], ["graph_free", 7], ["empty_cache"], ["graph_free", 8], ["empty_cache"]]
    assert reserved(ran(*GRAPH, *again, *freed))[-4:] == [20, 20, 20, 0]


def test_a_graph_without_a_pool_has_one_of_its_number() -> None:
    run = ran(["graph_begin", 7], ["alloc", 1, 4 * MIB, 0, 7], ["graph_end", 7], ["free", 1], ["alloc", 2, 4 * MIB])
    assert reserved(run)[-1] == 40
    with pytest.raises(NeaptideError, match="operation 0"):
        ran(["graph_begin", 0])


def test_blocks_that_outlive_their_graph_go_to_its_pool() -> None:
    run = ran(*GRAPH, ["graph_free", 7], ["empty_cache"], ["free", 1], ["alloc", 2, 4 * MIB, 3], ["empty_cache"])
    assert reserved(run)[-4:] == [20, 20, 40, 20]


def test_an_expandable_segment_grows_and_shrinks_by_granules() -> None:
    run = ran(
        ["alloc", 1, 30 * MIB], ["alloc", 2, 20 * MIB], ["free", 1], ["empty_cache"], ["alloc", 3, 45 * MIB],
        settings="expandable_segments:True",
    )  # fmt: skip
    assert reserved(run) == [40, 60, 60, 40, 80], (
        "30 MiB free, of which one granule is unmapped; the room in front is short"
    )
    assert run.after[-1].segments == 0
    assert run.addresses[4] == run.addresses[0] + 50 * MIB


def test_a_pool_that_pytorch_deletes_too_early_is_named() -> None:
    """One request maps three granules; two of them are unmapped one by one while the third is in use."""
    run = ran(
        ["graph_begin", 7, 3, 7], ["alloc", 1, 20 * MIB, 3, 7], ["alloc", 2, 20 * MIB, 3, 7], ["free", 1], ["free", 2],
        ["alloc", 3, 60 * MIB, 3, 7], ["free", 3], *[["alloc", key, 20 * MIB, 3, 7] for key in (4, 5, 6)],
        ["graph_end", 7], ["graph_free", 7], ["free", 4], ["empty_cache"], ["free", 6], ["empty_cache"], ["free", 5],
        ["empty_cache"], settings="expandable_segments:True",
    )  # fmt: skip
    assert run.undefined_from is None, "three requests, three releases"
    run = ran(
        ["graph_begin", 7, 3, 7], ["alloc", 1, 60 * MIB, 3, 7], ["free", 1],
        *[["alloc", key, 20 * MIB, 3, 7] for key in (4, 5, 6)], ["graph_end", 7], ["graph_free", 7], ["free", 4],
        ["empty_cache"], settings="expandable_segments:True",
    )  # fmt: skip
    assert run.undefined_from == 9
    assert "undefined in PyTorch itself" in view.notes(view.summary(run, 0, None))[0]


def test_old_cached_blocks_are_collected_above_the_threshold() -> None:
    operations = [
        ["limit", GIB],
        ["alloc", 1, 400 * MIB],
        ["free", 1],
        ["alloc", 2, 300 * MIB, 1],
        ["alloc", 3, 300 * MIB, 2],
    ]
    assert reserved(ran(*operations, settings="garbage_collection_threshold:0.6"))[-1] == 600
    assert reserved(ran(*operations))[-1] == 1000


def test_what_runs_out_of_the_limit() -> None:
    run = ran(["alloc", 1, 60 * MIB], ["alloc", 2, 60 * MIB], ["free", 2], ["free", 1], ["alloc", 3, 90 * MIB],
              limit_bytes=100 * MIB)  # fmt: skip
    assert run.failed == [1]
    assert reserved(run) == [60, 60, 60, 60, 90], "the failed one is freed without effect; cached blocks are released"


def test_freed_blocks_are_not_searched_again_at_the_limit() -> None:
    operations = [["alloc", 1, 30 * MIB], ["alloc", 2, 2 * MIB, 1], ["free", 1, 99], ["alloc", 3, 20 * MIB]]
    assert ran(*operations, limit_bytes=50 * MIB).failed == []
    kept = [["alloc", 9, 2 * MIB], ["alloc", 1, 18 * MIB], ["free", 1, 99], ["alloc", 3, 18 * MIB]]
    assert ran(*kept, limit_bytes=20 * MIB).failed == [3], (
        "the block waits in a segment in use, which cannot be released"
    )


@pytest.mark.parametrize(
    ("operations", "named"),
    [
        ([["malloc", 1, 2]], "operation 0"), ([["alloc", 1]], "operation 0"),
        ([["alloc", 1, 2], ["free"]], "operation 1"),
        ([["alloc", 1, 2.5]], "operation 0"), ("alloc", "operation 0"), ([["free", 5]], "operation 0"),
        ([["alloc", 1, 2], ["alloc", 1, 2]], "operation 1"), ([["graph_end", 1]], "operation 0"),
        ([["alloc", 1, -5]], "operation 0"), ([["alloc", 1, 1 << 63]], "operation 0"),
        ([["alloc", 1, 2, -1]], "operation 0"), ([["limit", -1]], "operation 0"),
        ([["alloc", 1, 2], ["free", 1, -1]], "operation 1"),
    ],
)  # fmt: skip
def test_traces_that_are_refused(operations: Any, named: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"operations": operations}))
    with pytest.raises(NeaptideError, match=named):
        run_trace(read_trace(path))


def test_a_broken_file_is_a_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.xz"
    path.write_bytes(b"no xz")
    with pytest.raises(NeaptideError, match="not readable"):
        read_trace(path)


def launches_of(ladder: Ladder, policy: str, sizes: Any) -> int:
    """Launches of a ladder, and that its trace allocates each once beside the blocks that it caches first."""
    made = Launches.under(policy, ladder, sizes)
    count = ladder.layers * sum(len(list(made.of_chunk(*chunk))) for chunk in ladder.chunks())
    trace, _ = ladder_trace(ladder, policy, sizes)
    allocs = sum(operation[0] == "alloc" for operation in trace.operations)
    assert allocs == (1 + len(made.cached)) * count
    assert bool(made.cached) == (policy == "constant-bytes")
    return count


MEASURED = {
    row["case"]: row
    for row in json.loads((ROOT / "tests/bench/results/indexer-ladders-h200.json").read_text())["rows"]
    if row["variant"] == "upstream" and row["case"][0].isdigit()
}


@pytest.mark.parametrize("case", MEASURED)
def test_upstreams_ladders_are_what_its_own_functions_reserved(case: str) -> None:
    """On an H200, within 1 %: there other, small allocations leave blocks that serve first launches."""
    sizes, row = overlay_sizes(ROOT / "overlay"), MEASURED[case]
    chunk, total = (int(part) for part in case.split("-to-"))
    ladder = Ladder(chunk, total, total)
    found = view.summary(run_trace(ladder_trace(ladder, "upstream", sizes)[0]), 0, None)
    measured = row["growth_first_chunk_bytes"] + row["growth_after_first_chunk_bytes"]
    assert found["peak_reserved_bytes"] == pytest.approx(measured, rel=0.01)
    assert launches_of(ladder, "upstream", sizes) == row["launches"]


def test_a_ladder_under_each_policy() -> None:
    """Of the overlay's no launch meets a block that is too small."""
    sizes = overlay_sizes(ROOT / "overlay")
    rows = {}
    for policy in POLICIES:
        ladder = Ladder(8192, 98304, 102400)
        trace, first = ladder_trace(ladder, policy, sizes)
        rows[policy] = view.summary(run_trace(trace), first, None)
        rows[policy]["launches"] = launches_of(ladder, policy, sizes)
    got = {
        policy: tuple(
            row[key] // (MIB if key.endswith("bytes") else 1)
            for key in ("growth_first_chunk_bytes", "growth_after_first_chunk_bytes", "device_allocs", "launches")
        )
        for policy, row in rows.items()
    }
    assert got["upstream"] == (256, 1542, 5, 90)
    assert got["constant-bytes"] == (512, 0, 1, 90)
    assert got["fixed-width"] == (512, 0, 1, 168)


@pytest.mark.parametrize(
    ("chunk", "total", "columns", "launches"),
    [(4608, 184320, 204800, (302, 302, 640)), (3072, 196608, 204800, (360, 360, 640)),
     (3072, 522240, 524288, (2216, 2224, 4080))],
)  # fmt: skip
def test_launches_are_as_many_as_were_measured(chunk: int, total: int, columns: int, launches: tuple[int, ...]) -> None:
    sizes = overlay_sizes(ROOT / "overlay")
    for policy, expected in zip(("upstream", "constant-bytes", "fixed-width"), launches, strict=True):
        assert launches_of(Ladder(chunk, total, columns), policy, sizes) == expected, policy


def test_bf16_logits_have_a_copy_beside_them() -> None:
    trace, _ = ladder_trace(
        Ladder(4096, 8192, 8192, layers=1, sm100=True), "constant-bytes", overlay_sizes(ROOT / "overlay")
    )
    sizes = [operation[2] for operation in trace.operations if operation[0] == "alloc"]
    assert sizes[1] == 2 * sizes[0]
    assert sum(sizes[:2]) <= 512 * MIB


@pytest.mark.parametrize("text", ["0:5", "9:5", "8192:98304"])
def test_ladders_that_are_refused(text: str) -> None:
    with pytest.raises(NeaptideError, match="ladder"):
        parse_ladder(text, columns=4)
    assert parse_ladder("trace.json") is None


def request(source: str, *arguments: str) -> command.Request:
    parser = argparse.ArgumentParser()
    command.add_options(parser)
    return command.request_of(parser.parse_args([source, *arguments]), ROOT)


def test_the_command_says_which_step_runs_out() -> None:
    code, out = command.run(request("8192:98304", "--limit-bytes", str(GIB)), Progress())
    assert code is ExitCode.FINDINGS
    rows = {row["run"]: row for row in out["rows"]}
    assert {policy for policy, row in rows.items() if row["failed"]} == {"upstream"}
    json.dumps(out)


def test_the_command_compares_with_the_recording(capsys: pytest.CaptureFixture[str]) -> None:
    data = Path(__file__).parent / "simulate_data/ladders-default.json.xz"
    code, out = command.run(request(str(data)), Progress())
    assert code is ExitCode.DONE
    assert out["rows"][0]["recording"] == {"equal": True, "difference": None}
    assert "as recorded at every step" in capsys.readouterr().err
    _, out = command.run(request(str(data), "--settings", "expandable_segments:True"), Progress())
    assert out["rows"][0]["recording"] is None
    assert out["rows"][0]["peak_reserved_bytes"] < 2 * GIB


@pytest.mark.parametrize(
    "arguments",
    [("nowhere.json",), ("8:9", "--layers", "0"), ("8:9", "--limit-bytes", "-1"), ("8:9", "--snapshot", "x.pickle"),
     ("8192:98304", "--budget-mib", "1")],
)  # fmt: skip
def test_calls_that_are_refused(arguments: tuple[str, ...]) -> None:
    with pytest.raises(NeaptideError):
        command.run(request(*arguments), Progress())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--limit-bytes", "-1"], "--limit-bytes: -1; wanted 0 or more"),
        (["--budget-mib", "0"], "--budget-mib: 0; wanted 1 or more"),
        (["--layers", "0"], "--layers: 0; wanted 1 or more"),
    ],
)
def test_a_number_that_is_too_low_is_named_by_its_option(options: list[str], says: str) -> None:
    with pytest.raises(NeaptideError, match=says):
        command.run(request("8192:98304", *options), Progress())


@pytest.mark.parametrize(
    ("source", "options", "says"),
    [
        ("trace", ["--policy", "upstream"], "--policy with a file"),
        ("trace", ["--columns", "9"], "--columns with a file"),
        ("trace", ["--budget-mib", "512"], "--budget-mib with a file"),
        ("trace", ["--sm100"], "--sm100 with a file"),
        ("trace", ["--device", "0"], "--device with a trace"),
        ("8192:98304", ["--total-bytes", "5"], "--total-bytes with a ladder"),
        ("8192:98304", ["--device", "1"], "--device with a ladder"),
    ],
)
def test_an_option_of_another_source_is_refused(source: str, options: list[str], says: str) -> None:
    """It would change nothing, and its user would think that it did."""
    data = Path(__file__).parent / "simulate_data/graphs-default.json.xz"
    with pytest.raises(NeaptideError, match=says):
        command.run(request(str(data) if source == "trace" else source, *options), Progress())


@pytest.mark.parametrize("name", ["simulate", "profile", "reproduce"])
@pytest.mark.parametrize("option", ["--pin=current", "--target=vllm", "--build=x"])
def test_commands_that_read_no_tree_take_no_option_of_one(name: str, option: str, capsys: Any) -> None:
    given = {"simulate": "8:9", "profile": "init", "reproduce": "list"}[name]
    assert main([name, given, "--root", str(ROOT), option]) == 2
    assert f"unrecognized arguments: {option}" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_a_plot(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"plot.{kind}"
    command.run(request("8192:32768", "--plot", str(path)), Progress())
    assert path.read_bytes()[:4] in (b"<?xm", b"\x89PNG")


def test_a_hundred_thousand_operations_take_seconds() -> None:
    chance, live, operations = Random(1), [0], [["alloc", 0, 512]]
    for key in range(1, 100_000):
        if chance.random() < 0.5 and len(live) > 400:
            operations.append(["free", live.pop(chance.randrange(len(live)))])
        else:
            live.append(key)
            operations.append(["alloc", key, int(512 * 2 ** (19 * chance.random())), chance.randrange(3)])
    for settings in ("", "expandable_segments:True"):
        begun = time.process_time()
        ran(*operations[:100_000], settings=settings)
        assert time.process_time() - begun < 5


def test_traces_may_be_compressed(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.xz"
    path.write_bytes(lzma.compress(json.dumps({"operations": [["alloc", 1, 5]], "total_bytes": GIB}).encode()))
    assert reserved(run_trace(read_trace(path))) == [2]
