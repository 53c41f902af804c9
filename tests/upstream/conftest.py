"""Each pin's sdists unpacked once, pristine and with the series applied."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest
from neaptide.archive import unpack
from neaptide.cli import main
from neaptide.fetch import sdist_path
from neaptide.output import Progress
from neaptide.pins import load_pin
from real import PINS, ROOT, Trees


@pytest.fixture(scope="session")
def trees(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trees]:
    """The trees of every pin that PyPI has; tests read them only, and the workers of one run share them."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "trees"
    folder.mkdir(exist_ok=True)
    return {name: _trees(folder, name) for name in PINS}


def _trees(folder: Path, name: str) -> Trees:
    made = Trees(name, folder / "build" / name, folder / "pristine" / name)
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = folder / f"{name}.done"
        if not done.exists():
            _make(made)
            done.touch()
    return made


def _make(trees: Trees) -> None:
    build = trees.patched.parent
    assert main(["apply", "--root", str(ROOT), "--build", str(build), "--pin", trees.pin]) == 0
    for target, artefact in load_pin(ROOT, trees.pin).targets.items():
        source = sdist_path(artefact, frozen=True, progress=Progress())
        trees.pristine.mkdir(parents=True, exist_ok=True)
        unpack(source, source.name.removesuffix(".tar.gz"), trees.pristine / target)
