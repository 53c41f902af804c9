"""``neaptide doctor`` on a toy that pip installed, on its trees, and on the repository itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import installing
import pytest
from doctor_facts import DECLARED, FOUR, ROOT
from installing import Environment
from neaptide.cli import main
from neaptide.doctor.machine import Machine
from neaptide.doctor.rules import RULES, Rule
from toy import ToyRepository, git

installed_once, env, repository = installing.installed_once, installing.env, installing.repository

Shown = pytest.CaptureFixture[str]
Doctor = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """No ``nvidia-smi``, whatever this machine has."""
    monkeypatch.setattr("neaptide.doctor.machine._smi", lambda *arguments: "")


@pytest.fixture
def doctor(
    repository: ToyRepository,
    env: Environment,
    no_device: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Shown,
) -> Doctor:
    """The command on the toy's environment, on a machine with a device, where each patch has a rule."""
    for name in ("first", "second", "third"):
        monkeypatch.setitem(RULES, f"toy/{name}", Rule())
    monkeypatch.setattr("neaptide.doctor.machine.look_at_machine", lambda *args: Machine(FOUR.devices[:1], "torch"))

    def run(*options: str) -> tuple[int, dict[str, Any], str]:
        capsys.readouterr()
        code = main(["doctor", *repository.given, "--python", str(env.python), "--json", *options])
        out, err = capsys.readouterr()
        return code, json.loads(out), err

    return run


@pytest.fixture
def applied(repository: ToyRepository, env: Environment) -> Environment:
    """The toy with its series, which an engine of the pin reaches."""
    for name in ("first", "second", "third"):
        path = repository.root / "patches/toy" / name / "patch.yaml"
        path.write_text(path.read_text().replace("toy: true", "current: true"))
    assert repository.run("pins", "--lock", "current") == 0
    assert repository.run("apply", "--installed", "--python", str(env.python)) == 0
    return env


def test_all_that_can_be_is_in_force(doctor: Doctor, applied: Environment) -> None:
    before = applied.snapshot()
    code, out, _ = doctor()
    assert (code, out["findings"]) == (0, [])
    assert {row["in_force"] for row in out["savings"]} == {"yes"}
    toy = out["applied"]["toy"]
    assert (toy["state"], toy["patches"], toy["lock"]) == ("applied", ["toy/first", "toy/second", "toy/third"], [])
    assert str(applied.site) in toy["place"]
    assert applied.snapshot() == before


@pytest.mark.parametrize("file", ["toy/core.py", "toy/extra/deep.py"])
def test_an_altered_file_is_caught(doctor: Doctor, applied: Environment, file: str) -> None:
    with open(applied.site / file, "a") as handle:
        handle.write("# tampered\n")
    code, out, err = doctor()
    assert code == 5
    assert out["applied"]["toy"]["altered"] == [file.removeprefix("toy/")]
    assert f"altered since it was applied: {file.removeprefix('toy/')}" in err
    assert {row["in_force"] for row in out["savings"]} == {"cannot be told here"}


def test_a_deleted_file_and_an_interrupted_write_are_caught(doctor: Doctor, applied: Environment) -> None:
    (applied.site / "toy/extra/deep.py").unlink()
    assert doctor()[0] == 5
    (applied.info / "neaptide/journal.json").write_text("{}")
    code, out, _ = doctor()
    assert (code, out["applied"]["toy"]["state"]) == (5, "interrupted")


def test_a_part_of_the_series_is_not_what_the_lock_holds(
    doctor: Doctor,
    applied: Environment,
    repository: ToyRepository,
) -> None:
    assert repository.run("apply", "--without", "second", "--installed", "--python", str(applied.python)) == 0
    code, out, _ = doctor()
    assert (code, out["applied"]["toy"]["lock"]) == (1, ["second is not applied"])
    row = next(row for row in out["savings"] if row["patch"] == "toy/second")
    assert (row["in_force"], row["finding"]) == ("no", True)


def test_a_series_that_has_changed_since_is_stale(
    doctor: Doctor,
    applied: Environment,
    repository: ToyRepository,
) -> None:
    path = repository.root / "patches/toy/first/patch.yaml"
    path.write_text(path.read_text().replace("a title", "another title"))
    code, out, _ = doctor()
    assert (code, out["applied"]["toy"]["stale"]) == (1, ["toy/first"])


def test_upstream_as_it_is(doctor: Doctor, env: Environment) -> None:
    code, out, err = doctor()
    assert (code, out["applied"]["toy"]["state"]) == (1, "pristine")
    assert "nothing is applied" in err
    assert {row["in_force"] for row in out["savings"]} == {"no"}


def test_another_version_is_a_finding_where_the_place_is_named(doctor: Doctor, env: Environment) -> None:
    env.install("1.3.0")
    code, out, _ = doctor("--pin", "current")
    assert (code, out["applied"]["toy"]["state"]) == (1, "absent")
    assert "version 1.3.0 is installed" in out["applied"]["toy"]["place"]


def test_trees_where_nothing_is_installed_or_asked_for(
    doctor: Doctor,
    env: Environment,
    repository: ToyRepository,
) -> None:
    code, out, _ = doctor("--trees")
    assert (code, out["applied"]["toy"]["state"]) == (1, "absent")
    assert repository.run("apply") == 0
    code, out, _ = doctor("--trees")
    assert (code, out["applied"]["toy"]["state"], out["applied"]["toy"]["lock"]) == (1, "applied", [])
    assert "and this interpreter imports" in out["savings"][0]["reasons"][0]
    (repository.tree / "toy/core.py").write_text("changed = 1\n")
    code, out, _ = doctor("--trees")
    assert (code, out["applied"]["toy"]["altered"]) == (5, ["core.py"])
    git(repository.tree, "checkout", "--", ".")
    env.clear()
    assert doctor()[1]["applied"]["toy"]["state"] == "applied"


def test_no_device_is_a_finding_and_no_error(
    doctor: Doctor,
    applied: Environment,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("neaptide.doctor.machine.look_at_machine", lambda *args: Machine(why_not="not installed"))
    code, out, err = doctor()
    assert (code, [f["area"] for f in out["findings"]]) == (1, ["device"])
    assert "no device seen" in err


def test_the_repository_itself_can_be_asked(capsys: Shown, no_device: None, tmp_path: Path) -> None:
    code = main(["doctor", "--root", str(ROOT), "--build", str(tmp_path), "--trees", "--json"])
    out = json.loads(capsys.readouterr().out)
    assert code == 1
    assert [row["patch"] for row in out["savings"]] == list(RULES)
    assert [s["name"] for s in out["switches"]] == list(DECLARED.VARIABLES)
