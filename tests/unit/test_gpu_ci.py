"""``scripts/gpu-ci`` without a GPU: what is called with what, in an image, too, and how a run ends."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gpu_standins
import pytest
from gpu_standins import GOOD, GPU, ROOT, Stand
from neaptide import gpu_ci, gpu_host
from neaptide.cli import main as cli
from neaptide.doctor.probe import Probe
from neaptide.errors import NeaptideError
from neaptide.gpu_ci import Run, Step, carry_out, main
from neaptide.output import Progress
from toy import write_files

stand = gpu_standins.stand

Shown = pytest.CaptureFixture[str]


def dry(capsys: Shown, *options: str) -> tuple[int, dict[str, str], dict[str, list[str]]]:
    """Exit code, variables, and commands by their first telling word of a dry run."""
    capsys.readouterr()
    code = main(["--root", str(ROOT), "--dry-run", *options])
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    variables = dict(line[1].split("=", 1) for line in lines if line[0] == "export")
    commands = {
        " ".join(line[2:4] if line[2] == "pytest" else line[3:5]): line for line in lines if line[0] != "export"
    }
    return code, variables, {name.split(" --")[0].split(" /")[0]: line for name, line in commands.items()}


def test_the_script_runs_from_anywhere(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [ROOT / "scripts/gpu-ci", "--help"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0
    assert "--world" in done.stdout


def test_a_run_on_blackwell(stand: Stand, capsys: Shown, tmp_path: Path) -> None:
    stand.torch(4)
    out = tmp_path / "out"
    code, variables, commands = dry(capsys, "--output", str(out), "--build", str(tmp_path / "b"))
    assert code == 0
    assert not out.exists()
    assert list(commands)[:3] == ["apply", "doctor", "pytest"]
    assert variables["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert variables["NEAPTIDE_TEST_B12X_PATCHED"] == str(out / "trees/b12x-patched")
    assert variables["NEAPTIDE_TEST_B12X_UPSTREAM"] == str(out / "trees/b12x-upstream")
    assert variables["NEAPTIDE_TEST_RESULTS"] == str(out / "results")
    assert variables["PYTHONPATH"].split(os.pathsep) == [
        str(out / "trees/b12x-patched"), str(ROOT / "scripts"), str(stand.folder)
    ]  # fmt: skip
    assert "-m" not in commands["pytest"][3:]
    assert f"--junitxml={out / 'junit.xml'}" in commands["pytest"]
    assert commands["doctor"][-2:] == [">", str(out / "doctor.json")]
    assert commands["apply"][-4:] == ["--build", str(tmp_path / "b"), "--pin", "current"]
    # Without vLLM there are no trees of it, and no benches of the engine's functions.
    assert not [name for name in variables if "VLLM" in name]
    assert not [name for name in commands if name.startswith("bench")]


def test_a_run_on_another_device_leaves_out_what_needs_blackwell(stand: Stand, capsys: Shown) -> None:
    stand.torch(2, 9)
    _, variables, commands = dry(capsys)
    assert commands["pytest"][-2:] == ["-m", "not sm120"]
    assert variables["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert variables["NEAPTIDE_TEST_RESULTS"] == str(ROOT / "build/gpu-ci/current/results")


def test_files_follow_the_patches_of_the_pin(stand: Stand, capsys: Shown) -> None:
    stand.torch(2)
    names = {}
    for pin in ("current", "r12"):
        command = dry(capsys, "--pin", pin)[2]["pytest"]
        names[pin] = [Path(part).name for part in command if part.endswith(".py")]
    assert set(names["current"]) == {path.name for path in GPU.glob("test_*.py")}
    unlisted = {path.name for path in GPU.glob("test_*.py")} - set(gpu_host.TESTS)
    assert set(names["r12"]) == {"test_indexer_sm120.py", "test_indexer_topk.py", "test_pcie_pools.py"} | unlisted


def test_the_live_ledger_of_an_engine_is_shown(tmp_path: Path, capsys: Shown) -> None:
    """The step's own command, on a file as a worker writes it."""
    args = gpu_ci.parser().parse_args(["--root", str(ROOT), "--output", str(tmp_path)])
    *_, engine, step = gpu_ci._benches(args, "python", tmp_path, tmp_path / "build", ledger=True)
    variable, file = engine.command[1].split("=")
    assert variable == "VLLM_NEAPTIDE_LEDGER_FILE"
    row = json.loads((ROOT / "tests/bench/results/ledger-live-h200.json").read_text())["rows"][0]
    write_files(tmp_path, {f"{Path(file).relative_to(tmp_path)}.rank0.json": json.dumps(row)})
    assert cli([*step.command[3:]]) == 0
    assert json.loads(capsys.readouterr().out)["ranks"][0]["rank"] == 0


# In an image


