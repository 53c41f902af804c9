"""Plots: what is refused before any work, and files that are the same for the same figure."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from neaptide import plotting
from neaptide.bench import command as bench
from neaptide.cli import main
from neaptide.ledger import command as ledger
from neaptide.plotting import plot_bytes
from neaptide.simulate import command as simulate

ROOT = Path(__file__).resolve().parents[2]
CALLS = (("ledger", "gate"), ("simulate", "8192:32768"), ("bench", "engine"))


@pytest.fixture(params=CALLS, ids=lambda call: call[0])
def call(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """A command whose work must not begin."""
    for module, name in ((ledger, "ask"), (simulate, "run_trace"), (bench, "_run_engine")):
        monkeypatch.setattr(module, name, lambda *given, **more: pytest.fail("went on"))
    given: tuple[str, ...] = request.param
    return (*given, "--root", str(ROOT))


def test_without_matplotlib(
    call: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(plotting, "find_spec", lambda name: None)
    assert main([*call, "--plot", str(tmp_path / "a.svg")]) == 2
    assert "matplotlib is not installed; wanted it for --plot" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["plot", "plot.txt", "plot.csv"])
def test_a_file_of_another_kind(call: tuple[str, ...], name: str, tmp_path: Path, capsys: Any) -> None:
    assert main([*call, "--plot", str(tmp_path / name)]) == 2
    assert f"{name!r}; wanted a name in .svg, .png, .pdf" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["svg", "png", "pdf"])
def test_the_same_figure_is_the_same_file_and_its_folder_is_made(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    digests = set()
    for seconds in ("0", "86400"):
        # What matplotlib takes for the time, in whole seconds for a PDF.
        monkeypatch.setenv("SOURCE_DATE_EPOCH", seconds)
        path = tmp_path / seconds / f"plot.{kind}"
        plot_bytes({"run": [("reserved", [1 << 30, 2 << 30])]}, "operation", "GiB", path)
        digests.add(hashlib.sha256(path.read_bytes()).hexdigest())
    assert len(digests) == 1
