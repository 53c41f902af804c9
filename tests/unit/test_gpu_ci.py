"""``scripts/gpu-ci`` without a GPU: which skips are faults, what is called with what, and what workflows call."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from neaptide import gpu_ci, gpu_host
from neaptide.doctor.machine import Device, Machine
from neaptide.doctor.probe import Probe
from neaptide.errors import NeaptideError
from neaptide.gpu_ci import Run, Step, carry_out, main
from neaptide.gpu_skips import DSA_INDEXER, KINDS, NSA_INDEXER, Host, fault_of, read_outcome
from neaptide.output import Progress
from neaptide.pins import load_pin
from neaptide.session import Options
from test_installed import Environment, env, installed_once, repository  # noqa: F401 - fixtures
from toy import ToyRepository, write_files

ROOT = Path(__file__).resolve().parents[2]
GPU = ROOT / "tests" / "gpu"
Shown = pytest.CaptureFixture[str]
NOTHING = Host(0, (0, 0), {}, {})
CARD = Device(0, "RTX PRO 6000", (12, 0), 96 << 30, False)


def host(devices: int = 4, capability: tuple[int, int] = (12, 0), **environment: str) -> Host:
    """A host where everything is installed."""
    return Host(devices, capability, dict.fromkeys(gpu_host.MODULES, True), environment)


# Skips

SKIPS = [
    ("torch is not installed beside this Python", NOTHING, host()),
    ("vLLM is not installed beside this Python", NOTHING, host()),
    ("torch and vLLM are not installed beside this Python", NOTHING, host()),
    ("not installed beside this Python: cutlass, triton", NOTHING, host()),
    ("torch sees no CUDA device", NOTHING, host(1)),
    ("two CUDA devices are needed, and torch sees 1", host(1), host(2)),
    ("4 CUDA devices are needed, and torch sees 2", host(2), host(4)),
    ("NEAPTIDE_TEST_B12X_UPSTREAM and NEAPTIDE_TEST_B12X_PATCHED must name trees of b12x",
     host(NEAPTIDE_TEST_B12X_PATCHED="/a"), host(NEAPTIDE_TEST_B12X_PATCHED="/a", NEAPTIDE_TEST_B12X_UPSTREAM="/b")),
    ("NEAPTIDE_TEST_VLLM_PATCHED must name trees", host(), host(NEAPTIDE_TEST_VLLM_PATCHED="/a")),
    ("NEAPTIDE_TEST_B12X_UPSTREAM names no tree", host(), host(NEAPTIDE_TEST_B12X_UPSTREAM="/a")),
    ("the scorers need compute capability 12.x, and this device has 9.0", host(1, (9, 0)), host(1, (12, 1))),
    ("needs a CUDA device of compute capability 9.0", host(), host(1, (9, 0))),
    ("no patched b12x on PYTHONPATH", host(), host(NEAPTIDE_TEST_B12X_PATCHED="/a")),
    ("FlashAttention 3 is not there: built without it", host(), host(1, (9, 0))),
    ("FlashAttention is not there: No module named 'vllm._vllm_fa3_C'", host(), host(1, (9, 0))),
]  # fmt: skip


@pytest.mark.parametrize(("reason", "without", "having"), SKIPS)
def test_a_skip_is_a_fault_where_the_host_has_what_it_wants(reason: str, without: Host, having: Host) -> None:
    assert fault_of(reason, without) == ""
    assert fault_of(reason, having) == "this host could have run it"


@pytest.mark.parametrize(
    ("reason", "folder", "other"),
    [
        ("no tree with b12x.attention.nsa_indexer: set NEAPTIDE_TEST_B12X_PATCHED", NSA_INDEXER, DSA_INDEXER),
        ("this b12x prepares no plans", DSA_INDEXER, NSA_INDEXER),
    ],
)
def test_a_skip_by_the_version_of_b12x(tmp_path: Path, reason: str, folder: str, other: str) -> None:
    for name in (folder, other):
        (tmp_path / name.split("/")[-1] / name).mkdir(parents=True)
    lacking, having = (str(tmp_path / name.split("/")[-1]) for name in (other, folder))
    assert fault_of(reason, host(NEAPTIDE_TEST_B12X_PATCHED=lacking)) == ""
    assert fault_of(reason, host(NEAPTIDE_TEST_B12X_PATCHED=having)) != ""


def test_an_unknown_reason_is_a_fault_on_every_host() -> None:
    assert "no known kind" in fault_of("it rained", NOTHING)
    assert "no known kind" in fault_of("torch sees no CUDA device, or so", NOTHING)


EXAMPLES = {
    "torch.cuda.device_count()": "1", "world": "4", "' and '.join(unset)": "NEAPTIDE_TEST_A and NEAPTIDE_TEST_B",
    "', '.join(absent)": "torch, cutlass", "PACKAGE": "b12x.attention.nsa_indexer",
}  # fmt: skip


def reasons(tree: ast.AST) -> Iterator[str]:
    """What the functions that look for obstacles return, and constants that tests skip with; examples for values."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.strip("_") in ("missing", "without_kernels"):
            returned = [r.value for r in ast.walk(node) if isinstance(r, ast.Return) and r.value is not None]
            yield from (text for value in returned for text in texts(value))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.skip":
            yield from texts(node.args[0])
        if isinstance(node, ast.keyword) and node.arg == "reason":
            yield from texts(node.value)


