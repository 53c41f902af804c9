"""``neaptide rebase --accept`` on a toy: pin and lock are both written, or neither."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from datetime import UTC, datetime

import pytest
import rebasing
from neaptide import pinning, verify
from neaptide.cli import main
from neaptide.fetch import cache_folder
from neaptide.pins import Pin, TargetPin, load_lock, load_pin
from neaptide.rebase.newpin import encode_pin
from rebasing import AROUND, AT, AWAY, Rebase
from toy import PACKAGE, make_sdist, write_files

rebase = rebasing.rebase


@pytest.mark.parametrize(("changes", "code"), [([AWAY], 3), ([AT], 4), ([("result += value", "pass")], 5)])
def test_accept_refuses_what_does_not_hold(rebase: Rebase, changes: list[tuple[str, str]], code: int) -> None:
    before = rebase.pins
    for more in ((), ("--as", "next")):
        found, out, text = rebase.run("rebase", f"toy@{rebase.revision(*changes)}", "--accept", *more)
        assert (found, rebase.pins) == (code, before)
        assert "the series does not hold on this release" in out["error"]["found"]
        assert sum(line.startswith("error:") for line in text.splitlines()) == 1


@pytest.mark.parametrize("kind", ["revision", "release"])
@pytest.mark.parametrize("name", [None, "next"])
def test_accept_writes_pin_and_lock_that_apply_frozen(rebase: Rebase, kind: str, name: str | None) -> None:
    before, old = rebase.pins, load_pin(rebase.toy.root, "current")
    begun = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    changes = [AROUND, AT]
    head = rebase.revision(*changes)
    asked = f"toy@{head}" if kind == "revision" else rebase.release("1.3.0", *changes)
    pin = name or "current"
    given = ("--accept", "--accept-drift", "min", *(("--as", name) if name else ()))
    code, out, text = rebase.run("rebase", asked, *given)
    assert code == 0, text
    assert out["pin"] == {"files": [f"{pin}.toml", f"{pin}.lock"], "name": pin}
    assert ({n: d for n, d in rebase.pins.items() if n.startswith("current")} == before) == (name is not None)
    new = load_pin(rebase.toy.root, pin)
    artefact = new.targets["toy"]
    assert (new.description, artefact.package, artefact.prefix) == (old.description, "toy", "TOY")
    assert new.date >= begun > old.date
    found = (artefact.version, artefact.commit, artefact.sdist)
    assert found == (("1.2.0", head, None) if kind == "revision" else ("1.3.0", None, "toy-1.3.0.tar.gz"))
    checkout = ("--checkout", f"toy={rebase.checkout}") if kind == "revision" else ()
    root = ("--root", str(rebase.toy.root))
    assert main(["apply", *root, *checkout, "--pin", pin, "--frozen"]) == 0
    assert main(["pins", *root, *checkout, "--lock", pin, "--dry-run"]) == 0
    tree = rebase.checkout if kind == "revision" else rebase.toy.build / pin / "toy"
    assert "value = min(value, LIMIT)" in (tree / "toy/core.py").read_text()


def test_a_pin_that_was_rebased_is_clean_on_its_own_release(rebase: Rebase) -> None:
    asked = rebase.release("1.3.0", AROUND, AT)
    assert rebase.statuses(asked) == (4, ["drift", "clean"])
    assert rebase.statuses(asked, "--accept-drift", "min", "--accept") == (0, ["drift", "clean"])
    assert rebase.statuses(asked) == (0, ["clean", "clean"])


def test_a_new_pin_keeps_the_locks_of_other_targets(rebase: Rebase) -> None:
    digest = make_sdist(cache_folder() / "twin-2.0.tar.gz", {"twin/__init__.py": ""}, "twin-2.0")
    write_files(rebase.toy.root, {"patches/twin/series": ""})
    with (rebase.toy.root / "patches/pins/current.toml").open("a") as pin:
        pin.write(f'[targets.twin]\npackage = "twin"\nprefix = "TWIN"\nversion = "2.0"\nsdist = "twin-2.0.tar.gz"\n'
                  f'sha256 = "{digest}"\n')  # fmt: skip
    assert main(["pins", "--root", str(rebase.toy.root), "--lock", "current"]) == 0
    old = load_lock(rebase.toy.root, "current")
    for asked in (f"toy@{rebase.revision(AROUND)}", rebase.release("1.3.0", AROUND)):
        name = f"next{len(rebase.pins)}"
        assert rebase.run("rebase", asked, "--accept", "--as", name)[0] == 0
        new = load_lock(rebase.toy.root, name)
        assert set(new) == {"toy", "twin"}
        assert new["twin"] == old["twin"]
        assert new["toy"] != old["toy"]
        assert set(load_pin(rebase.toy.root, name).targets) == {"toy", "twin"}


def elsewhere(rebase: Rebase, monkeypatch: pytest.MonkeyPatch) -> str:
    """The checkout is not at the commit that is to be pinned."""
    wanted = rebase.revision(AROUND)
    rebase.revision()
    return f"toy@{wanted}"


def unverified(rebase: Rebase, monkeypatch: pytest.MonkeyPatch) -> str:
    """The whole tree does not pass, which touched files alone do not show."""
    (rebase.toy.root / "overlay" / "toy" / "other.py").write_text("X = 1\n")
    replaced = [{"src": "other.py", "dest": "other.py", "mode": "replace"}]
    rebase.toy.add_patch("replaces", overlay=replaced)
    user = {**PACKAGE, "toy/user.py": "from toy.other import RESULT\n"}
    make_sdist(cache_folder() / "toy-1.3.0.tar.gz", user, "toy-1.3.0")
    return "toy==1.3.0"


def stopped(rebase: Rebase, monkeypatch: pytest.MonkeyPatch) -> str:
    """Ctrl-C while the lock is made."""

    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(verify, "check_plan", stop)
    return rebase.release("1.3.0")


def found_late(rebase: Rebase, monkeypatch: pytest.MonkeyPatch) -> str:
    """Locking ends with a finding, not with an error."""
    monkeypatch.setattr(pinning, "lock_pin", lambda session: (3, {}))
    return rebase.release("1.3.0")


ENDS = {elsewhere: 2, unverified: 5, found_late: 3}


@pytest.mark.parametrize("fails", [elsewhere, unverified, stopped, found_late])
@pytest.mark.parametrize("name", [None, "next"])
def test_both_files_go_back_when_locking_fails(
    rebase: Rebase, monkeypatch: pytest.MonkeyPatch, name: str | None,
    fails: Callable[[Rebase, pytest.MonkeyPatch], str],
) -> None:  # fmt: skip
    before = rebase.pins
    asked = fails(rebase, monkeypatch)
    given = ("rebase", asked, "--accept", "--accept-drift", "min", *(("--as", name) if name else ()))
    if fails is unverified:
        given = (*given, "--accept-drift", "replaces")
    if fails is stopped:
        assert main([given[0], "--root", str(rebase.toy.root), "--frozen", *given[1:]]) == 130
    else:
        code, _, _ = rebase.run(*given)
        assert code == ENDS[fails]
    assert rebase.pins == before


def test_a_pin_is_read_back_as_it_was_written() -> None:
    artefact = TargetPin(version="1", package="toy", prefix="TOY", sdist="a.tar.gz", sha256="0" * 64, note='a "b" \\ c')
    pin = Pin(name="x", description='tab\t"quoted" \\ and\nnext ümlaut', date="2026-01-02T03:04:05Z",
              targets={"toy": artefact})  # fmt: skip
    data = tomllib.loads(encode_pin(pin).decode())
    assert (data["description"], data["targets"]["toy"]["note"]) == (pin.description, artefact.note)
