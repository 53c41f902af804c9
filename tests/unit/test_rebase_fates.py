"""What a new release did to each anchor: the outcome, upstream's fate of the symbol, the likeliest place, the todo."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import bumped
import pytest
from bump_cases import ADMIT_TEXT, CASES, check
from bumped import CORE, FILES, TOTAL, Bump, Files, changed
from neaptide.fetch import cache_folder
from neaptide.outcomes import Status
from neaptide.output import Progress
from neaptide.rebase.planning import Library
from neaptide.rebase.whereabouts import Fate, Finder, Whereabouts
from toy import ToyRepository

bump = bumped.bump


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
