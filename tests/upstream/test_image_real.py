"""The scripts of the image run to their end without Docker, on both packages as their sdists have them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from installing import lay_in, make_environment
from neaptide.fetch import sdist_path
from neaptide.output import Progress
from neaptide.pins import load_lock, load_pin
from real import ROOT

PIN = "current"
Script = Callable[..., subprocess.CompletedProcess[str]]


@dataclass(frozen=True)
class Image:
    """An environment with the pin's packages in it, patched by ``apply-series``."""

    python: Path
    site: Path
    script: Script
    applied: subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    folder = tmp_path_factory.mktemp("image")
    python, site = make_environment(folder / "venv")
    for artefact in load_pin(ROOT, PIN).targets.values():
        source = sdist_path(artefact, frozen=False, progress=Progress())
        inside = f"{source.name.removesuffix('.tar.gz')}/{artefact.package}/"
        with tarfile.open(source) as tar:
            tar.extractall(folder, (m for m in tar if m.name.startswith(inside)), filter="data")
        lay_in(site, folder / inside, artefact.version)
        shutil.rmtree(folder / inside)
    script = runner(folder)
    return Image(python, site, script, script("apply-series", "--pin", PIN, "--python", str(python)))


def runner(folder: Path) -> Script:
    """Runs a script of the image with this interpreter's neaptide on its PATH."""
    command = folder / "bin" / "neaptide"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m neaptide "$@"\n')
    command.chmod(0o755)
    path = os.pathsep.join([str(command.parent), str(Path(sys.executable).parent), os.environ["PATH"]])

    def script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [ROOT / "scripts" / "image" / name, *arguments], env={**os.environ, "PATH": path}, cwd=folder,
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    return script


@pytest.fixture
def check(image: Image) -> Callable[[], subprocess.CompletedProcess[str]]:
    return lambda: image.script("check-image", "--pin", PIN, "--python", str(image.python))


def test_the_series_is_applied_as_the_lock_has_it(image: Image) -> None:
    assert image.applied.returncode == 0, image.applied.stderr
    for target, lock in load_lock(ROOT, PIN).items():
        record = json.loads(next(image.site.glob(f"{target}-*.dist-info/neaptide/neaptide.lock.json")).read_text())
        assert {p["id"].split("/")[1] for p in record["patches"] if p["status"] == "clean"} == set(lock.patches)


def test_a_sound_image_passes(image: Image, check: Callable[[], subprocess.CompletedProcess[str]]) -> None:
    done = check()
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["command"] == "doctor"


ALTERED = {
    "replaced": "vllm/v1/worker/workspace.py",
    "new": "vllm/neaptide_switches.py",
    "edited": "b12x/comm/pcie/pcie_oneshot.py",
    "not touched by the series": "vllm/logger.py",
}


def test_every_altered_file_fails_by_name(image: Image, check: Callable[[], subprocess.CompletedProcess[str]]) -> None:
    kept = {name: (image.site / name).read_bytes() for name in ALTERED.values()}
    for name, data in kept.items():
        (image.site / name).write_bytes(data + b"# altered\n")
    done = check()
    for name, data in kept.items():
        (image.site / name).write_bytes(data)
    assert done.returncode == 5
    assert not done.stdout
    assert {n for n in ALTERED.values() if n in done.stderr} == set(ALTERED.values())


def test_the_bill_of_materials_lists_both_packages(image: Image, tmp_path: Path) -> None:
    output = tmp_path / "share" / "sbom.cdx.json"
    pytest.importorskip("cyclonedx_py")
    done = image.script("write-sbom", str(output), str(image.python))
    assert done.returncode == 0, done.stderr
    versions = {c["name"]: c["version"] for c in json.loads(output.read_text())["components"]}
    assert versions == {a.package: a.version for a in load_pin(ROOT, PIN).targets.values()}
