"""``neaptide ledger``: its table, JSON, CSV and plot, and what it refuses. No torch."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import ledger_answers
import pytest
from ledger_answers import MIB, NAMES, ROOT, region
from neaptide.both_trees import Question
from neaptide.cli import main
from neaptide.errors import NeaptideError
from neaptide.ledger import asking, show

faked = ledger_answers.faked


# Output


@pytest.mark.usefixtures("faked")
def test_json_csv_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gate.csv"
    assert main(["ledger", "gate", "--root", str(ROOT), "--json", "--csv", str(path)]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert (found["schema_version"], found["command"], found["pin"]) == (1, "ledger", "current")
    assert found["profile"]["name"] == "gate"
    assert {one["name"] for one in found["regions"]} == NAMES
    assert found["not_computed"] == ["graph estimate", "buffers of the attention builders"]
    summed = [one for one in found["regions"] if one["summed"]]
    whole = found["sums"]["all"]
    assert whole["upstream_bytes"] == sum(one["upstream_bytes"] for one in summed)
    assert whole["saved_kv_tokens"] == whole["saved_bytes"] // found["profile"]["kv_bytes_per_token"]
    for group in ("by_lifetime", "by_term"):
        assert sum(one["overlay_bytes"] for one in found["sums"][group].values()) == whole["overlay_bytes"]
    with path.open(newline="") as handle:
        rows = list(csv.DictReader(handle))
    assert [row["name"] for row in rows] == [one["name"] for one in found["regions"]]
    assert sum(int(row["upstream_bytes"]) for row in rows if row["summed"] == "True") == whole["upstream_bytes"]
    assert f"all\t{whole['upstream_bytes'] / MIB:,.2f}\t" in said.err
    assert "not computed, and in no sum: graph estimate, buffers of the attention builders" in said.err


def test_what_is_in_no_sum_stands_in_brackets() -> None:
    assert show.region_row(region("a", MIB, 0))[:4] == ["a", "1.00", "0.00", "1.00"]
    assert show.region_row(region("a", MIB, 0, reached=False))[:4] == ["a", "(1.00)", "(0.00)", "(1.00)"]
    assert show.region_row(region("a", MIB, 0, part_of="b"))[:4] == ["- a", "(1.00)", "(0.00)", "(1.00)"]
    assert show.region_row(region("a", None, None))[1:4] == ["(device)", "(device)", ""]


@pytest.mark.usefixtures("faked")
def test_a_plot_has_a_part_of_each_bar_for_each_summed_region(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "gate.svg"
    assert main(["ledger", "gate", "--root", str(ROOT), "--plot", str(path)]) == 0
    assert path.stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["--pin", "sparkinfer-de04"], "pin 'sparkinfer-de04'; wanted one of current, r12"),
        (["--target", "b12x"], "target b12x; wanted b12x and vllm"),
        (["--python", "/nowhere/python"], "no program /nowhere/python; wanted a Python with torch"),
        (["--set", "engine"], "'engine'; wanted FIELD=VALUE"),
        (["--live", "x.json"], "a profile and --live"),
        (["--set", "heads=3"], "Object contains unknown field `heads`"),
    ],
)
def test_a_bad_call_is_refused_before_anything_is_read(
    arguments: list[str], found: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(asking, "read_source", lambda *given: pytest.fail("went on"))
    assert main(["ledger", "gate", "--root", str(ROOT), *arguments]) == 2
    said = capsys.readouterr().err
    assert said.count("error:") == 1
    assert found in said


@pytest.mark.parametrize(
    ("option", "value"),
    [("--csv", "a.csv"), ("--plot", "a.svg"), ("--set", "engine=fork"), ("--pin", "r12"), ("--python", "/bin/sh"),
     ("--target", "vllm")],
)  # fmt: skip
def test_what_an_engine_wrote_takes_no_option_of_a_profile(
    option: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["ledger", "--root", str(ROOT), "--live", str(tmp_path / "x.json"), option, value]
    assert main(given) == 2
    assert f"{option} with --live; wanted files alone" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("said", "todo"),
    [
        ("ModuleNotFoundError: No module named 'torch'", "Name one with --python."),
        ("ModuleNotFoundError: No module named 'b12x'", "Name one with --python."),
        ("ModuleNotFoundError: No module named 'vllm.models.glm5next'", "Change the profile, or choose another --pin."),
        ("ValueError: only supports page_size=64", "Change the profile, or choose another --pin."),
    ],
)
def test_a_child_that_ends_says_what_would_help(said: str, todo: str, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "{said}" >&2\nexit 1\n')
    python.chmod(0o755)
    with pytest.raises(NeaptideError) as caught:
        Question(asking.FOLDER / "vllm_child.py", {}, "ledger").answer(tmp_path, python)
    assert (caught.value.todo, said in caught.value.found) == (todo, True)


def test_a_python_without_torch_is_one_error(tmp_path: Path) -> None:
    """The child itself fails: one line says what is missing and what would help."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'torch'\" >&2\nexit 1\n")
    python.chmod(0o755)
    asked = Question(asking.FOLDER / "vllm_child.py", {}, "ledger")
    with pytest.raises(NeaptideError, match="No module named 'torch'; wanted a Python with torch"):
        asked.answer(tmp_path, python)
