"""A toy upstream and a toy neaptide repository, small and real, for tests without the real upstreams."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from neaptide.cli import main

VERSION = "1.2.0"
MODULE = '''"""A toy module."""

import math

LIMIT = 8 * 1024


class Pool:
    """Holds channels."""

    def __init__(self, size: int = LIMIT, *, name="pool"):
        self.size = size
        self.name = name

    def total(self, items):
        """Sum of the items."""
        result = 0
        for item in items:
            if item > 0:
                value = math.floor(item)
                result += value
        return result


def scale(values, factor=2):
    # A comment that survives.
    out = [v * factor for v in values]
    return sorted(out)
'''
OTHER = "from toy.core import Pool, scale\n\nPOOL = Pool(size=4)\nRESULT = scale([1, 2])\n"
HEADER = {
    "title": "a title",
    "description": "what and why\n",
    "origin": "a test",
    "forwarded": "no",
    "reason": "temporary",
    "recovers": [{"bytes": 1, "configuration": "any", "reached": {"toy": True}}],
    "test": "python -c pass",
    "retire_when": {"version": ">=99"},
}
PACKAGE = {"toy/__init__.py": "", "toy/core.py": MODULE, "toy/other.py": OTHER, "pyproject.toml": "# toy\n"}


def git(folder: Path, *args: str) -> str:
    """stdout of a git command in ``folder``, as a person would run it."""
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    return subprocess.run(["git", *who, *args], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def write_files(folder: Path, files: Mapping[str, str | bytes]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def make_checkout(folder: Path, files: Mapping[str, str | bytes] = PACKAGE) -> Path:
    """A git repository with one commit of ``files``, the release."""
    write_files(folder, files)
    git(folder, "init", "-q", "-b", "main")
    commit_all(folder, "upstream")
    git(folder, "tag", f"v{VERSION}")
    return folder


def commit_all(folder: Path, message: str) -> str:
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", message)
    return git(folder, "rev-parse", "HEAD")


def make_sdist(path: Path, files: Mapping[str, str | bytes] = PACKAGE, top: str = f"toy-{VERSION}") -> str:
    """Write an sdist; returns its sha256."""
    with tarfile.open(path, "w:gz") as tar:
        for name, content in sorted(files.items()):
            data = content.encode() if isinstance(content, str) else content
            info = tarfile.TarInfo(f"{top}/{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return hashlib.sha256(path.read_bytes()).hexdigest()


class ToyRepository:
    """A neaptide repository with one target ``toy``, whose pin ``current`` names an sdist of it.

    Attributes:
        root: the repository; ``build`` its tree folder.
        sdist: the sdist file; pass ``*self.given`` to commands so that nothing is downloaded.
    """

    def __init__(self, root: Path, files: Mapping[str, str | bytes] = PACKAGE) -> None:
        self.root, self.build = root, root / "build"
        (root / "patches" / "pins").mkdir(parents=True)
        (root / "patches" / "toy").mkdir()
        (root / "overlay" / "toy").mkdir(parents=True)
        (root / "patches" / "toy" / "series").write_text("")
        self.sdist = root / f"toy-{VERSION}.tar.gz"
        digest = make_sdist(self.sdist, files)
        (root / "patches" / "pins" / "current.toml").write_text(
            'description = "toy"\ndate = "2026-01-02T03:04:05Z"\n[targets.toy]\n'
            f'package = "toy"\nprefix = "TOY"\nversion = "{VERSION}"\n'
            f'sdist = "{self.sdist.name}"\nsha256 = "{digest}"\n'
        )
        self.given = ("--root", str(root), "--sdist", f"toy={self.sdist}")

    def add_patch(self, name: str, *edits: Mapping[str, object], **header: object) -> Path:
        """A patch at the end of the series; returns its folder."""
        folder = self.root / "patches" / "toy" / name
        folder.mkdir()
        body = {**HEADER, **header, **({"edits": [dict(e) for e in edits]} if edits else {})}
        (folder / "patch.yaml").write_text(yaml.safe_dump(body, sort_keys=False))
        with open(self.root / "patches" / "toy" / "series", "a") as series:
            series.write(f"{name}\n")
        return folder

    def add_overlay(self, name: str, content: str) -> None:
        write_files(self.root / "overlay" / "toy", {name: content})

    def run(self, *args: str) -> int:
        """Exit code of a neaptide command on this repository."""
        command, *rest = args
        return main([command, *self.given, *rest])

    def lock(self) -> None:
        """Record the pin's lock."""
        assert self.run("pins", "--lock", "current") == 0

    @property
    def tree(self) -> Path:
        return self.build / "current" / "toy"


OTHER_EDIT = {
    "file": "other.py",
    "symbol": "RESULT",
    "match": "scale([1, 2])",
    "wrap": "list($MATCH)",
    "expect": "scale($X)",
}
SCALE_EDIT = {
    "file": "core.py",
    "symbol": "scale",
    "match": "sorted($X)",
    "wrap": "list($MATCH)",
    "expect": "out = [v * factor for v in values]",
}
TOTAL_EDIT = {
    "file": "core.py",
    "symbol": "Pool.total",
    "match": "value = math.floor($X)",
    "after": "value = min(value, LIMIT)",
    "expect": "result += value",
}


Report = dict[str, Any]


class Upstream:
    """A checkout of toy whose ``core.py`` was changed, and the series applied to it."""

    def __init__(self, toy: ToyRepository, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.toy, self.capsys = toy, capsys
        self.folder = make_checkout(folder, PACKAGE)

    def change(self, *changes: tuple[str, str], file: str = "toy/core.py") -> None:
        """Upstream's next commit: each old text stands exactly once in ``file``."""
        text = (self.folder / file).read_text()
        for old, new in changes:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        write_files(self.folder, {file: text})
        commit_all(self.folder, "upstream moves on")

    def run(self, command: str, *args: str) -> tuple[int, Report, str]:
        """Exit code, JSON of toy, and what people read; a refusal leaves the checkout alone."""
        before = (git(self.folder, "rev-parse", "HEAD"), git(self.folder, "status", "--porcelain"))
        self.capsys.readouterr()
        code = self.toy.run(command, "--checkout", f"toy={self.folder}", "--json", *args)
        out, err = self.capsys.readouterr()
        if code:
            assert (git(self.folder, "rev-parse", "HEAD"), git(self.folder, "status", "--porcelain")) == before
        report = json.loads(out)
        return code, report.get("targets", {}).get("toy", report), err

    def statuses(self, *args: str) -> tuple[int, dict[str, list[str]]]:
        """Exit code of apply, and the status of every edit by patch."""
        code, report, _ = self.run("apply", *args)
        return code, {p["id"].split("/")[1]: [e["status"] for e in p["edits"]] for p in report["patches"]}

    @property
    def core(self) -> str:
        return (self.folder / "toy/core.py").read_bytes().decode()
