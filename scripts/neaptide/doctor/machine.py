"""Devices and what lies between them: by torch where it is, else by ``nvidia-smi``."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from neaptide.doctor.probe import Probe

MIB = 1 << 20
_QUERY = ("index", "uuid", "name", "compute_cap", "memory.total", "mig.mode.current", "driver_version")
_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_GPU = re.compile(r"GPU\d+")
_BUS = {None: "links not known", True: "NVLink", False: "PCIe"}
_PEERS = {None: "peer access not known", True: "all reach each other", False: "not all reach each other"}


@dataclass(frozen=True)
class Device:
    """One device. ``capability`` is (0, 0) and ``total_bytes`` 0 where nothing says it."""

    index: int
    name: str
    capability: tuple[int, int]
    total_bytes: int
    mig: bool


@dataclass(frozen=True)
class Machine:
    """The devices that a process here sees.

    Attributes:
        source: what named the devices, "" if nothing did.
        peers: whether every device can map every other; None if it cannot be told.
        nvlink: whether every pair has it, as vLLM asks; None if it cannot be told.
        links: between each pair, as ``nvidia-smi topo -m`` has them.
        why_not: why torch sees no device, for people.
    """

    devices: tuple[Device, ...] = ()
    source: str = ""
    driver: str = ""
    cuda_driver: str = ""
    torch: str = ""
    torch_cuda: str = ""
    peers: bool | None = None
    nvlink: bool | None = None
    links: tuple[tuple[str, ...], ...] = ()
    why_not: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def bus(self) -> str:
        """What lies between the devices, for people."""
        if len(self.devices) < 2:
            return "one device" if self.devices else "no device"
        bus = "NVLink between some" if self.some_nvlink and not self.nvlink else _BUS[self.nvlink]
        return f"{bus}, {_PEERS[self.peers]}"

    @property
    def some_nvlink(self) -> bool:
        """Whether some pair has it."""
        return any(_is_nvlink(link) for row in self.links for link in row)


def look_at_machine(seen: Probe, environment: Mapping[str, str] = os.environ) -> Machine:
    """What torch and ``nvidia-smi`` say; neither is an error to lack."""
    rows, links = _smi_devices(), _smi_links()
    by_torch = [_torch_device(row) for row in seen.torch.get("devices", ())]
    indices, smi = _visible(rows, environment.get("CUDA_VISIBLE_DEVICES"))
    devices = by_torch or smi
    shown = _between(links, indices)
    every = range(len(shown))
    return Machine(
        devices=tuple(devices),
        source="torch" if by_torch else "nvidia-smi" if smi else "",
        driver=rows[0]["driver_version"] if rows else _driver_by_file(),
        cuda_driver=seen.cuda_driver,
        torch=seen.torch.get("version", ""),
        torch_cuda=seen.torch.get("cuda", ""),
        peers=not seen.torch["peers_refused"] if by_torch else None,
        nvlink=all(_is_nvlink(shown[a][b]) for a in every for b in every if a != b) if shown else None,
        links=shown,
        why_not="" if by_torch else seen.torch["error"] or "torch sees none",
    )


def _is_nvlink(link: str) -> bool:
    return link.startswith("NV")


def _torch_device(row: Mapping[str, Any]) -> Device:
    major, minor = row["capability"]
    return Device(row["index"], row["name"], (major, minor), row["total_bytes"], row["mig"])


def _smi(*arguments: str) -> str:
    """What ``nvidia-smi`` prints; empty where it is not there or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _smi_devices() -> list[dict[str, str]]:
    text = _smi(f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits")
    rows = [[part.strip() for part in line.split(",")] for line in text.splitlines()]
    return [dict(zip(_QUERY, row, strict=True)) for row in rows if len(row) == len(_QUERY)]


def _visible(rows: Sequence[Mapping[str, str]], variable: str | None) -> tuple[list[int], list[Device]]:
    """Physical numbers and devices that ``CUDA_VISIBLE_DEVICES`` leaves: in its order, and none behind a wrong name."""
    by_name = {key: row for row in rows for key in (row["index"], row["uuid"])}
    chosen = list(rows)
    if variable is not None:
        names = [part.strip() for part in variable.split(",")]
        known = [name in by_name for name in names]
        chosen = [by_name[name] for name in names[: known.index(False) if False in known else None]]
    return [int(row["index"]) for row in chosen], [_smi_device(i, row) for i, row in enumerate(chosen)]


def _smi_device(index: int, row: Mapping[str, str]) -> Device:
    found = re.fullmatch(r"(\d+)\.(\d+)", row["compute_cap"])
    capability = (int(found[1]), int(found[2])) if found else (0, 0)
    memory = row["memory.total"]
    total_bytes = int(memory) * MIB if memory.isdigit() else 0
    return Device(index, row["name"], capability, total_bytes, row["mig.mode.current"] == "Enabled")


def _smi_links() -> dict[int, list[str]]:
    """Rows of ``nvidia-smi topo -m``, by the number of the GPU."""
    lines = [_ESCAPES.sub("", line).split() for line in _smi("topo", "-m").splitlines()]
    head, *rest = [line for line in lines if line] or [[]]
    count = sum(_GPU.fullmatch(word) is not None for word in head)
    rows = (line for line in rest if _GPU.fullmatch(line[0]) and len(line) > count)
    return {int(line[0].removeprefix("GPU")): line[1 : count + 1] for line in rows}


def _between(links: Mapping[int, Sequence[str]], indices: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    """The links between the visible devices alone."""
    if len(indices) < 2 or not all(a in links and b < len(links[a]) for a in indices for b in indices):
        return ()
    return tuple(tuple(links[a][b] for b in indices) for a in indices)


def _driver_by_file() -> str:
    try:
        text = _DRIVER_FILE.read_text()
    except OSError:
        return ""
    found = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", text)
    return found[1] if found else ""
