"""``neaptide doctor`` on a toy that pip installed, and what it reads of a machine: with stand-ins on PATH, no GPU."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from neaptide.cli import main
from neaptide.doctor import surroundings
from neaptide.doctor.facts import Facts
from neaptide.doctor.findings import findings
from neaptide.doctor.machine import Machine, look_at_machine
from neaptide.doctor.nccl import WRAPPER, wanted_symbols
from neaptide.doctor.overlay_code import SWITCHES, read_switches, run_module, undeclared
from neaptide.doctor.probe import Probe, probe
from neaptide.doctor.rules import RULES, Rule
from neaptide.errors import NeaptideError
from test_doctor_rules import DECLARED, FOUR, changed, facts
from test_installed import Environment, env, installed_once, repository  # noqa: F401 - fixtures
from toy import ToyRepository, git, write_files

ROOT = Path(__file__).resolve().parents[2]
Shown = pytest.CaptureFixture[str]
Doctor = Callable[..., tuple[int, dict[str, Any], str]]
NO_TORCH = Probe({"error": "not installed"})
QUERY = """0, GPU-aa, RTX PRO 6000, 12.0, 97887, Disabled, 580.65.06
1, GPU-bb, RTX PRO 6000, 12.0, 97887, Disabled, 580.65.06
2, GPU-cc, RTX PRO 6000, 12.0, 97887, Enabled, 580.65.06
"""
TOPOLOGY = """\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tPHB\tNV4\tSYS\t0-31\t0\t\tN/A
GPU1\tPHB\t X \tSYS\tSYS\t0-31\t0\t\tN/A
GPU2\tNV4\tSYS\t X \tSYS\t0-31\t0\t\tN/A
NIC0\tSYS\tSYS\tSYS\t X

Legend:

  X    = Self
"""


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An ``nvidia-smi`` on PATH that prints three devices."""
    folder = tmp_path / "bin"
    write_files(folder, {"query": QUERY, "topology": TOPOLOGY})
    program = folder / "nvidia-smi"
    program.write_text(f'#!/bin/sh\nif [ "$1" = topo ]; then cat {folder}/topology; else cat {folder}/query; fi\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return program


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """No ``nvidia-smi``, whatever this machine has."""
    monkeypatch.setattr("neaptide.doctor.machine._smi", lambda *arguments: "")


# Machines


def test_without_torch_nvidia_smi_says_what_there_is(smi: Path) -> None:
    machine = look_at_machine(NO_TORCH, {})
    assert [(d.index, d.capability, d.total_bytes, d.mig) for d in machine.devices] == [
        (0, (12, 0), 97887 << 20, False), (1, (12, 0), 97887 << 20, False), (2, (12, 0), 97887 << 20, True)
    ]  # fmt: skip
    assert (machine.source, machine.driver, machine.why_not) == ("nvidia-smi", "580.65.06", "not installed")
    assert machine.links[0] == ("X", "PHB", "NV4")
    assert (machine.nvlink, machine.peers) == (True, None)


@pytest.mark.parametrize(
    ("visible", "devices", "nvlink"),
    [
        ("0,1", 2, False),
        ("2,0", 2, True),
        ("GPU-bb,GPU-aa", 2, False),
        ("1", 1, None),
        ("", 0, None),
        ("0,9,1", 1, None),
    ],
)
def test_visible_devices_are_those_that_cuda_would_have(
    smi: Path, visible: str, devices: int, nvlink: bool | None
) -> None:
    machine = look_at_machine(NO_TORCH, {"CUDA_VISIBLE_DEVICES": visible})
    assert (len(machine.devices), machine.nvlink) == (devices, nvlink)


@pytest.mark.parametrize(("refused", "peers"), [([], True), ([[0, 1]], False)])
def test_torch_is_believed_before_nvidia_smi(smi: Path, refused: list[list[int]], peers: bool) -> None:
    device = {"name": "H200", "capability": [9, 0], "total_bytes": 1, "mig": False}
    torch = {"error": "", "version": "2.13.0", "cuda": "13.0", "peers_refused": refused}
    devices = [{"index": 0, **device}, {"index": 1, **device}]
    machine = look_at_machine(Probe({**torch, "devices": devices}), {"CUDA_VISIBLE_DEVICES": "0,1"})
    assert [d.name for d in machine.devices] == ["H200", "H200"]
    assert (machine.source, machine.peers, machine.nvlink, machine.torch) == ("torch", peers, False, "2.13.0")
    assert machine.bus == f"PCIe, {'all reach each other' if peers else 'not all reach each other'}"


def test_a_failing_nvidia_smi_is_no_device(smi: Path) -> None:
    smi.write_text("#!/bin/sh\necho no driver\nexit 9\n")
    assert look_at_machine(NO_TORCH, {}).devices == ()
    assert look_at_machine(NO_TORCH, {}).bus == "no device"


def test_the_probe_asks_another_interpreter_and_survives_what_it_lacks(tmp_path: Path) -> None:
    write_files(tmp_path, {"good/__init__.py": "", "bad.py": "raise RuntimeError('broken')\n"})
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    seen = probe(Path(sys.executable), modules=["good", "nope"], packages=["good", "nope"], imports=["good", "bad"],
                 symbols=["ncclSend"], environment=environment)  # fmt: skip
    assert seen.modules == {"good": True, "nope": False}
    assert seen.packages["good"]["folder"] == str(tmp_path / "good")
    assert seen.packages["nope"] == {"folder": "", "version": ""}
    assert seen.imports == {"good": "", "bad": "RuntimeError: broken"}
    assert not list(tmp_path.rglob("__pycache__"))


def test_the_probe_reads_devices_and_peers_of_torch(tmp_path: Path) -> None:
    torch = """
class _Of:
    major, minor, total_memory, name = 12, 0, 5, "RTX MIG 1g"
class cuda:
    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 2)
    get_device_properties = staticmethod(lambda index: _Of)
    can_device_access_peer = staticmethod(lambda one, other: one < other)
class version:
    cuda = "13.0"
__version__ = "2.13.0"
"""
    write_files(tmp_path, {"torch.py": torch})
    seen = probe(environment={**os.environ, "PYTHONPATH": str(tmp_path)}).torch
    assert [d["capability"] for d in seen["devices"]] == [[12, 0], [12, 0]]
    assert seen["devices"][0]["mig"]
    assert (seen["peers_refused"], seen["version"], seen["cuda"]) == ([[1, 0]], "2.13.0", "13.0")


def test_a_probe_that_cannot_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NeaptideError, match="cannot run it"):
        probe(tmp_path / "python")
    with pytest.raises(NeaptideError, match="ended with"):
        probe(Path("/bin/false"))