def texts(value: ast.expr) -> Iterator[str]:
    if isinstance(value, ast.IfExp):
        yield from (*texts(value.body), *texts(value.orelse))
    elif isinstance(value, ast.Constant) and value.value:
        yield str(value.value)
    elif isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "format":
        yield ast.literal_eval(value.func.value).replace("{}", "9")
    elif isinstance(value, ast.JoinedStr):
        yield "".join(
            EXAMPLES.get(ast.unparse(part.value), "why")
            if isinstance(part, ast.FormattedValue)
            else ast.literal_eval(part)
            for part in value.values
        )


@pytest.mark.parametrize("file", sorted(p.name for p in GPU.glob("*.py")))
def test_every_reason_that_tests_give_is_of_a_known_kind(file: str) -> None:
    found = list(reasons(ast.parse((GPU / file).read_text())))
    assert [text for text in found if "no known kind" in fault_of(text, NOTHING)] == []


def test_the_reasons_are_found() -> None:
    found = [text for path in GPU.glob("*.py") for text in reasons(ast.parse(path.read_text()))]
    kinds = {kind.pattern.pattern for kind in KINDS for text in found if kind.pattern.fullmatch(text)}
    assert {kind.pattern.pattern for kind in KINDS} == kinds


JUNIT = """<?xml version="1.0"?><testsuites><testsuite name="pytest">
<testcase classname="tests.gpu.test_a" name="test_runs"/>
<testcase classname="tests.gpu.test_a" name="test_fails"><failure message="no"/></testcase>
<testcase classname="tests.gpu.test_a" name="test_breaks"><error message="no"/></testcase>
<testcase classname="tests.gpu.test_a" name="test_needs_four">
<skipped type="pytest.skip" message="4 CUDA devices are needed, and torch sees 2">x.py:1: ...</skipped></testcase>
<testcase classname="tests.gpu.test_a" name="test_odd"><skipped message="it rained"/></testcase>
</testsuite></testsuites>"""


def test_a_junit_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "junit.xml").write_text(JUNIT)
    found = read_outcome(tmp_path / "junit.xml", host(2))
    assert (found.tests, found.failed) == (5, ("tests.gpu.test_a::test_fails", "tests.gpu.test_a::test_breaks"))
    assert [skip.test.split("::")[1] for skip in found.skips] == ["test_needs_four", "test_odd"]
    assert [(skip.reason, skip.test) for skip in found.faults] == [("it rained", "tests.gpu.test_a::test_odd")]
    for text in (None, "<testsuites"):
        (tmp_path / "junit.xml").unlink() if text is None else (tmp_path / "junit.xml").write_text(text)
        with pytest.raises(NeaptideError, match="no JUnit file"):
            read_outcome(tmp_path / "junit.xml", host())


# The host

FAKE_TORCH = """
import os
_COUNT = len(os.environ["CUDA_VISIBLE_DEVICES"].split(",")) if "CUDA_VISIBLE_DEVICES" in os.environ else {count}
class _Of:
    major, minor, total_memory, name = {major}, 0, 5, "stand-in"
class cuda:
    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: _COUNT)
    get_device_properties = staticmethod(lambda index: _Of)
    can_device_access_peer = staticmethod(lambda one, other: {peers})
class version:
    cuda = "13.0"
__version__ = "2.13.0"
"""


