"""Snapshots of ``torch.cuda.memory``: read, replayed, written, and opened by torch's own viewer."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from neaptide.errors import NeaptideError
from neaptide.simulate.replay import Run, first_difference, run_trace
from neaptide.simulate.settings import MIB
from neaptide.simulate.snapshots import read_snapshot
from neaptide.simulate.traces import Trace, read_trace
from neaptide.simulate.viewer import snapshot, write_snapshot

DATA = Path(__file__).with_name("simulate_data")
OPERATIONS: list[list[Any]] = [
    ["alloc", 1, 30 * MIB], ["alloc", 2, 700], ["graph_begin", 7, 3, 7], ["alloc", 3, 4 * MIB, 3, 7], ["graph_end", 7],
    ["free", 1, 8], ["alloc", 4, 12 * MIB, 1], ["alloc", 5, 3 * MIB], ["alloc", 6, 30 * MIB], ["free", 3],
    ["graph_free", 7], ["empty_cache"], ["alloc", 7, 9 * MIB, 1],
]  # fmt: skip


def recorded(name: str) -> Run:
    return run_trace(read_trace(DATA / f"{name}.json.xz"), history=True)


def replayed(data: dict[str, Any], path: Path, total_bytes: int) -> Run:
    path.write_bytes(pickle.dumps(data))
    return run_trace(read_snapshot(path, total_bytes=total_bytes))


@pytest.mark.parametrize("name", ["ladders-default", "ladders-expandable", "random-default", "random-expandable",
                                  "random-roundup", "graphs-default"])  # fmt: skip
def test_a_complete_history_is_replayed_as_it_was(name: str, tmp_path: Path) -> None:
    """Releases are put in where segments went back, and every allocation lies where it lay."""
    run = recorded(name)
    path = tmp_path / "snapshot.pickle"
    write_snapshot(run, path)
    again = run_trace(read_snapshot(path, total_bytes=run.trace.total_bytes))
    assert again.trace.recorded is not None
    assert len(again.trace.recorded.addresses) == len(run.addresses)
    assert first_difference(again) is None
    assert again.after[-1] == run.after[-1]


@pytest.mark.parametrize("name", ["ladders-default", "ladders-expandable", "random-expandable"])
@pytest.mark.parametrize("part", [0.2, 0.5, 0.8])
def test_a_history_that_begins_late_is_undone_from_its_end(name: str, part: float, tmp_path: Path) -> None:
    run = recorded(name)
    data = snapshot(run)
    (entries,) = data["device_traces"]
    begin = int(len(entries) * part)
    while entries[begin]["action"] not in ("alloc", "free_requested"):
        begin += 1
    while entries[begin - 1]["action"].startswith("segment_"):
        begin -= 1
    segments = [{**segment, "device": 1} for segment in data["segments"]]
    late_data = {**data, "segments": segments, "device_traces": [[], entries[begin:]]}
    late = replayed(late_data, tmp_path / "late.pickle", run.trace.total_bytes)
    assert late.initial_bytes > 0
    assert first_difference(late) is None
    assert late.after[-1].reserved_bytes == run.after[-1].reserved_bytes
    assert late.after[-1].allocated_bytes == run.after[-1].allocated_bytes


def test_waiting_blocks_and_private_pools_survive_the_round_trip(tmp_path: Path) -> None:
    run = run_trace(Trace("small", OPERATIONS), history=True)
    data = snapshot(run)
    again = replayed(data, tmp_path / "small.pickle", run.trace.total_bytes)
    kinds = [operation[0] for operation in again.trace.operations]
    assert kinds.count("graph_free") == kinds.count("empty_cache") == 1
    assert next(operation for operation in again.trace.operations if operation[0] == "free")[2:] == [8]
    assert first_difference(again) is None
    assert again.after[-1] == run.after[-1]


def test_a_snapshot_under_other_settings(tmp_path: Path) -> None:
    run = recorded("ladders-default")
    write_snapshot(run, tmp_path / "s.pickle")
    trace = read_snapshot(tmp_path / "s.pickle")
    other = run_trace(trace, "expandable_segments:True")
    assert max(c.reserved_bytes for c in other.after) < max(c.reserved_bytes for c in run.after) / 4


def test_pools_of_entries_without_one_are_those_of_their_segment(tmp_path: Path) -> None:
    run = run_trace(Trace("small", OPERATIONS[:8]), history=True)
    data = snapshot(run)
    for entry in data["device_traces"][0]:
        del entry["pool_id"]
    again = replayed(data, tmp_path / "old.pickle", run.trace.total_bytes)
    assert first_difference(again) is None
    assert {operation[4] for operation in again.trace.operations if operation[0] == "alloc"} == {0, 1}


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("ran",))


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (pickle.dumps(Harmful()), "print is in it"), (pickle.dumps([1]), "no segments"), (b"", "EOFError"),
        (pickle.dumps({"segments": [], "device_traces": [[]]}), "no history"),
    ],
)  # fmt: skip
def test_files_that_are_refused(content: bytes, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(content)
    with pytest.raises(NeaptideError, match=named):
        read_snapshot(path)
    assert capsys.readouterr().out == ""


def test_parts_of_a_snapshot_sum_to_the_whole() -> None:
    for name in ("random-expandable", "random-max-split", "graphs-default"):
        run = recorded(name)
        segments = snapshot(run)["segments"]
        assert sum(segment["total_size"] for segment in segments) == run.after[-1].reserved_bytes
        assert sum(segment["allocated_size"] for segment in segments) == run.after[-1].allocated_bytes
        for segment in segments:
            assert segment["total_size"] == sum(block["size"] for block in segment["blocks"])


def test_torchs_viewer_opens_it(tmp_path: Path) -> None:
    viewer = pytest.importorskip("torch.cuda._memory_viz")
    run = run_trace(Trace("small", OPERATIONS), history=True)
    write_snapshot(run, tmp_path / "s.pickle")
    data = pickle.loads((tmp_path / "s.pickle").read_bytes())
    assert "segments: 5" in viewer.segsum(data)
    assert "cudaMalloc(" in viewer.trace(data)
    assert "cudaFree(" in viewer.trace(data)
    assert "<html>" in viewer.trace_plot(data) or "<script" in viewer.trace_plot(data)
    assert "<script" in viewer.segment_plot(data)
