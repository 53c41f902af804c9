"""The allocator's rules one by one, settings, traces and limits."""

from __future__ import annotations

import json
import lzma
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest
from neaptide.errors import NeaptideError
from neaptide.simulate import view
from neaptide.simulate.replay import Run, run_trace
from neaptide.simulate.settings import GIB, MIB, Settings, parse_settings
from neaptide.simulate.traces import Trace, read_trace

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