class Stand:
    """A host with stand-ins for torch and ``nvidia-smi``."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        folder.mkdir()
        monkeypatch.setattr("neaptide.doctor.machine._smi", self._smi)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setenv("PYTHONPATH", str(folder))
        self.link = "PHB"

    def _smi(self, *arguments: str) -> str:
        if arguments[0] != "topo":
            return ""
        rows = [[f"GPU{a}", *("X" if a == b else self.link for b in range(4)), "0-31"] for a in range(4)]
        return "\n".join("\t".join(row) for row in [["", *(f"GPU{a}" for a in range(4)), "CPU"], *rows])

    def torch(self, count: int, major: int = 12, *, peers: bool = True) -> None:
        (self.folder / "torch.py").write_text(FAKE_TORCH.format(count=count, major=major, peers=peers))

    def without_torch(self) -> None:
        """Whether or not the interpreter of these tests has it."""
        (self.folder / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")


@pytest.fixture
def stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stand:
    return Stand(tmp_path / "stand", monkeypatch)


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


def test_a_host_without_cuda_is_one_clear_error(stand: Stand, capsys: Shown) -> None:
    stand.without_torch()
    assert main(["--root", str(ROOT)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: gpu-ci: no CUDA device is seen (torch: not installed); wanted a host with CUDA")


def test_devices_without_torch_are_one_clear_error(stand: Stand, capsys: Shown) -> None:
    stand.without_torch()
    query = "0, GPU-aa, RTX PRO 6000, 12.0, 97887, Disabled, 580.65.06\n"
    stand.monkeypatch.setattr("neaptide.doctor.machine._smi", lambda *a: query if a[0] != "topo" else "")
    assert main(["--root", str(ROOT)]) == 2
    assert "torch not installed; wanted an interpreter that can run tests/gpu" in capsys.readouterr().err


def test_a_world_that_is_not_there_is_refused(stand: Stand, capsys: Shown) -> None:
    stand.torch(3)
    assert main(["--root", str(ROOT), "--world", "4"]) == 2
    assert "3 CUDA devices; wanted 4, as --world says" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("count", "asked", "world"), [(1, None, 1), (2, None, 2), (3, None, 2), (8, None, 4), (4, 2, 2)]
)
def test_the_world_is_what_is_asked_for_or_there(count: int, asked: int | None, world: int) -> None:
    assert gpu_host.chosen_world(Machine((CARD,) * count), asked) == world


def test_the_first_visible_devices_are_those_of_the_run() -> None:
    assert gpu_host.visible(2, {}) == "0,1"
    assert gpu_host.visible(2, {"CUDA_VISIBLE_DEVICES": "3,1,0"}) == "3,1"


GOOD = Machine((CARD, CARD), "torch", peers=True, nvlink=False)


@pytest.mark.parametrize(
    ("machine", "says"),
    [
        (GOOD, ""),
        (replace(GOOD, nvlink=True), "NVLink"),
        (replace(GOOD, peers=False), "no peer access"),
        (replace(GOOD, peers=None), "for want of torch"),
        (replace(GOOD, devices=(CARD, replace(CARD, capability=(9, 0)))), "compute capability 9.0"),
        (replace(GOOD, devices=(CARD, replace(CARD, mig=True))), "MIG"),
    ],
)
def test_the_topology_that_it_is_made_for(machine: Machine, says: str) -> None:
    assert says in "; ".join(gpu_host.topology_problems(machine))
    assert bool(gpu_host.topology_problems(machine)) == bool(says)


@pytest.mark.parametrize(
    ("major", "peers", "link", "code"), [(12, True, "PHB", 0), (12, False, "PHB", 1), (9, True, "NV18", 1)]
)
def test_topology_alone(stand: Stand, capsys: Shown, major: int, peers: bool, link: str, code: int) -> None:
    stand.torch(4, major, peers=peers)
    stand.link = link
    assert main(["--root", str(ROOT), "--topology", "--world", "4"]) == code
    assert ("as it is made for" in capsys.readouterr().err) == (code == 0)


def test_links_of_devices_that_are_left_out_do_not_count() -> None:
    links = (("X", "PHB", "NV4"), ("PHB", "X", "SYS"), ("NV4", "SYS", "X"))
    three = replace(GOOD, devices=(CARD,) * 3, links=links, nvlink=True)
    assert gpu_host.limited(three, 2).nvlink is False


# What is called


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


def test_every_file_of_the_table_is_there_and_its_patch_too() -> None:
    assert {name for name in gpu_host.TESTS if not (GPU / name).is_file()} == set()
    assert {patch for patch in gpu_host.TESTS.values() if not (ROOT / "patches" / patch).is_dir()} == set()


def test_every_variable_that_tests_read_is_set_or_known(tmp_path: Path) -> None:
    read = {
        name for path in GPU.rglob("*.py") for name in re.findall(r"NEAPTIDE_TEST_[A-Z0-9_]*[A-Z0-9]", path.read_text())
    }
    options = Options(root=ROOT, build=tmp_path)
    trees = gpu_host.Trees(options, Progress(), tmp_path, engine=object())  # type: ignore[arg-type]
    read -= {"NEAPTIDE_TEST_B12X"}  # a prefix, which a test adds the variant to
    assert read == {*trees.environment(), "NEAPTIDE_TEST_RESULTS"} - {"PYTHONPATH"}
    documented = (ROOT / "docs" / "gpu-ci.md").read_text()
    assert [name for name in read if name not in documented] == []


def test_the_same_inside_an_image(stand: Stand, capsys: Shown, tmp_path: Path) -> None:
    stand.torch(4)
    stand.monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,2")
    main(["--root", str(ROOT), "--dry-run", "--image", "neaptide:test", "--pin", "r12", "--output", str(tmp_path)])
    command = shlex.split(capsys.readouterr().out)
    assert command[:6] == ["docker", "run", "--rm", "--gpus", "all", "--ipc=host"]
    assert "CUDA_VISIBLE_DEVICES" in command
    assert command[command.index("--volume") + 1] == f"{tmp_path}:/out"
    inner = command[command.index("neaptide:test") + 1 :]
    assert inner == ["--pin", "r12", "--output", "/out/run", "--build", "/out/build", "--world", "2"]
    assert command[command.index("--entrypoint") + 1] == "/opt/neaptide/scripts/gpu-ci"
    assert gpu_ci.parser().parse_args(["--root", "/opt/neaptide", *inner]).world == 2


@pytest.mark.parametrize(("ended", "code"), [(0, 0), (1, 1), (2, 2), (125, 2)])
def test_the_image_run_ends_as_the_run_inside(stand: Stand, tmp_path: Path, ended: int, code: int) -> None:
    stand.torch(2)
    docker = stand.folder / "docker"
    docker.write_text(f"#!/bin/sh\nexit {ended}\n")
    docker.chmod(0o755)
    stand.monkeypatch.setenv("PATH", f"{stand.folder}{os.pathsep}{os.environ['PATH']}")
    assert main(["--root", str(ROOT), "--image", "x", "--output", str(tmp_path / "o")]) == code


# Trees


def test_trees_of_the_kernels_are_the_built_one_and_the_sdists(
    repository: ToyRepository,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    assert repository.run("apply") == 0
    monkeypatch.setattr(gpu_host, "KERNELS", "toy")
    monkeypatch.setattr(gpu_host, "sdist_path", lambda *args, **kwargs: repository.sdist)
    trees = gpu_host.Trees(Options(root=repository.root, build=repository.build), Progress(), tmp_path / "trees", None)
    trees.make()
    patched = tmp_path / "trees/toy-patched"
    assert [path.name for path in patched.iterdir()] == ["toy"]
    assert "return list(sorted(out))" in (patched / "toy/core.py").read_text()
    assert "return sorted(out)" in (tmp_path / "trees/toy-upstream/toy/core.py").read_text()
    given = trees.environment({"PYTHONPATH": "/given"})
    assert given["PYTHONPATH"].endswith(f"{os.pathsep}/given")


def test_views_of_the_installed_engine(
    repository: ToyRepository,  # noqa: F811
    env: Environment,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Pristine, and with the whole series, whatever is applied to the installed one; extensions are linked."""
    (env.site / "toy/_C.so").write_bytes(b"compiled")
    assert repository.run("apply", "--patch", "first", "--installed", "--python", str(env.python)) == 0
    monkeypatch.setattr(gpu_host, "ENGINE", "toy")
    options = Options(root=repository.root, build=repository.build, python=env.python)
    engine = gpu_host.installed_engine(options, Progress())
    trees = gpu_host.Trees(options, Progress(), tmp_path, engine)
    trees._make_views(engine)
    upstream, patched = tmp_path / "toy-upstream/toy", tmp_path / "toy-patched/toy"
    assert (upstream / "core.py").read_text() != (patched / "core.py").read_text()
    assert (patched / "extra/deep.py").is_file()
    assert not (upstream / "extra").exists()
    assert "return sorted(out)" in (upstream / "core.py").read_text()
    assert (upstream / "_C.so").is_symlink()
    assert (patched / "_C.so").is_symlink()


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
        pin="current", world=2, machine=GOOD, seen=Probe({}, modules={}), files=("test_it.py",), environment={},
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


