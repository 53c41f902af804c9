"""A toy repository that is locked, its sdist in the cache, and a checkout of upstream that moves on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from neaptide.cli import main
from neaptide.fetch import cache_folder
from toy import PACKAGE, SCALE_EDIT, TOTAL_EDIT, ToyRepository, git, make_checkout, make_sdist, write_files

Shown = pytest.CaptureFixture[str]
AROUND = ("result = 0\n", "result = 0.0\n")
AT = ("item > 0", "item > 1")
AWAY = ("def total", "def sum")


def core(*changes: tuple[str, str]) -> str:
    text = str(PACKAGE["toy/core.py"])
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    return text


@dataclass
class Rebase:
    """A locked toy with two patches, its sdist in the cache, and a checkout of upstream."""

    toy: ToyRepository
    checkout: Path
    shown: Shown

    def revision(self, *changes: tuple[str, str]) -> str:
        """Upstream's next commit, with these changes to the pin's ``core.py`` and to nothing else."""
        write_files(self.checkout, {"toy/core.py": core(*changes)})
        git(self.checkout, "commit", "-q", "--allow-empty", "-a", "-m", "upstream moves on")
        return git(self.checkout, "rev-parse", "HEAD")

    def release(self, version: str, *changes: tuple[str, str]) -> str:
        """A release in the cache."""
        files = {**PACKAGE, "toy/core.py": core(*changes)}
        path = cache_folder() / f"toy-{version}.tar.gz"
        if changes or not path.is_file():  # the pin's own keeps its sha256: an archive has its time in it
            make_sdist(path, files, f"toy-{version}")
        return f"toy=={version}"

    def run(self, command: str, *args: str) -> tuple[int, dict[str, Any], str]:
        """Exit code, JSON and what people read; releases come from the cache."""
        self.shown.readouterr()
        given = ("--root", str(self.toy.root), "--checkout", f"toy={self.checkout}", "--frozen", "--json")
        code = main([command, *given, *args])
        out, err = self.shown.readouterr()
        return code, json.loads(out), err

    def statuses(self, *args: str) -> tuple[int, list[str]]:
        code, out, _ = self.run("rebase", *args)
        return code, [p["status"] for p in out["plan"]["patches"]]

    @property
    def pins(self) -> dict[str, bytes]:
        return {p.name: p.read_bytes() for p in sorted((self.toy.root / "patches" / "pins").iterdir())}

    def everything(self) -> dict[str, bytes]:
        """Every file of the repository and the checkout; of git directories only where HEAD is."""
        return {
            str(p): p.read_bytes() for top in (self.toy.root, self.checkout) for p in sorted(top.rglob("*"))
            if p.is_file() and (".git" not in p.parts or p.name == "HEAD")
        }  # fmt: skip


@pytest.fixture
def rebase(toy: ToyRepository, tmp_path: Path, capsys: Shown, monkeypatch: pytest.MonkeyPatch) -> Rebase:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    toy.add_patch("min", TOTAL_EDIT)
    toy.add_patch("list", SCALE_EDIT)
    toy.lock()
    cache_folder().mkdir(parents=True)
    (cache_folder() / toy.sdist.name).write_bytes(toy.sdist.read_bytes())
    return Rebase(toy, make_checkout(tmp_path / "checkout"), capsys)
