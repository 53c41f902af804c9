"""Findings as commands: each is one that this repository has; what needs hardware is named, not run."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gpu_standins import CARD
from neaptide import reproduce
from neaptide.cli import build_parser
from neaptide.doctor.machine import Machine
from neaptide.errors import ExitCode, NeaptideError
from neaptide.output import Progress

ROOT = Path(__file__).resolve().parents[2]
STEPS = [(name, step) for name, found in reproduce.FINDINGS.items() for step in found.steps]


@pytest.mark.parametrize(("name", "step"), STEPS, ids=[f"{n}: {s.command}" for n, s in STEPS])
def test_every_command_is_one_of_ours(name: str, step: reproduce.Step) -> None:
    program, *rest = step.command.split()
    if program == "pytest":
        assert (ROOT / rest[0]).is_file()
        assert step.needs != reproduce.CPU
    else:
        assert build_parser().parse_args(rest).command == rest[0]


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    told: list[list[str]] = []
    monkeypatch.setattr(reproduce, "_called", lambda arguments, root: told.append(list(arguments)) or len(told) - 1)
    return told


def run(
    name: str, devices: int, major: int = 9, python: Path = Path("/some/python")
) -> tuple[ExitCode, dict[str, Any]]:
    machine = Machine((replace(CARD, capability=(major, 0)),) * devices)
    return reproduce.run(name, ROOT, python, Progress(), lambda _: machine)


def test_what_needs_a_device_is_named(called: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run("channels", 1)
    assert code is ExitCode.FINDINGS
    assert [step["exit_code"] for step in out["steps"]] == [0, None]
    assert [arguments[2:5] for arguments in called] == [["neaptide", "slabs", "--pin"]]
    assert "--python" in called[0]
    assert "it needs two CUDA devices; seen here: RTX PRO 6000 (9.0)" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "devices", "major", "ran"), [
    ("direct", 1, 12, True), ("direct", 8, 9, False), ("direct", 0, 0, False),
    ("graphs", 4, 12, True), ("graphs", 3, 12, False), ("graphs", 4, 9, False),
])  # fmt: skip
def test_a_capability_is_needed_as_a_count_is(
    called: list[list[str]], name: str, devices: int, major: int, ran: bool
) -> None:
    assert (run(name, devices, major)[1]["steps"][-1]["exit_code"] is not None) == ran


def test_devices_are_looked_at_once_and_for_a_cpu_not_at_all(called: list[list[str]]) -> None:
    looked: list[Path | None] = []

    def look(python: Path | None) -> Machine:
        looked.append(python)
        return Machine()

    reproduce.run("graphs", ROOT, Path("/some/python"), Progress(), look)
    assert looked == [Path("/some/python")]
    reproduce.run("rank-data", ROOT, None, Progress(), look)
    assert len(looked) == 1


def test_tests_that_skip_show_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """A run of real pytest whose tests want more than there is ends with 0."""
    file = tmp_path / "test_it.py"
    file.write_text("import pytest\n@pytest.mark.skip(reason='4 CUDA devices are needed, and torch sees 2')\n"
                    "def test_four(): pass\ndef test_two(): pass\n")  # fmt: skip
    step = reproduce.Step(f"pytest {file}", "it", reproduce.TWO)
    monkeypatch.setitem(reproduce.FINDINGS, "it", reproduce.Finding("it", (step,)))
    code, out = run("it", 2, python=Path(sys.executable))
    (row,) = out["steps"]
    (skipped,) = row["skipped"]
    assert (row["exit_code"], skipped.endswith("test_it::test_four"), code) == (0, True, ExitCode.FINDINGS)
    assert f"not shown, skipped: {skipped}: 4 CUDA devices are needed" in capfd.readouterr().err
    file.write_text("def test_two(): pass\n")
    assert run("it", 2, python=Path(sys.executable))[0] is ExitCode.DONE


def test_with_devices_all_is_run_and_a_failure_is_a_finding(called: list[list[str]]) -> None:
    code, out = run("channels", 2)
    assert [step["exit_code"] for step in out["steps"]] == [0, 1]
    assert code is ExitCode.FINDINGS
    assert called[1][:3] == ["/some/python", "-m", "pytest"]
    assert run("rank-data", 0)[0] is ExitCode.FINDINGS, "the third call of the stand-in fails, too"


def test_a_finding_that_a_cpu_shows_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproduce, "_called", lambda *_: 0)
    assert run("rank-data", 0)[0] is ExitCode.DONE


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run("list", 0)
    assert code is ExitCode.DONE
    assert list(out["findings"]) == list(reproduce.FINDINGS)
    assert "000, 6" in capsys.readouterr().err


def test_another_name() -> None:
    with pytest.raises(NeaptideError, match="no finding 'chanels'; wanted one of channels, fold"):
        run("chanels", 0)
