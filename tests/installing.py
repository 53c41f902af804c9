"""A package laid into an environment as an installer leaves it: its folder, and a dist-info whose RECORD is true."""

from __future__ import annotations

import base64
import csv
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path


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
