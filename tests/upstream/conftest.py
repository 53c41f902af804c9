"""Each pin's sdists unpacked once, pristine and with the series applied."""

from __future__ import annotations

import pytest
from neaptide.archive import unpack
from neaptide.cli import main
from neaptide.fetch import sdist_path
from neaptide.output import Progress
from neaptide.pins import load_pin
from real import PINS, ROOT, Trees


@pytest.fixture(scope="session")
def trees(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trees]:
    """The trees of every pin that PyPI has."""
    out = {}
    build = tmp_path_factory.mktemp("build")
    for name in PINS:
        assert main(["apply", "--root", str(ROOT), "--build", str(build), "--pin", name]) == 0
        pristine = tmp_path_factory.mktemp(f"pristine-{name}")
        for target, artefact in load_pin(ROOT, name).targets.items():
            source = sdist_path(artefact, frozen=True, progress=Progress())
            unpack(source, source.name.removesuffix(".tar.gz"), pristine / target)
        out[name] = Trees(name, build / name, pristine)
    return out
