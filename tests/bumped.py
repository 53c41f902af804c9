"""A toy repository whose series is planned on one release after another."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from neaptide.fetch import cache_folder
from neaptide.output import Progress
from neaptide.pins import load_pin
from neaptide.rebase.planning import Library, Planned, plan_on
from neaptide.series import load_series
from toy import MODULE, ToyRepository, make_sdist

SUBTOTAL = '''
    def subtotal(self, items):
        """Nearly the same, and there all along."""
        result = 0
        for item in items[1:]:
            if item > 0:
                value = math.floor(item)
                result += value
        return result
'''
ADMIT_FUNCTION = '''
def admit(requests, capacity, reserve=0):
    """Which requests go on, and a report."""
    ordered = sorted(requests, key=len)
    remaining = capacity - reserve
    admitted = []
    for request in ordered:
        needed = math.ceil(len(request) / 2)
        if needed > remaining:
            break
        remaining -= needed
        admitted.append(request)
    waiting = [r for r in requests if r not in admitted]
    share = remaining // max(1, len(waiting))
    longest = max(map(len, waiting), default=0)
    report = {"admitted": len(admitted), "share": share}
    report["longest"] = longest
    return admitted, report
'''
LIMIT = "LIMIT = 8 * 1024\n"
CORE = MODULE.replace(LIMIT, f'{LIMIT}MODES = ("fast", "small")\n').replace(
    "\n\ndef scale", f"{SUBTOTAL}\n{ADMIT_FUNCTION}\n\ndef scale"
)
FILES = {"toy/__init__.py": "", "toy/core.py": CORE, "toy/other.py": "from toy.core import scale\n\nR = scale([1])\n"}
TOTAL = {
    "file": "core.py", "symbol": "Pool.total", "match": "value = math.floor($X)", "after": "mark_total = 1",
    "expect": "result += value",
}  # fmt: skip
ADMIT = {
    "file": "core.py", "symbol": "admit", "match": "remaining -= needed", "after": "mark_admit = 1",
    "expect": "admitted.append(request)",
}  # fmt: skip
CONSTANT = {"file": "core.py", "symbol": "LIMIT", "constant": "mark_limit()", "expect": "LIMIT = $X"}
IMPORT = {"file": "core.py", "symbol": "<module>", "import": "from os import name as mark_limit"}
PATCHES: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "total": ([TOTAL], {}),
    "admit": ([ADMIT], {}),
    "limit": ([IMPORT, CONSTANT], {}),
    "relies": ([], {"requires": [{"file": "core.py", "symbol": "scale"}], "overlay": "new.py"}),
    "later": ([], {"eras": [{"applies": ">=1.3", "edits": [{**ADMIT, "symbol": "dismiss", "after": "mark_later = 1"}]},
                            {"applies": "<1.3", "edits": [{**TOTAL, "symbol": "Pool.subtotal"}]}]}),
}  # fmt: skip
Files = Mapping[str, str]


@dataclass(frozen=True)
class Bump:
    """A toy repository locked on ``FILES``, and planning its series on another release."""

    toy: ToyRepository
    library: Library

    def on(self, files: Files, version: str = "1.2.1") -> Planned:
        """The series on a release of ``files``, as an sdist in the cache."""
        name = f"toy-{version}-{hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:16]}.tar.gz"
        digest = make_sdist(cache_folder() / name, files)
        pin = load_pin(self.toy.root, "current").targets["toy"]
        artefact = msgspec.structs.replace(pin, version=version, sdist=name, sha256=digest)
        return plan_on(self.library, "toy", artefact, load_series(self.toy.root, "toy"), "current")


def make_bump(folder: Path) -> Bump:
    toy = ToyRepository(folder / "repository", FILES)
    toy.add_overlay("new.py", "X = 1\n")
    for name, (edits, header) in PATCHES.items():
        if "overlay" in header:
            header = {**header, "overlay": [{"src": "new.py", "dest": header["overlay"], "mode": "new"}]}
        toy.add_patch(name, *edits, **header)
    toy.lock()
    cache_folder().mkdir(parents=True)
    (cache_folder() / toy.sdist.name).write_bytes(toy.sdist.read_bytes())
    return Bump(toy, Library(toy.root, {}, Progress(), frozen=True))


@pytest.fixture(scope="module")
def bump(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bump]:
    """One repository for all tests of a module, with a cache of its own."""
    folder = tmp_path_factory.mktemp("bump")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield make_bump(folder)


def changed(*pairs: tuple[str, str], files: Files = FILES, **more: str) -> dict[str, str]:
    """``core.py`` with each old text, which stands there once, made new; and other modules of the package."""
    text = files["toy/core.py"]
    for old, new in pairs:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return {**files, "toy/core.py": text, **{f"toy/{name}.py": content for name, content in more.items()}}
