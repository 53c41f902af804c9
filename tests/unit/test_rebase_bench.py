"""The bump benchmark's referee and its line tools, on small texts: what is right, what is in a wrong place."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from neaptide.model import Edit
from neaptide.outcomes import Subject
from neaptide.plan import plan_series
from neaptide.series import load_series
from toy import PACKAGE, SCALE_EDIT, TOTAL_EDIT, ToyRepository

sys.path.insert(0, str(Path(__file__).parents[1] / "bench" / "bump"))

from baselines import TOOLS, Workshop
from referee import Reading, Verdict, grown, judge, plain, scope_of

CORE = str(PACKAGE["toy/core.py"])
CLAMP = "value = min(value, LIMIT)"
LINE = "                value = math.floor(item)\n"
ELSEWHERE = "    # A comment that survives.\n"
PINNED = CORE.replace(LINE, f"{LINE}                {CLAMP}\n")


def verdict(
    after: str, edit: dict[str, Any] = TOTAL_EDIT, text: str = CLAMP, pinned: str = PINNED, before: str = CORE
) -> str:
    wanted = Edit(**edit)
    pin = Reading(CORE.encode()), Reading(pinned.encode())
    reference = [grown(scope_of(wanted), text, *pin)]
    return judge(wanted, [text], reference, Reading(before.encode()), Reading(after.encode())).value


@pytest.mark.parametrize(
    ("after", "wanted"),
    [
        (PINNED, Verdict.RIGHT),
        (PINNED.replace(CLAMP, "value = min(\n                    value, LIMIT)"), Verdict.RIGHT),
        (CORE, Verdict.NOT),
        (CORE.replace(ELSEWHERE, f"{ELSEWHERE}    {CLAMP}\n"), Verdict.WRONG),
        (PINNED.replace(ELSEWHERE, f"{ELSEWHERE}    {CLAMP}\n"), Verdict.RIGHT),
        (PINNED.replace("result += value", "result = value"), Verdict.NOT),
        (PINNED.replace(CLAMP, f"{CLAMP}\n                {CLAMP}"), Verdict.NOT),
        (PINNED.replace("def total(self", "def total(self,,"), Verdict.WRONG),
        (CORE.replace("def total(self", "def total(self,,"), Verdict.NOT),
        (PINNED.replace("def total", "def sum"), Verdict.WRONG),
    ],
)
def test_an_insertion(after: str, wanted: Verdict) -> None:
    assert verdict(after) == wanted


def test_what_upstream_has_already_is_not_counted_as_applied() -> None:
    assert verdict(PINNED, before=PINNED) == Verdict.NOT


def test_a_deletion() -> None:
    edit = {"file": "core.py", "symbol": "Pool.total", "match": "result = 0", "delete": True, "expect": "return result"}
    gone = CORE.replace("        result = 0\n", "")
    assert verdict(gone, edit, "result = 0", gone) == Verdict.RIGHT
    assert verdict(CORE, edit, "result = 0", gone) == Verdict.NOT


def test_an_import_belongs_among_the_statements_of_the_module() -> None:
    edit = {"file": "core.py", "symbol": "<module>", "import_": "import os"}
    pinned = CORE.replace("import math\n", "import math\nimport os\n")
    assert verdict(pinned, edit, "import os", pinned) == Verdict.RIGHT
    inside = CORE.replace(ELSEWHERE, f"{ELSEWHERE}    import os\n")
    assert verdict(inside, edit, "import os", pinned) == Verdict.WRONG


def test_no_word_is_found_inside_a_longer_one() -> None:
    assert plain("scale( x )") in plain("y = scale(x)")
    assert plain("scale(x)") not in plain("rescale(x)")


@pytest.mark.parametrize("tool", TOOLS)
def test_the_line_tools_go_on_after_a_conflict(toy: ToyRepository, tmp_path: Path, tool: str) -> None:
    """Of two patches the first meets another text at its place, the second its own; only fuzz puts the first in."""
    toy.add_patch("min", TOTAL_EDIT)
    toy.add_patch("list", SCALE_EDIT)
    pinned = {name.removeprefix("toy/"): str(text).encode() for name, text in PACKAGE.items()}
    subject = Subject(target="toy", version="1.2.0", names={}, read=pinned.get)
    shop = Workshop(tmp_path, "toy", plan_series(subject, load_series(toy.root, "toy")))
    changed = CORE.replace(LINE, LINE.replace("item)", "item + 1)")).replace("result += value", "result -= value")
    release = {**pinned, "core.py": changed.encode()}
    found = [s["core.py"].decode() for s in shop.bring(shop.import_tree(release), TOOLS[tool]).states]
    assert found[0] == changed
    assert (found[1] != changed) == (CLAMP in found[1]) == (tool == "patch -F3")
    assert found[2] == found[1].replace("sorted(out)", "list(sorted(out))")


def test_git_am_merges_beside_a_change(toy: ToyRepository, tmp_path: Path) -> None:
    toy.add_patch("list", SCALE_EDIT)
    pinned = {name.removeprefix("toy/"): str(text).encode() for name, text in PACKAGE.items()}
    subject = Subject(target="toy", version="1.2.0", names={}, read=pinned.get)
    shop = Workshop(tmp_path, "toy", plan_series(subject, load_series(toy.root, "toy")))
    changed = CORE.replace("def scale(values, factor=2):", "def scale(values, factor=3):")
    brought = {
        name: shop.bring(shop.import_tree({**pinned, "core.py": changed.encode()}), tool)
        for name, tool in TOOLS.items()
    }
    wanted = {"git am -3": True, "git apply --reject": False, "git apply": False, "patch -F3": True}
    assert {name: b"list(sorted" in b.states[1]["core.py"] for name, b in brought.items()} == wanted
    assert brought["git apply --reject"].named[0] == {"core.py": "def total(self, items):"}
