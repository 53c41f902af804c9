"""Hosts for a GPU run that are none: devices, torch and ``nvidia-smi`` as stand-ins."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest
from neaptide import gpu_host
from neaptide.doctor.machine import Device, Machine
from neaptide.gpu_skips import Host

ROOT = Path(__file__).resolve().parents[1]
GPU = ROOT / "tests" / "gpu"
CARD = Device(0, "RTX PRO 6000", (12, 0), 96 << 30, False)
GOOD = Machine((CARD, CARD), "torch", peers=True, nvlink=False)


def host(devices: int = 4, capability: tuple[int, int] = (12, 0), **environment: str) -> Host:
    """A host where everything is installed."""
    return Host(devices, capability, dict.fromkeys(gpu_host.MODULES, True), environment)


FAKE_TORCH = """
import os
_NAMES = os.environ.get("CUDA_VISIBLE_DEVICES", "{names}").split(",")
class _Of:
    major, minor, total_memory, name = {major}, 0, 5, "stand-in"
class cuda:
    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: len(_NAMES))
    get_device_properties = staticmethod(lambda index: _Of)
    can_device_access_peer = staticmethod(lambda *pair: {{int(_NAMES[one]) for one in pair}} not in {strangers})
class version:
    cuda = "13.0"
__version__ = "2.13.0"
"""


class Stand:
    """A host with stand-ins for torch and ``nvidia-smi``.

    Attributes:
        link: between two devices that ``links`` does not name.
        links: by a pair of physical numbers, the lower first.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        folder.mkdir()
        monkeypatch.setattr("neaptide.doctor.machine._smi", self._smi)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setenv("PYTHONPATH", str(folder))
        self.count, self.major, self.link = 0, 12, "PHB"
        self.links: dict[tuple[int, int], str] = {}

    def _smi(self, *arguments: str) -> str:
        every = range(self.count)
        if arguments[0] != "topo":
            return "".join(f"{a}, GPU-{a}, stand-in, {self.major}.0, 97887, Disabled, 580.65.06\n" for a in every)
        rows = [[f"GPU{a}", *(self._link(a, b) for b in every), "0-31"] for a in every]
        return "\n".join("\t".join(row) for row in [["", *(f"GPU{a}" for a in every), "CPU"], *rows])

    def _link(self, one: int, other: int) -> str:
        return "X" if one == other else self.links.get((min(one, other), max(one, other)), self.link)

    def torch(self, count: int, major: int = 12, *, strangers: Collection[tuple[int, int]] = ()) -> None:
        """Devices, and pairs of physical numbers that do not reach each other."""
        self.count, self.major = count, major
        names, pairs = ",".join(map(str, range(count))), [{*pair} for pair in strangers]
        (self.folder / "torch.py").write_text(FAKE_TORCH.format(names=names, major=major, strangers=pairs))

    def without_torch(self) -> None:
        """Whether or not the interpreter of these tests has it."""
        (self.folder / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")


@pytest.fixture
def stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stand:
    return Stand(tmp_path / "stand", monkeypatch)
