"""An installation has every folder of the tool that has code in it."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_folder_with_code_is_installed() -> None:
    scripts = ROOT / "scripts"
    folders = {path.parent.relative_to(scripts) for path in (scripts / "neaptide").rglob("*.py")}
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert sorted(declared) == sorted(".".join(folder.parts) for folder in folders)
