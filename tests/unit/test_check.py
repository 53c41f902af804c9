"""``neaptide check`` on a toy: a row a release, the worst of their codes, and releases that cannot be planned on."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rebasing
from neaptide.pins import TargetLock, TargetPin
from neaptide.rebase import check
from neaptide.rebase.planning import best_pin
from rebasing import AROUND, AT, AWAY, Rebase

rebase = rebasing.rebase
ANY_LOCK: TargetLock = object()  # type: ignore[assignment]


def test_check_of_several_gives_the_worst_of_their_codes(rebase: Rebase, tmp_path: Path) -> None:
    drift, conflict = rebase.revision(AT), rebase.revision(AWAY)
    asked = [rebase.release("1.2.0"), rebase.release("1.3.0", AROUND), f"toy@{drift}", f"toy@{conflict}"]
    for number, wanted in enumerate((0, 0, 4, 3), 1):
        before = rebase.everything()
        code, out, text = rebase.run("check", "--against", *asked[:number], "--report", str(tmp_path / "report.md"))
        assert code == wanted
        assert [r["asked"] for r in out["releases"]] == asked[:number]
        assert rebase.everything() == before
    assert [r["exit_code"] for r in out["releases"]] == [0, 0, 4, 3]
    assert [r["edits"]["moved"] for r in out["releases"]] == [0, 1, 0, 0]
    assert "toy==1.3.0\tcurrent\t1\t1\t0\t0\t0\t0, 0\t" in text
    report = (tmp_path / "report.md").read_text()
    assert [line for line in report.splitlines() if line.startswith("# ")] == [
        "# toy: the series on toy 1.2.0", "# toy: the series on toy 1.3.0",
        f"# toy: the series on toy 1.2.0 at {drift[:12]}", f"# toy: the series on toy 1.2.0 at {conflict[:12]}",
    ]  # fmt: skip
    assert "look at core.py Pool.sum (the rule has one match there)" in report


@pytest.mark.parametrize("cores", [1, 2])
def test_more_workers_say_the_same_in_the_same_order(
    rebase: Rebase, monkeypatch: pytest.MonkeyPatch, cores: int
) -> None:
    asked = [rebase.release(f"1.{number}.0", change) for number, change in enumerate((AROUND, AT, AWAY), 3)]
    pools: list[tuple[Any, ...]] = []
    pool: Callable[..., Any] = check.ProcessPoolExecutor

    def noted(*given: Any, **more: Any) -> Any:
        pools.append(given)
        return pool(*given, **more)

    monkeypatch.setattr(check, "ProcessPoolExecutor", noted)
    monkeypatch.setattr(check, "WORTH_A_PROCESS", 1)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    code, out, _ = rebase.run("check", "--against", *asked)
    assert code == 3
    assert [(one["asked"], one["exit_code"]) for one in out["releases"]] == list(zip(asked, (0, 4, 3), strict=True))
    assert pools == ([(2,)] if cores == 2 else [])


@pytest.mark.parametrize("workers", [1, 2])
def test_a_release_that_cannot_be_planned_on_is_a_row(
    rebase: Rebase, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, workers: int
) -> None:
    """The others are planned all the same, and the code says that one was not looked at."""
    monkeypatch.setattr(check, "WORTH_A_PROCESS", 1)
    monkeypatch.setattr(os, "cpu_count", lambda: workers)
    broken = rebase.release("1.4.0", ("def scale(", "def scale(:"))
    asked = [rebase.release("1.3.0", AWAY), broken, rebase.release("1.5.0", AROUND)]
    report = tmp_path / "report.md"
    code, out, text = rebase.run("check", "--against", *asked, "--report", str(report))
    assert code == 2
    assert [one["exit_code"] for one in out["releases"]] == [3, 2, 0]
    error = out["releases"][1]["error"]
    assert "cannot parse it" in error["found"]
    assert error["where"] == "core.py"
    assert f"{broken} was not planned: core.py: " in text
    assert f"{broken}\tnot planned\t" in text
    heads = [line for line in report.read_text().splitlines() if line.startswith("# ")]
    assert heads[1] == f"# {broken}"
    assert len(heads) == 3


@pytest.mark.parametrize(
    ("here", "pins", "best"),
    [
        ("1.2.5", {"a": "1.2.0", "b": "1.1.0"}, "a"),
        ("1.1.5", {"a": "1.2.0", "b": "1.1.0"}, "b"),
        ("1.0.0", {"a": "1.2.0", "b": "1.1.0"}, "b"),
        ("9.0.0", {"a": "1.2.0", "b": "1.1.0", "c": "1.3.0"}, "c"),
    ],
)
def test_of_pins_that_fit_alike_the_newest_that_is_not_newer(here: str, pins: dict[str, str], best: str) -> None:
    """And where all are newer the oldest, which is nearest."""
    known = {
        name: (TargetPin(version=version, package="toy", prefix="TOY"), ANY_LOCK) for name, version in pins.items()
    }
    assert best_pin(known, [], here) == best
