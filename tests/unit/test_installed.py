"""An installed distribution, made by pip in a virtual environment of its own, stays what RECORD says it is."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import installing
import pytest
from installing import FILES, Environment, make_wheel
from toy import VERSION, ToyRepository, write_files

installed_once, env, repository = installing.installed_once, installing.env, installing.repository


@pytest.fixture
def run(repository: ToyRepository, env: Environment) -> Callable[..., int]:
    return lambda *command: repository.run(*command, "--installed", "--python", str(env.python))


SERIES = [(), ("--patch", "first"), ("--patch", "second"), ("--without", "second")]


@pytest.mark.parametrize("chosen", SERIES, ids="/".join)
def test_record_is_true_and_stale_bytecode_gone(
    run: Callable[..., int], env: Environment, chosen: tuple[str, ...]
) -> None:
    before = env.snapshot()
    pristine_rows = env.rows()
    assert run("apply", *chosen) == 0
    env.assert_record_is_true()
    touched = [n for n in FILES if before[n] != env.snapshot()[n]]
    assert touched
    for name in touched:
        stem = Path(name).stem
        assert not list((env.site / "toy" / "__pycache__").glob(f"{stem}.*"))
        assert any(f"__pycache__/{stem}." in row for row in pristine_rows)
        assert not any(f"toy/__pycache__/{stem}." in row for row in env.rows() if "/neaptide/" not in row)
    assert not [n for n in env.snapshot() if n.startswith("toy/") and "neaptide" in n]
    assert run("status") == 0
    assert run("verify") == 0


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("chosen", [SERIES, SERIES[:1], [SERIES[2], SERIES[1]]], ids=["four", "one", "two"])
def test_revert_restores_everything(
    run: Callable[..., int], env: Environment, chosen: list[tuple[str, ...]], started: bool
) -> None:
    before = env.snapshot()
    for part in chosen:
        assert run("apply", *part) == 0
        if started:
            env.start()
    assert run("revert") == 0
    after = env.snapshot()
    info = f"{env.info.name}/RECORD"
    assert before.pop(info)[:2] == after.pop(info)[:2]  # type: ignore[index]
    assert {n for n in {*before, *after} if before.get(n) != after.get(n)} == set()
    assert run("revert") == 0


@pytest.mark.parametrize("started", [False, True])
def test_record_is_true_after_a_smaller_series(run: Callable[..., int], env: Environment, started: bool) -> None:
    for chosen in ((), ("--patch", "first"), ("--patch", "second")):
        assert run("apply", *chosen) == 0
        if started:
            env.start()
        env.assert_record_is_true()


def test_apply_twice_changes_nothing(run: Callable[..., int], env: Environment) -> None:
    assert run("apply") == 0
    once = env.snapshot()
    assert run("apply") == 0
    assert env.snapshot() == once


@pytest.mark.parametrize("command", [("apply", "--dry-run"), ("revert", "--dry-run"), ("status",), ("verify",)])
def test_what_only_looks_writes_nothing(run: Callable[..., int], env: Environment, command: tuple[str, ...]) -> None:
    pristine = env.snapshot()
    run(*command)
    assert env.snapshot() == pristine
    assert run("apply") == 0
    applied = env.snapshot()
    assert run(*command) == 0
    assert env.snapshot() == applied


@pytest.mark.parametrize("started", [False, True], ids=["as applied", "with new bytecode"])
def test_pip_uninstall_leaves_nothing(run: Callable[..., int], env: Environment, started: bool) -> None:
    assert run("apply") == 0
    if started:
        env.start("import toy.core, toy.other, toy.extra.deep")
        assert list(env.site.glob("toy/__pycache__/core.*.pyc"))
    env.pip("uninstall", "-y", "toy")
    assert not list(env.site.glob("toy*"))


def test_reinstalling_over_an_applied_series_is_pristine(run: Callable[..., int], env: Environment) -> None:
    assert run("apply") == 0
    env.pip("install", "--no-index", "--no-deps", "--force-reinstall", str(make_wheel(env.wheels)))
    assert not (env.info / "neaptide").exists()
    assert (env.site / "toy/core.py").read_text() == FILES["toy/core.py"]
    assert run("apply") == 0
    env.assert_record_is_true()


def test_a_local_version_is_accepted_when_the_bytes_are_equal(run: Callable[..., int], env: Environment) -> None:
    env.install(f"{VERSION}+cu130")
    assert run("apply") == 0
    env.assert_record_is_true()


def test_modes_stay(run: Callable[..., int], env: Environment) -> None:
    core = env.site / "toy/core.py"
    core.chmod(0o640)
    assert run("apply") == 0
    assert core.stat().st_mode & 0o777 == 0o640
    assert run("revert") == 0
    assert core.stat().st_mode & 0o777 == 0o640


def test_a_hard_linked_cache_is_not_written_to(run: Callable[..., int], env: Environment, tmp_path: Path) -> None:
    os.link(env.site / "toy/core.py", tmp_path / "cached.py")
    assert run("apply") == 0
    assert (tmp_path / "cached.py").read_text() == FILES["toy/core.py"]


def test_a_linked_file_is_refused_or_restored_as_a_link(
    run: Callable[..., int], env: Environment, tmp_path: Path
) -> None:
    core = env.site / "toy/core.py"
    shutil.move(core, tmp_path / "core.py")
    core.symlink_to(tmp_path / "core.py")
    if run("apply") == 0:
        assert run("revert") == 0
    assert core.is_symlink()
    assert core.read_text() == FILES["toy/core.py"]


def test_a_relative_interpreter_works(
    repository: ToyRepository, env: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(env.python.parent)
    assert repository.run("apply", "--installed", "--python", "./python") == 0
    assert repository.run("verify", "--installed", "--python", "./python") == 0


def edited(env: Environment) -> str:
    with open(env.site / "toy/core.py", "a") as handle:
        handle.write("# somebody else\n")
    return "core.py"


def blocked(env: Environment) -> str:
    write_files(env.site / "toy/extra", {"deep.py": "MINE = 1\n"})
    return "extra/deep.py"


def missing(env: Environment) -> str:
    (env.site / "toy/other.py").unlink()
    return "other.py"


def editable(env: Environment) -> str:
    direct = {"dir_info": {"editable": True}, "url": "file:///src/toy"}
    (env.info / "direct_url.json").write_text(json.dumps(direct))
    return "editable"


def damaged(env: Environment) -> str:
    (env.info / "direct_url.json").write_text("{")
    return "direct_url.json"


def without_record(env: Environment) -> str:
    (env.info / "RECORD").unlink()
    return "RECORD"


def other_version(env: Environment) -> str:
    env.install("1.2.1")
    return "1.2.1"


def absent(env: Environment) -> str:
    env.clear()
    return "toy is not installed"


WAYS = [edited, blocked, missing, editable, damaged, without_record, other_version, absent]


@pytest.mark.parametrize("spoil", WAYS)
@pytest.mark.parametrize("command", ["apply", "revert"])
def test_refused_by_name_and_nothing_written(
    run: Callable[..., int],
    env: Environment,
    spoil: Callable[[Environment], str],
    command: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = spoil(env)
    before = env.snapshot()
    capsys.readouterr()
    assert run(command) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert name in errors[0]
    assert env.snapshot() == before


@pytest.mark.parametrize("spoil", [edited, missing])
@pytest.mark.parametrize("command", [("apply",), ("apply", "--patch", "first"), ("revert",)], ids="/".join)
def test_a_change_after_apply_is_refused_and_kept(
    run: Callable[..., int], env: Environment, spoil: Callable[[Environment], str], command: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert run("apply") == 0
    name = spoil(env)
    before = env.snapshot()
    assert run("status") == 1
    assert run(*command) == 2
    assert name in capsys.readouterr().err
    assert env.snapshot() == before


def test_a_failing_import_puts_back_what_was_applied_before(
    repository: ToyRepository, run: Callable[..., int], env: Environment
) -> None:
    assert run("apply", "--patch", "first") == 0
    before = {n: v for n, v in env.snapshot().items() if n.startswith("toy/") and n.endswith(".py")}
    repository.add_overlay("extra/bad.py", "raise RuntimeError('on import')\n")
    repository.add_patch("bad", overlay=[{"src": "extra/bad.py", "dest": "extra/bad.py", "mode": "new"}])
    repository.lock()
    assert run("apply") == 5
    after = {n: v for n, v in env.snapshot().items() if n.startswith("toy/") and n.endswith(".py")}
    assert {n: v[1] for n, v in after.items()} == {n: v[1] for n, v in before.items()}  # type: ignore[index]