# The scripts and workflows

WORKFLOWS = ROOT / ".github" / "workflows"
with_workflows = pytest.mark.skipif(not WORKFLOWS.is_dir(), reason="an image has no workflows")


def test_the_script_runs_from_anywhere(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [ROOT / "scripts/gpu-ci", "--help"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0
    assert "--world" in done.stdout


def workflow(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((WORKFLOWS / name).read_text())
    return found


def steps_of(name: str) -> list[dict[str, Any]]:
    return [step for job in workflow(name)["jobs"].values() for step in job["steps"]]


@with_workflows
@pytest.mark.parametrize("name", ["gpu.yml", "upstream.yml"])
def test_workflows_call_scripts_of_the_repository_alone(name: str) -> None:
    for step in steps_of(name):
        if "run" not in step:
            assert re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"])
            continue
        program = step["run"].split()[0]
        assert program == "make" or os.access(ROOT / program, os.X_OK), step
        assert "\n" not in step["run"].strip()


@with_workflows
def test_workflows_have_no_more_rights_than_they_need() -> None:
    for name in ("gpu.yml", "upstream.yml"):
        found = workflow(name)
        assert found["permissions"] == {"contents": "read"}
        assert "concurrency" in found
        assert all("timeout-minutes" in job for job in found["jobs"].values())
    rights = {name: job.get("permissions") for name, job in workflow("upstream.yml")["jobs"].items()}
    assert rights == {"check": None, "issue": {"contents": "read", "issues": "write"}}
    assert "pull_request" not in workflow("gpu.yml")[True]


@with_workflows
def test_the_gpu_workflow_checks_the_topology_first_and_both_pins() -> None:
    (job,) = workflow("gpu.yml")["jobs"].values()
    assert job["runs-on"] == ["self-hosted", "linux", "gpu", "rtx-pro-6000-x4"]
    assert job["strategy"]["matrix"]["pin"] == [name for name in ("current", "r12") if load_pin(ROOT, name)]
    calls = [shlex.split(step["run"].replace("${{ matrix.pin }}", "r12")) for step in job["steps"] if "run" in step]
    assert ["--topology" in call for call in calls] == [True, False]
    for call in calls:
        gpu_ci.parser().parse_args(["--root", ".", *call[1 : call.index("${IMAGE:+--image")]])


# The newest upstream


def check_with(folder: Path, code: int) -> tuple[int, str, str]:
    """Exit code, report and output of ``upstream-check`` with a tool that ends with ``code`` for vLLM."""
    tool = folder / "neaptide"
    tool.write_text(
        "#!/bin/bash\nwhile [[ $# -gt 0 ]]; do case $1 in --against) a=$2;; --report) r=$2;; esac; shift; done\n"
        f'echo "report of $a" > "$r"; echo "{{}}"; [[ $a == vllm==newest ]] && exit {code}; exit 0\n'
    )
    tool.chmod(0o755)
    environment = {**os.environ, "NEAPTIDE": str(tool), "GITHUB_OUTPUT": str(folder / "output")}
    done = subprocess.run([ROOT / "scripts/upstream-check", folder / "reports"], env=environment, capture_output=True)
    return done.returncode, (folder / "reports/report.md").read_text(), (folder / "output").read_text()


@pytest.mark.parametrize("code", [3, 4, 5])
def test_a_series_that_does_not_go_on_is_reported(tmp_path: Path, code: int) -> None:
    ended, report, output = check_with(tmp_path, code)
    assert (ended, output) == (0, "issue=true\n")
    assert report.count("report of vllm==newest") == 2
    assert f"## vllm at pin r12 (exit code {code})" in report
    assert "b12x" not in report
    assert len(list((tmp_path / "reports").glob("*.json"))) == 4


@pytest.mark.parametrize(("code", "ended"), [(0, 0), (1, 0), (2, 1)])
def test_what_is_well_or_could_not_be_checked_opens_no_issue(tmp_path: Path, code: int, ended: int) -> None:
    assert check_with(tmp_path, code) == (ended, "", "issue=false\n")


@pytest.mark.parametrize(("number", "call"), [("", "issue create --title"), ("7", "issue edit 7 --body-file")])
def test_one_issue_is_opened_or_updated(tmp_path: Path, number: str, call: str) -> None:
    gh = tmp_path / "gh"
    gh.write_text(f'#!/bin/bash\necho "$*" >> {tmp_path}/calls\n[[ $2 == list ]] && echo "{number}"\nexit 0\n')
    gh.chmod(0o755)
    (tmp_path / "report.md").write_text("é" * 40_000)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run([ROOT / "scripts/upstream-issue", tmp_path / "report.md"], env=environment, check=True)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 2
    assert calls[0].startswith("issue list --state open")
    assert calls[1].startswith(call)