# NCCL

WRAPPER_CODE = """
class NCCLLibrary:
    exported_functions = [Function("ncclSend", int, []), Function("ncclCommSuspend", int, []),
                          Function("ncclExtra", int, []), Function("ncclText", int, [])]
    def __init__(self):
        for func in self.exported_functions:
            try:
                getattr(self.lib, func.name)
            except AttributeError:
                if func.name == "ncclExtra":
                    continue
                elif func.name == "ncclText":
                    continue
                elif func.name in ("ncclCommSuspend",):
                    if current_platform.is_rocm():
                        continue
                raise
"""


def test_symbols_that_pynccl_cannot_do_without(tmp_path: Path) -> None:
    write_files(tmp_path, {WRAPPER: WRAPPER_CODE})
    assert wanted_symbols(tmp_path) == ["ncclSend", "ncclCommSuspend"]
    assert wanted_symbols(tmp_path / "nowhere") == []


def test_a_library_is_asked_for_its_symbols() -> None:
    environment = {**os.environ, "VLLM_NCCL_SO_PATH": "libc.so.6"}
    nccl = probe(symbols=["printf", "ncclCommSuspend"], environment=environment).nccl
    assert (nccl["library"], nccl["error"], nccl["missing"]) == ("libc.so.6", "", ["ncclCommSuspend"])
    gone = probe(symbols=["printf"], environment={**os.environ, "VLLM_NCCL_SO_PATH": "/none/libnccl.so"}).nccl
    assert "/none/libnccl.so" in gone["error"]


# Surroundings and switches


@pytest.mark.parametrize(
    ("environment", "on", "variable", "wrong"),
    [
        ({}, False, "", 0),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, True, "PYTORCH_ALLOC_CONF", 0),
        ({"PYTORCH_CUDA_ALLOC_CONF": "a:[256:1,512:2],expandable_segments:true"}, True, "PYTORCH_CUDA_ALLOC_CONF", 0),
        ({"PYTORCH_ALLOC_CONF": "x:1", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, False,
         "PYTORCH_ALLOC_CONF", 1),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments"}, False, "PYTORCH_ALLOC_CONF", 1),
    ],
)  # fmt: skip
def test_allocator_settings(environment: dict[str, str], on: bool, variable: str, wrong: int) -> None:
    found = surroundings.allocator(environment)
    assert (found["expandable_segments"], found["variable"], len(found["wrong"])) == (on, variable, wrong)


def test_the_container_is_described_in_bytes() -> None:
    found = surroundings.container()
    assert {"shm_bytes", "memlock_bytes", "ipc_namespace", "pid_namespace", "in_container"} == set(found)
    assert found["ipc_namespace"] in ("host", "own", "")


def test_every_switch_that_the_overlay_declares_is_listed() -> None:
    switches = read_switches(DECLARED, {"VLLM_NEAPTIDE_PCIE_RING_KB": "x", "VLLM_NEAPTIDE_WORKSPACE_OVERFLOW": "error"})
    assert list(switches) == list(DECLARED.VARIABLES)
    ring, overflow = switches["VLLM_NEAPTIDE_PCIE_RING_KB"], switches["VLLM_NEAPTIDE_WORKSPACE_OVERFLOW"]
    assert (ring.set_to, ring.value, ring.default) == ("x", None, 0)
    assert "wanted a whole number" in ring.error
    assert (overflow.value, overflow.default, overflow.error) == ("error", "transient", "")
    assert all(switch.effect and "Raises" not in switch.effect for switch in switches.values())
    assert undeclared(switches, {"VLLM_NEAPTIDE_PCIE": "1", "VLLM_NEAPTIDE_PCIE_RING_KB": "1"}) == [
        "VLLM_NEAPTIDE_PCIE"
    ]