def test_the_same_inside_an_image(stand: Stand, capsys: Shown, tmp_path: Path) -> None:
    """Its host may have no torch, and devices that it does not see: only what is inside looks at them."""
    stand.without_torch()
    stand.monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,2")
    main(["--root", str(ROOT), "--dry-run", "--image", "neaptide:test", "--pin", "r12", "--output", str(tmp_path)])
    command = shlex.split(capsys.readouterr().out)
    assert command[:6] == ["docker", "run", "--rm", "--gpus", "all", "--ipc=host"]
    assert "CUDA_VISIBLE_DEVICES" in command
    assert command[command.index("--volume") + 1] == f"{tmp_path}:/out"
    inner = command[command.index("neaptide:test") + 1 :]
    assert inner == ["--pin", "r12", "--output", "/out/run", "--build", "/out/build"]
    assert command[command.index("--entrypoint") + 1] == "/opt/neaptide/scripts/gpu-ci"


@pytest.mark.parametrize(
    ("options", "read"),
    [
        ([], {"world": None, "topology": False, "no_bench": False}),
        (["--world", "2", "--no-bench"], {"world": 2, "no_bench": True}),
        (["--topology"], {"topology": True}),
    ],
)
def test_what_is_asked_is_asked_inside(
    stand: Stand, capsys: Shown, tmp_path: Path, options: list[str], read: dict[str, Any]
) -> None:
    main(["--root", str(ROOT), "--dry-run", "--image", "x", "--output", str(tmp_path), *options])
    command = shlex.split(capsys.readouterr().out)
    inner = gpu_ci.parser().parse_args(["--root", "/opt/neaptide", *command[command.index("x") + 1 :]])
    assert {name: getattr(inner, name) for name in read} == read


@pytest.mark.parametrize(("ended", "code"), [(0, 0), (1, 1), (2, 2), (125, 2)])
def test_the_image_run_ends_as_the_run_inside(stand: Stand, tmp_path: Path, ended: int, code: int) -> None:
    docker = stand.folder / "docker"
    docker.write_text(f"#!/bin/sh\nexit {ended}\n")
    docker.chmod(0o755)
    stand.monkeypatch.setenv("PATH", f"{stand.folder}{os.pathsep}{os.environ['PATH']}")
    assert main(["--root", str(ROOT), "--image", "x", "--output", str(tmp_path / "o")]) == code


# A run


TESTS = """
import pytest
def test_runs(): pass
@pytest.mark.skip(reason="4 CUDA devices are needed, and torch sees 2")
def test_four(): pass
{more}
"""


class NoTrees:
    """Trees that are there already."""

    made = 0

    def make(self) -> None:
        self.made += 1


def a_run(folder: Path, more: str = "", steps: Mapping[str, int] | None = None) -> tuple[Run, NoTrees]:
    """A run of real pytest on a file of its own, behind and before steps that end as said."""
    write_files(folder, {"test_it.py": TESTS.format(more=more)})
    out = folder / "out"
    python = sys.executable
    pytest_step = Step("pytest", (python, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder / "test_it.py"),
                                  f"--junitxml={out / 'junit.xml'}"))  # fmt: skip
    ends = {"apply": 0, "doctor": 1, **(steps or {})}
    made = [
        Step(name, (python, "-c", f"import sys; print('{{}}'); sys.exit({code})"), out / f"{name}.json",
             (0, 1) if name == "doctor" else (0,))
        for name, code in ends.items()
    ]  # fmt: skip
    trees = NoTrees()
    run = Run(
        pin="current", machine=GOOD, seen=Probe({}, modules={}), files=("test_it.py",), environment={},
        steps=(*made, pytest_step), trees=trees,  # type: ignore[arg-type]
    )  # fmt: skip
    return run, trees


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "out/summary.json").read_text())
    return found


def test_a_run_in_which_all_that_can_run_passes(tmp_path: Path) -> None:
    run, trees = a_run(tmp_path)
    assert carry_out(run, tmp_path / "out", Progress()) == 0
    assert trees.made == 1
    found = summary(tmp_path)
    assert (found["exit_code"], found["failed_steps"], found["outcome"]["tests"]) == (0, [], 2)
    assert found["outcome"]["skips"][0]["fault"] == ""
    assert json.loads((tmp_path / "out/doctor.json").read_text()) == {}
    with pytest.raises(NeaptideError, match="not empty"):
        carry_out(run, tmp_path / "out", Progress())


@pytest.mark.parametrize(
    ("more", "steps", "says"),
    [
        ("@pytest.mark.skip(reason='2 CUDA devices are needed, and torch sees 1')\ndef test_b(): pass", {}, "WRONGLY"),
        ("@pytest.mark.skip(reason='it rained')\ndef test_b(): pass", {}, "it rained (a reason of no known kind"),
        ("def test_b(): assert False", {}, "failed: pytest"),
        ("", {"doctor": 5}, "failed: doctor"),
    ],
)
def test_what_makes_a_run_fail(tmp_path: Path, capsys: Shown, more: str, steps: dict[str, int], says: str) -> None:
    run, _ = a_run(tmp_path, more, steps)
    assert carry_out(run, tmp_path / "out", Progress()) == 1
    assert says in capsys.readouterr().err
    assert summary(tmp_path)["exit_code"] == 1


def test_without_patched_trees_nothing_else_runs(tmp_path: Path) -> None:
    run, trees = a_run(tmp_path, steps={"apply": 4})
    with pytest.raises(NeaptideError, match="not applied") as caught:
        carry_out(run, tmp_path / "out", Progress())
    assert (caught.value.code, trees.made) == (1, 0)
    assert not (tmp_path / "out/junit.xml").exists()
