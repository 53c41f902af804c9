"""No tracked file repeats upstream text: no run of five or more non-trivial lines of a pin's trees."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from real import ROOT, Trees

RUN = 5
# The licence is a standard text that both sides carry; locks hold hashes.
LEFT_OUT = re.compile(r"^LICENSE$|\.lock$")
SUFFIXES = {
    ".py",
    ".md",
    ".toml",
    ".yaml",
    ".yml",
    ".txt",
    ".cu",
    ".cuh",
    ".cpp",
    ".h",
    ".sh",
    ".cfg",
    ".in",
    ".rst",
    "",
}
# A parameter (``name: type = default,``) or a passed-on argument (``name=name,``).
_PARAMETER = re.compile(r"^\*{0,2}\w+(\s*:\s*[^=]+)?(\s*=\s*[^,()]*)?,$")
_PASSED = re.compile(r"^(\w+)=(self\.)?\1,?$")


def is_trivial(line: str) -> bool:
    """Blank, punctuation, an import, a parameter, or fewer than two words."""
    words = re.findall(r"[A-Za-z_]{2,}", line)
    return (
        len(words) < 2
        or line.startswith(("import ", "from ", "#!", "# SPDX"))
        or bool(_PARAMETER.match(line))
        or bool(_PASSED.match(line))
    )


def runs(text: str) -> Iterator[tuple[str, ...]]:
    lines = [" ".join(line.split()) for line in text.splitlines()]
    kept = [line for line in lines if not is_trivial(line)]
    for i in range(len(kept) - RUN + 1):
        yield tuple(kept[i : i + RUN])


def read(path: Path) -> str:
    return path.read_bytes().decode("utf-8", "replace")


def repeated(ours: dict[tuple[str, ...], str], tree: Path) -> list[str]:
    """Where a run of ours also stands in the tree."""
    found = []
    for path in sorted(tree.rglob("*")):
        if path.is_file() and path.suffix in SUFFIXES and ".git" not in path.parts:
            found += [f"{ours[r]} ~ {path.relative_to(tree)}: {r[0]}" for r in runs(read(path)) if r in ours]
    return found


def test_no_tracked_file_repeats_upstream(trees: dict[str, Trees]) -> None:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    names = [n for n in listing.split("\0") if n and not LEFT_OUT.search(n)]
    assert len(names) > 20
    ours = {r: name for name in names for r in runs(read(ROOT / name))}
    for pin in trees.values():
        for tree in sorted(pin.pristine.iterdir()):
            assert repeated(ours, tree) == [], tree


def test_a_copied_run_is_found(trees: dict[str, Trees]) -> None:
    source = trees["current"].pristine / "b12x" / "b12x" / "comm" / "pcie"
    copied = read(source / "pcie_dma.py")
    ours = dict.fromkeys(list(runs(copied))[40:41], "copy")
    assert repeated(ours, source)