def test_running_a_module_leaves_no_bytecode(tmp_path: Path) -> None:
    write_files(tmp_path, {SWITCHES: "VARIABLES = {}\n"})
    assert read_switches(run_module(tmp_path / SWITCHES), {}) == {}
    assert run_module(tmp_path / "none.py") is None
    assert [p.name for p in tmp_path.iterdir()] == [SWITCHES]


# Findings

WELL: dict[str, Any] = {"library": "libnccl.so.2", "error": "", "version": "2.29.7", "missing": []}


def seen(nccl: dict[str, Any] | None = None, shm_bytes: int = 1 << 34, **changes: Any) -> Facts:
    environment = changes.pop("environment", {})
    changes = {"machine": FOUR, **changes}
    return facts(
        environment=environment, probe=Probe({}, nccl=nccl or WELL), container={"shm_bytes": shm_bytes},
        allocator=surroundings.allocator(environment), **changes,
    )  # fmt: skip


def texts(found: Facts) -> str:
    return "\n".join(f"{area}: {text}" for area, text in findings(found))


def test_a_sound_machine_has_no_findings() -> None:
    assert findings(seen()) == []


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (seen({**WELL, "version": "2.28.9", "missing": ["ncclCommSuspend"]}), "2.28.9 lacks ncclCommSuspend"),
        (seen({**WELL, "error": "cannot open"}), "VLLM_NCCL_SO_PATH"),
        (seen(shm_bytes=64 << 20), "/dev/shm has 64 MiB"),
        (seen(machine=Machine(why_not="not installed")), "no device seen (torch: not installed)"),
        (seen(machine=Machine(FOUR.devices, "nvidia-smi", why_not="not installed")), "--python"),
        (seen(environment={"VLLM_NEAPTIDE_PCIE_COLLECTIVE": "1"}), "no switch has that name"),
        (seen(environment={"VLLM_NEAPTIDE_PCIE_COLLECTIVES": "on"}), "is 'on', wanted one of"),
        (seen(environment={"PYTORCH_ALLOC_CONF": "a:1", "PYTORCH_CUDA_ALLOC_CONF": "a:2"}), "differ"),
    ],
)
def test_what_is_not_sound_is_said(found: Facts, says: str) -> None:
    assert says in texts(found)
    assert len(findings(found)) == 1


def test_one_device_needs_neither_nccl_nor_shared_memory() -> None:
    alone = Machine(FOUR.devices[:1], "torch")
    assert findings(seen({**WELL, "missing": ["ncclCommSuspend"]}, shm_bytes=1, machine=alone)) == []


def test_targets_that_are_not_as_the_repository_has_them() -> None:
    found = changed("vllm", seen(), stale=("vllm/workspace-manager",), lock=("pcie-collectives is not applied",))
    assert "other sources than the repository's: vllm/workspace-manager" in texts(found)
    assert "not what the pin's lock holds: pcie-collectives is not applied" in texts(found)


# The command


@pytest.fixture
def doctor(
    repository: ToyRepository,  # noqa: F811
    env: Environment,  # noqa: F811
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
def applied(repository: ToyRepository, env: Environment) -> Environment:  # noqa: F811
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
    repository: ToyRepository,  # noqa: F811
) -> None:
    assert repository.run("apply", "--without", "second", "--installed", "--python", str(applied.python)) == 0
    code, out, _ = doctor()
    assert (code, out["applied"]["toy"]["lock"]) == (1, ["second is not applied"])
    row = next(row for row in out["savings"] if row["patch"] == "toy/second")
    assert (row["in_force"], row["finding"]) == ("no", True)


def test_a_series_that_has_changed_since_is_stale(
    doctor: Doctor,
    applied: Environment,
    repository: ToyRepository,  # noqa: F811
) -> None:
    path = repository.root / "patches/toy/first/patch.yaml"
    path.write_text(path.read_text().replace("a title", "another title"))
    code, out, _ = doctor()
    assert (code, out["applied"]["toy"]["stale"]) == (1, ["toy/first"])


def test_upstream_as_it_is(doctor: Doctor, env: Environment) -> None:  # noqa: F811
    code, out, err = doctor()
    assert (code, out["applied"]["toy"]["state"]) == (1, "pristine")
    assert "nothing is applied" in err
    assert {row["in_force"] for row in out["savings"]} == {"no"}


def test_another_version_is_a_finding_where_the_place_is_named(doctor: Doctor, env: Environment) -> None:  # noqa: F811
    env.install("1.3.0")
    code, out, _ = doctor("--pin", "current")
    assert (code, out["applied"]["toy"]["state"]) == (1, "absent")
    assert "version 1.3.0 is installed" in out["applied"]["toy"]["place"]


def test_trees_where_nothing_is_installed_or_asked_for(
    doctor: Doctor,
    env: Environment,  # noqa: F811
    repository: ToyRepository,  # noqa: F811
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
