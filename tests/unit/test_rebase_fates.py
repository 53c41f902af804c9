"""What a new release did to each anchor: the outcome, upstream's fate of the symbol, the likeliest place, the todo."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from neaptide.fetch import cache_folder
from neaptide.outcomes import EditOutcome, Status
from neaptide.output import Progress
from neaptide.pins import load_pin
from neaptide.rebase.describe import todo
from neaptide.rebase.planning import Library, Planned, plan_on
from neaptide.rebase.whereabouts import Fate, Finder, Whereabouts
from neaptide.series import load_series
from toy import ToyRepository, make_sdist

CORE = '''"""The toy's engine."""

import math

LIMIT = 8 * 1024
MODES = ("fast", "small")


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

    def subtotal(self, items):
        """Nearly the same, and there all along."""
        result = 0
        for item in items[1:]:
            if item > 0:
                value = math.floor(item)
                result += value
        return result


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


def scale(values, factor=2):
    return sorted(v * factor for v in values)
'''
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


def taken(symbol: str) -> str:
    """The text of a top-level function or of a method of ``CORE``."""
    start = CORE.index(f"def {symbol}(")
    indentation = " " * (start - CORE.rindex("\n", 0, start) - 1)
    ends = [i for word in ("def ", "class ") if (i := CORE.find(f"\n{indentation}{word}", start)) > 0]
    return CORE[start : min([*ends, CORE.find("\n\n\n", start) % len(CORE)])].rstrip() + "\n"


def dedented(symbol: str) -> str:
    return taken(symbol).replace("\n    ", "\n")


ADMIT_TEXT, TOTAL_TEXT = taken("admit"), taken("total")
# ``admit`` keeps its name and gives its body away; or it goes, in three parts.
HELPERS = """def choose(requests, capacity, reserve):
    ordered = sorted(requests, key=len)
    remaining = capacity - reserve
    admitted = []
    for request in ordered:
        needed = math.ceil(len(request) / 2)
        if needed > remaining:
            break
        remaining -= needed
        admitted.append(request)
    return admitted, remaining


def summarise(requests, admitted, remaining):
    waiting = [r for r in requests if r not in admitted]
    share = remaining // max(1, len(waiting))
    longest = max(map(len, waiting), default=0)
    report = {"admitted": len(admitted), "share": share}
    report["longest"] = longest
    return report
"""
SHELL = """def admit(requests, capacity, reserve=0):
    admitted, remaining = choose(requests, capacity, reserve)
    return admitted, summarise(requests, admitted, remaining)
"""
THREE = """def rank(requests, capacity, reserve):
    ordered = sorted(requests, key=len)
    remaining = capacity - reserve
    admitted = []
    return ordered, remaining, admitted


def take(ordered, remaining, admitted):
    for request in ordered:
        needed = math.ceil(len(request) / 2)
        if needed > remaining:
            break
        remaining -= needed
        admitted.append(request)
    return remaining


def sum_up(requests, admitted, remaining):
    waiting = [r for r in requests if r not in admitted]
    share = remaining // max(1, len(waiting))
    longest = max(map(len, waiting), default=0)
    report = {"admitted": len(admitted), "share": share}
    report["longest"] = longest
    print(report)
    print(longest)
    return [report, None]
"""
HALF = """

def admit_some(requests, capacity):
    ordered = sorted(requests, key=len)
    remaining = capacity
    admitted = []
    for request in ordered:
        remaining -= needed
        admitted.append(request)
    return admitted
"""


@dataclass(frozen=True)
class Case:
    """A release, and what is to be said of one edit on it.

    ``first`` is the likeliest place, ``file symbol``; ``says`` stands in the todo.
    """

    patch: str
    symbol: str
    files: Files
    status: Status
    fate: Fate | None = None
    first: str = ""
    says: str = ""
    version: str = "1.2.1"


READ = "read upstream's change"
CASES = {
    "unchanged": Case("total", "Pool.total", FILES, Status.CLEAN),
    "a comment, line breaks": Case(
        "total", "Pool.total",
        changed(("result = 0\n        for item in items:", "result = (0)  # new\n        for item in (\n  items\n ):")),
        Status.CLEAN,
    ),
    "renamed": Case(
        "admit", "admit", changed(("def admit(", "def accept(")), Status.CONFLICT, Fate.RENAMED, "core.py accept",
        "look at core.py accept (the rule has one match there)",
    ),
    "renamed and changed, with a lesser copy": Case(
        "admit", "admit", changed(("def admit(", "def accept("), ("share = remaining //", "share = capacity //"),
                                  ("\n\ndef scale(", HALF + "\n\ndef scale(")),
        Status.CONFLICT, Fate.RENAMED, "core.py accept", "look at core.py accept (the rule has one match there)",
    ),
    "a method renamed, its twin was there": Case(
        "total", "Pool.total", changed(("def total(", "def sum(")), Status.CONFLICT, Fate.RENAMED, "core.py Pool.sum",
        "look at core.py Pool.sum (the rule has one match there): 100% of the body is the same",
    ),
    "deleted, its twin was there": Case(
        "total", "Pool.total", changed((f"    {TOTAL_TEXT}\n", "")), Status.CONFLICT, Fate.DELETED, "",
        "nothing like it is left",
    ),
    "its class renamed": Case(
        "total", "Pool.total", changed(("class Pool", "class Basin")), Status.CONFLICT, Fate.MOVED,
        "core.py Basin.total", "look at core.py Basin.total (the rule has one match there)",
    ),
    "moved to another module": Case(
        "admit", "admit", changed((ADMIT_TEXT, ""), admission="import math\n\n\n" + ADMIT_TEXT), Status.CONFLICT,
        Fate.MOVED, "admission.py admit", "look at admission.py admit (the rule has one match there): 100%",
    ),
    "moved and renamed": Case(
        "admit", "admit",
        changed((ADMIT_TEXT, ""), admission="import math\n\n\n" + ADMIT_TEXT.replace("admit(", "let_in(")),
        Status.CONFLICT, Fate.MOVED, "admission.py let_in", "look at admission.py let_in",
    ),
    "a method become a function elsewhere": Case(
        "total", "Pool.total", changed((f"    {TOTAL_TEXT}\n", ""), sums="import math\n\n\n" + dedented("total")),
        Status.CONFLICT, Fate.MOVED, "sums.py total", "look at sums.py total (the rule has one match there)",
    ),
    "moved without the anchored statement": Case(
        "admit", "admit",
        changed((ADMIT_TEXT, ""), admission=ADMIT_TEXT.replace("remaining -= needed", "remaining = -needed")),
        Status.CONFLICT, Fate.MOVED, "admission.py admit", "look at admission.py admit: ",
    ),
    "of two equal bodies the one of its name": Case(
        "admit", "admit",
        changed((ADMIT_TEXT, ""), aaa=ADMIT_TEXT.replace("admit(", "let_in("), zzz=ADMIT_TEXT),
        Status.CONFLICT, Fate.MOVED, "zzz.py admit", "look at zzz.py admit",
    ),
    "split, the name kept": Case(
        "admit", "admit", changed((ADMIT_TEXT, f"{SHELL}\n\n{HELPERS}")), Status.CONFLICT, Fate.SPLIT, "core.py choose",
        "the body is now in core.py choose: anchor there",
    ),
    "split over two modules": Case(
        "admit", "admit", changed((ADMIT_TEXT, SHELL), parts="import math\n\n\n" + HELPERS), Status.CONFLICT,
        Fate.SPLIT, "parts.py choose", "the body is now in parts.py choose: anchor there",
    ),
    "split, the name gone": Case(
        "admit", "admit", changed((ADMIT_TEXT, HELPERS)), Status.CONFLICT, Fate.SPLIT, "core.py choose",
        "the body is now in core.py choose: anchor there",
    ),
    "split in three, the name gone": Case(
        "admit", "admit", changed((ADMIT_TEXT, THREE)), Status.CONFLICT, Fate.SPLIT, "core.py take",
        "the body is now in core.py take: anchor there",
    ),
    "deleted": Case("admit", "admit", changed((ADMIT_TEXT, "")), Status.CONFLICT, Fate.DELETED, "",
                    "write the edit anew or retire the patch"),
    "deleted, a lesser copy is new": Case(
        "admit", "admit", changed((ADMIT_TEXT, HALF.lstrip())), Status.CONFLICT, Fate.DELETED, "",
        "nothing like it is left",
    ),
    "renamed and much changed": Case(
        "admit", "admit",
        changed(("def admit(", "def accept("), ("ordered = sorted(requests, key=len)", "ordered = list(requests)"),
                ("math.ceil(len(request) / 2)", "len(request)"), ("share = remaining", "share = capacity"),
                ("default=0)", "default=1)"), ("[r for r in requests if r not in admitted]", "[]")),
        Status.CONFLICT, Fate.RENAMED, "core.py accept", "look at core.py accept (the rule has one match there): ",
    ),
    "changed around the anchor": Case(
        "total", "Pool.total", changed(("return result\n\n    def subtotal", "return -result\n\n    def subtotal")),
        Status.MOVED, Fate.CHANGED, "", f"{READ}; nothing has to be mended",
    ),
    "changed in the anchor": Case(
        "admit", "admit", changed(("for request in ordered", "for request in ordered[1:]")),
        Status.DRIFT, Fate.CHANGED, "", f"{READ}; if the edit still holds, --accept-drift toy/admit",
    ),
    "the anchored statement twice": Case(
        "admit", "admit",
        changed(("        admitted.append(", "        remaining -= needed\n        admitted.append(")),
        Status.CONFLICT, Fate.CHANGED, "", f"{READ} of the symbol and mend the rule",
    ),
    "defined twice": Case(
        "admit", "admit", changed(("def scale(", "def admit(requests):\n    return requests\n\n\ndef scale(")),
        Status.CONFLICT, Fate.UNCHANGED, "", "mend the rule",
    ),
    "what it is for is gone": Case(
        "admit", "admit", changed(("        admitted.append(request)\n", "        admitted += [request]\n")),
        Status.UNMET, Fate.CHANGED, "", "mend the edit",
    ),
    "a constant moved": Case(
        "limit", "LIMIT", changed(("LIMIT = 8 * 1024\n", "from toy.limits import LIMIT\n"), limits="LIMIT = 8 * 1024\n",
                                  a_decoy="LIMIT = 3\n"),
        Status.CONFLICT, Fate.MOVED, "limits.py LIMIT", "look at limits.py LIMIT: 100%",
    ),
    "a constant deleted": Case(
        "limit", "LIMIT", changed(("LIMIT = 8 * 1024\n", ""), ("int = LIMIT", "int = 1")), Status.CONFLICT,
        Fate.DELETED, "", "nothing like it is left",
    ),
    "a constant's value": Case(
        "limit", "LIMIT", changed(("LIMIT = 8 * 1024", "LIMIT = 9 * 1024")), Status.DRIFT, Fate.CHANGED, "",
        "--accept-drift toy/limit",
    ),
    "a module renamed": Case(
        "limit", "<module>", {**{k: v for k, v in FILES.items() if k != "toy/core.py"}, "toy/engine.py": CORE},
        Status.CONFLICT, Fate.MOVED, "engine.py <module>", "look at engine.py <module>",
    ),
    "a function of a renamed module": Case(
        "admit", "admit", {**{k: v for k, v in FILES.items() if k != "toy/core.py"}, "toy/engine.py": CORE},
        Status.CONFLICT, Fate.MOVED, "engine.py admit", "look at engine.py admit (the rule has one match there): 100%",
    ),
    "a module deleted": Case(
        "limit", "<module>", {k: v for k, v in FILES.items() if k != "toy/core.py"}, Status.CONFLICT, Fate.DELETED, "",
        "nothing like it is left",
    ),
    "relied-on code changed": Case(
        "relies", "scale", changed(("factor=2", "factor=3")), Status.DRIFT, Fate.CHANGED, "",
        "--accept-drift toy/relies",
    ),
    "relied-on code moved": Case(
        "relies", "scale", changed((taken("scale"), ""), scaling=taken("scale")), Status.CONFLICT, Fate.MOVED,
        "scaling.py scale", "look at scaling.py scale",
    ),
    "upstream has a file of that name": Case(
        "relies", "<module>", changed(new="Y = 1\n"), Status.CONFLICT, Fate.NEW, "", READ,
    ),
    "an era that no pin has": Case(
        "later", "dismiss", changed((ADMIT_TEXT, ADMIT_TEXT + "\n\n" + ADMIT_TEXT.replace("admit(", "dismiss("))),
        Status.DRIFT, Fate.NEW, "", "--accept-drift toy/later", version="1.3.0",
    ),
}  # fmt: skip


def said_of(planned: Planned, case: Case) -> tuple[EditOutcome, Whereabouts | None]:
    """The outcome of the case's edit (or requirement, or overlay), and its whereabouts."""
    patch = next(p for p in planned.plan.patches if p.patch.name == case.patch)
    outcome = next(o for o in patch.outcomes if o.symbol == case.symbol and not o.key.startswith("names:"))
    if case.patch == "relies" and case.symbol == "<module>":
        outcome = next(o for o in patch.outcomes if o.key.startswith("overlay:"))
    return outcome, planned.about(outcome)


def check(planned: Planned, case: Case) -> None:
    outcome, where = said_of(planned, case)
    best = where.candidates[0] if where is not None and where.candidates else None
    found = (outcome.status, where.fate if where else None, f"{best.file} {best.symbol}" if best else "")
    assert found == (case.status, case.fate, case.first), outcome.detail
    text = todo(planned, outcome, frozenset())
    assert case.says in text
    assert bool(text) == (case.status is not Status.CLEAN)
    assert case.status is Status.CLEAN or outcome.detail


@pytest.mark.parametrize("name", CASES)
def test_what_became_of_an_anchor(bump: Bump, name: str) -> None:
    case = CASES[name]
    check(bump.on(case.files, case.version), case)


@pytest.mark.parametrize(
    ("header", "files", "version", "status"),
    [
        ({"superseded_when": {"anchor": {"file": "core.py", "symbol": "Pool.release"}}},
         changed(("    def subtotal", "    def release(self): ...\n\n    def subtotal")), "1.2.1", Status.SUPERSEDED),
        ({"superseded_when": {"anchor": {"file": "core.py", "symbol": "admit", "match": "min($X, LIMIT)"}}},
         changed(("remaining = capacity - reserve", "remaining = min(capacity, LIMIT)")), "1.2.1", Status.SUPERSEDED),
        ({"retire_when": {"version": ">=1.3"}}, FILES, "1.3.0", Status.RETIRED),
        ({"retire_when": {"version": ">=1.3"}}, FILES, "1.2.9", Status.CLEAN),
        ({"applies": "<1.3"}, FILES, "1.3.0", Status.NOT_APPLICABLE),
    ],
)  # fmt: skip
def test_what_upstream_has_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, header: dict[str, Any], files: Files, version: str, status: Status
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    toy = ToyRepository(tmp_path / "repository", FILES)
    toy.add_patch("total", TOTAL, **header)
    toy.lock()
    cache_folder().mkdir(parents=True)
    (cache_folder() / toy.sdist.name).write_bytes(toy.sdist.read_bytes())
    planned = Bump(toy, Library(toy.root, {}, Progress(), frozen=True)).on(files, version)
    assert [p.status for p in planned.plan.patches] == [status]
    assert (b"mark_total" in planned.plan.files.get("core.py", b"")) == (status is Status.CLEAN)


@pytest.mark.parametrize(
    ("change", "fate"),
    [
        (lambda text: text, Fate.UNCHANGED),
        (lambda text: text.replace("Which requests go on, and a report.", "Another\n    text."), Fate.UNCHANGED),
        (lambda text: text.replace("admitted = []", "admitted = []  # none yet"), Fate.REFORMATTED),
        (lambda text: text.replace("(requests, key=len)", "(\n  requests, key=len,\n )"), Fate.REFORMATTED),
        (lambda text: text.replace("admitted = []", "admitted = [None]"), Fate.CHANGED),
    ],
)  # fmt: skip
def test_a_symbol_that_is_still_there(change: Callable[[str], str], fate: Fate) -> None:
    found = Finder({"core.py": CORE.encode()}, {"core.py": change(CORE).encode()}).about("core.py", "admit")
    assert found == Whereabouts(fate)


def test_a_release_that_does_not_parse_elsewhere_is_searched_all_the_same(bump: Bump) -> None:
    """Python 2 in some corner of a package does not stop the search."""
    files = {**CASES["moved to another module"].files, "toy/old.py": f"print 'admit'\n{ADMIT_TEXT}\nprint math.ceil\n"}
    check(bump.on(files), CASES["moved to another module"])
