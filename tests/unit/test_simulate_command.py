"""``neaptide simulate``: ladders, what the command says, writes and refuses."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from neaptide.cli import main
from neaptide.errors import ExitCode, NeaptideError
from neaptide.output import Progress
from neaptide.simulate import command, view
from neaptide.simulate.ladders import POLICIES, Ladder, Launches, ladder_trace, overlay_sizes, parse_ladder
from neaptide.simulate.replay import run_trace
from neaptide.simulate.settings import GIB, MIB

ROOT = Path(__file__).resolve().parents[2]


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
