"""What the doctor reads of a machine, by stand-ins and without a GPU: devices, an interpreter, NCCL, surroundings."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from doctor_facts import DECLARED
from neaptide.doctor import surroundings
from neaptide.doctor.machine import look_at_machine
from neaptide.doctor.nccl import WRAPPER, wanted_symbols
from neaptide.doctor.overlay_code import SWITCHES, read_switches, run_module, undeclared
from neaptide.doctor.probe import Probe, probe
from neaptide.errors import NeaptideError
from toy import write_files

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


def test_without_torch_nvidia_smi_says_what_there_is(smi: Path) -> None:
    machine = look_at_machine(NO_TORCH, {})
    assert [(d.index, d.capability, d.total_bytes, d.mig) for d in machine.devices] == [
        (0, (12, 0), 97887 << 20, False), (1, (12, 0), 97887 << 20, False), (2, (12, 0), 97887 << 20, True)
    ]  # fmt: skip
    assert (machine.source, machine.driver, machine.why_not) == ("nvidia-smi", "580.65.06", "not installed")
    assert machine.links[0] == ("X", "PHB", "NV4")
    assert (machine.nvlink, machine.some_nvlink, machine.peers) == (False, True, None)
    assert machine.bus == "NVLink between some, peer access not known"


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


# Interpreters


def test_the_probe_asks_another_interpreter_and_survives_what_it_lacks(tmp_path: Path) -> None:
    # A package may be there, and a module deep inside it not come up.
    write_files(tmp_path, {"good/__init__.py": "", "bad.py": "raise RuntimeError('broken')\n",
                           "good/deep/__init__.py": "", "good/deep/api.py": "import not_there_at_all\n"})  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    seen = probe(
        Path(sys.executable), modules=["good", "nope"], packages=["good", "nope"],
        imports=["good", "bad", "good.deep.api"], symbols=["ncclSend"], environment=environment,
    )  # fmt: skip
    assert seen.modules == {"good": True, "nope": False}
    assert seen.packages["good"]["folder"] == str(tmp_path / "good")
    assert seen.packages["nope"] == {"folder": "", "version": ""}
    lacking = "ModuleNotFoundError: No module named 'not_there_at_all'"
    assert seen.imports == {"good": "", "bad": "RuntimeError: broken", "good.deep.api": lacking}
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


@pytest.mark.parametrize(
    ("links", "namespaces"),
    [
        ({"ipc": "ipc:[4026531839]", "pid": "pid:[4026531836]"}, ("host", "host")),
        ({"ipc": "ipc:[4026532281]", "pid": "pid:[4026531836]"}, ("own", "host")),
        ({"pid": "pid:[4026532284]"}, ("", "own")),
    ],
)
def test_namespaces_are_the_first_ones_or_own(
    monkeypatch: pytest.MonkeyPatch, links: dict[str, str], namespaces: tuple[str, str]
) -> None:
    def readlink(path: str) -> str:
        if (name := path.rpartition("/")[2]) not in links:
            raise FileNotFoundError(path)
        return links[name]

    monkeypatch.setattr(os, "readlink", readlink)
    found = surroundings.container()
    assert (found["ipc_namespace"], found["pid_namespace"]) == namespaces


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
