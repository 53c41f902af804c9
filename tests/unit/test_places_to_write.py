"""Files that commands write: refused before the work, as their option has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from neaptide.bench import command as bench
from neaptide.cli import main
from neaptide.disk import check_writable
from neaptide.ledger import command as ledger
from neaptide.rebase import check
from neaptide.simulate import command as simulate

ROOT = Path(__file__).resolve().parents[2]
CALLS = [
    ("ledger", "gate", "--csv"), ("ledger", "gate", "--plot"), ("simulate", "8192:32768", "--snapshot"),
    ("bench", "engine", "--output"), ("check", "--against=vllm==0.33.0", "--report"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "what", "option"), CALLS, ids=[f"{c} {o}" for c, _, o in CALLS])
@pytest.mark.parametrize("kind", ["below a file", "a folder"])
def test_a_place_where_no_file_can_be(
    command: str, what: str, option: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    pytest.importorskip("matplotlib")
    for module, name in ((ledger, "ask"), (simulate, "run_trace"), (bench, "_run_engine"), (check, "_all")):
        monkeypatch.setattr(module, name, lambda *given, **more: pytest.fail("went on"))
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.svg").mkdir()
    path = tmp_path / ("file/inside.svg" if kind == "below a file" else "folder.svg")
    assert main([command, what, "--root", str(ROOT), option, str(path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {option}: {path}: ")
    assert "wanted a place where a file can be written" in said
    assert len(said.splitlines()) == 1
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["file", "folder.svg"]


def test_a_folder_that_is_to_be_made_is_none_yet(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "a.csv"
    check_writable(path, "--csv")
    check_writable(None, "--csv")
    assert not path.parent.exists()
