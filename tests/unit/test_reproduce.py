"""Findings as commands: each is one that this repository has; what needs hardware is named, not run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from neaptide import reproduce
from neaptide.cli import build_parser
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


def run(name: str, devices: int) -> tuple[ExitCode, dict[str, Any]]:
    return reproduce.run(name, ROOT, Path("/some/python"), Progress(), lambda: devices)


def test_what_needs_a_device_is_named(called: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run("channels", 1)
    assert code is ExitCode.FINDINGS
    assert [step["exit_code"] for step in out["steps"]] == [0, None]
    assert [arguments[2:5] for arguments in called] == [["neaptide", "slabs", "--pin"]]
    assert "--python" in called[0]
    assert "it needs two CUDA devices, and 1 devices are seen here" in capsys.readouterr().err


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
