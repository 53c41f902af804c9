"""The toy, or any package, installed: by pip in an environment of its own, or laid in as an installer leaves it."""

from __future__ import annotations

import base64
import csv
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from toy import OTHER_EDIT, PACKAGE, SCALE_EDIT, TOTAL_EDIT, VERSION, ToyRepository

OVERLAY = [{"src": "extra/deep.py", "dest": "extra/deep.py", "mode": "new"}]
FILES = {n: c for n, c in PACKAGE.items() if n.startswith("toy/")}
Snapshot = dict[str, object]


def digest(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def make_environment(folder: Path) -> tuple[Path, Path]:
    """A clean virtual environment without pip; returns its interpreter and site-packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return folder / "bin" / "python", next(folder.glob("lib/python*/site-packages"))


def lay_in(site: Path, package: Path, version: str) -> Path:
    """Copy a package's folder into ``site`` and write its dist-info, which is returned."""
    shutil.copytree(package, site / package.name)
    info = site / f"{package.name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package.name}\nVersion: {version}\n")
    (info / "WHEEL").write_text("Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    (info / "INSTALLER").write_text("tests\n")
    files = sorted(p for top in (site / package.name, info) for p in top.rglob("*") if p.is_file())
    with open(info / "RECORD", "w", newline="") as handle:
        rows = csv.writer(handle, lineterminator="\n")
        for file in files:
            data = file.read_bytes()
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            rows.writerow([file.relative_to(site).as_posix(), f"sha256={digest}", len(data)])
        rows.writerow([(info / "RECORD").relative_to(site).as_posix(), "", ""])
    return info


def make_wheel(folder: Path, version: str = VERSION) -> Path:
    info = f"toy-{version}.dist-info"
    files = {
        **FILES,
        "toy/a, b.txt": "a name that RECORD must quote\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: toy\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = [f'"{n}",{digest(c.encode())},{len(c.encode())}\n' for n, c in files.items()]
    path = folder / f"toy-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, content in files.items():
            wheel.writestr(name, content)
        wheel.writestr(f"{info}/RECORD", "".join([*rows, f"{info}/RECORD,,\n"]))
    return path


@dataclass
class Environment:
    """A virtual environment in which the toy is installed."""

    python: Path
    site: Path
    wheels: Path

    def pip(self, *args: str) -> None:
        subprocess.run(
            [self.python, "-m", "pip", "--disable-pip-version-check", "-q", *args], check=True, capture_output=True
        )

    def install(self, version: str = VERSION) -> None:
        self.clear()
        self.pip("install", "--no-index", "--no-deps", str(make_wheel(self.wheels, version)))

    def clear(self) -> None:
        for path in self.site.glob("toy*"):
            shutil.rmtree(path)

    @property
    def info(self) -> Path:
        return next(self.site.glob("toy-*.dist-info"))

    def files(self) -> list[Path]:
        return sorted(p for top in self.site.glob("toy*") for p in top.rglob("*") if p.is_file())

    def snapshot(self) -> Snapshot:
        """Bytes, mode and modification time of every file of the distribution, and its folders."""
        out: Snapshot = {}
        for path in sorted(p for top in self.site.glob("toy*") for p in top.rglob("*")):
            status = path.lstat()
            name = str(path.relative_to(self.site))
            out[name] = (status.st_mode, path.read_bytes(), status.st_mtime_ns) if path.is_file() else status.st_mode
        return out

    def rows(self) -> dict[str, list[str]]:
        with open(self.info / "RECORD", newline="") as handle:
            return {row[0]: row[1:] for row in csv.reader(handle) if row}

    def assert_record_is_true(self) -> None:
        rows = self.rows()
        for name, (hashed, size) in rows.items():
            path = self.site / name
            assert path.is_file(), f"{name} is in RECORD only"
            if hashed:
                data = path.read_bytes()
                assert (hashed, size) == (digest(data), str(len(data))), name
        for path in self.files():
            name = path.relative_to(self.site).as_posix()
            source = path.parent.parent / f"{path.name.split('.')[0]}.py"
            assert name in rows or (path.suffix == ".pyc" and source.relative_to(self.site).as_posix() in rows), name

    def start(self, code: str = "import toy.core, toy.other") -> None:
        """Run the toy, so that Python writes bytecode."""
        subprocess.run([self.python, "-c", code], check=True, env={**os.environ, "PYTHONDONTWRITEBYTECODE": ""})


@pytest.fixture(scope="module")
def installed_once(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    site = next(folder.glob("lib/python*/site-packages"))
    environment = Environment(folder / "bin" / "python", site, folder)
    environment.install()
    (folder / "kept").mkdir()
    for top in site.glob("toy*"):
        shutil.copytree(top, folder / "kept" / top.name)
    return environment


@pytest.fixture
def env(installed_once: Environment) -> Iterator[Environment]:
    """The toy as pip installed it, modification times included."""
    installed_once.clear()
    for top in (installed_once.wheels / "kept").iterdir():
        shutil.copytree(top, installed_once.site / top.name)
    yield installed_once
    for link in installed_once.site.glob("*editable*"):
        link.unlink()


@pytest.fixture
def repository(toy: ToyRepository) -> ToyRepository:
    toy.add_overlay("extra/deep.py", "VALUE = 1\n")
    toy.add_patch("first", SCALE_EDIT)
    toy.add_patch("second", OTHER_EDIT, overlay=OVERLAY)
    toy.add_patch("third", TOTAL_EDIT)
    toy.lock()
    shutil.rmtree(toy.build)
    return toy
