"""``neaptide check`` on real releases: those of the pins are clean, one between says what is in conflict and where."""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any

import pytest
from neaptide.cli import main
from neaptide.pins import load_pin
from real import PINS, ROOT

BETWEEN = "b12x==1.3.0"
OF_PINS = {f"{t}=={a.version}": pin for pin in PINS for t, a in load_pin(ROOT, pin).targets.items()}
Release = dict[str, Any]


@pytest.fixture(scope="module")
def checked() -> dict[str, Release]:
    """One run over the pins' releases and one between, by what was asked."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with contextlib.redirect_stdout(out):
        code = main(["check", "--root", str(ROOT), "--json", "--against", *OF_PINS, BETWEEN])
    out.seek(0)
    report = json.loads(out.read())
    assert code == report["exit_code"] == 3, "the release between the pins is in conflict"
    return {release["asked"]: release for release in report["releases"]}


@pytest.mark.parametrize("asked", OF_PINS)
def test_a_pins_release_is_clean(checked: dict[str, Release], asked: str) -> None:
    release, pin = checked[asked], OF_PINS[asked]
    assert (release["exit_code"], release["compared_with"]["pin"]) == (0, pin)
    assert {status for status, edits in release["edits"].items() if edits} == {"clean"}
    assert release["artefact"]["sha256"] == load_pin(ROOT, pin).targets[asked.partition("==")[0]].sha256


def test_a_release_between_names_file_symbol_and_reason(checked: dict[str, Release]) -> None:
    release = checked[BETWEEN]
    edits = [e for p in release["patches"] for e in p["edits"]]
    conflicts = [e for e in edits if e["status"] == "conflict"]
    assert release["exit_code"] == 3
    assert len(conflicts) == release["edits"]["conflict"] > 0
    for edit in (e for e in edits if e["status"] != "clean"):
        assert edit["file"]
        assert edit["symbol"]
        assert edit["detail"]
        assert edit["todo"]
    for edit in conflicts:
        assert edit["fate"]
        assert edit["file"] in edit["key"]
    changes = [e for e in edits if e["status"] in ("moved", "drift") and e["fate"] == "changed"]
    assert changes
    assert all(e["upstream_change"].startswith(f"--- pin/{e['file']}\n+++ here/{e['file']}\n") for e in changes)
