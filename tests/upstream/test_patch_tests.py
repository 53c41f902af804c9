"""The test of every patch fails on the pristine tree and passes on the patched one."""

from __future__ import annotations

import shlex

import pytest
from real import PINS, Trees, patches_of, run_python

CASES = [pytest.param(pin, patch, id=f"{pin}-{patch.target}-{patch.name}") for pin in PINS for patch in patches_of(pin)]


@pytest.mark.parametrize(("pin", "patch"), CASES)
def test_fails_pristine_and_passes_patched(trees: dict[str, Trees], pin: str, patch) -> None:  # type: ignore[no-untyped-def]
    program, *arguments = shlex.split(patch.header.test)
    assert program == "python"
    arguments += ["-p", "no:cacheprovider"]
    patched = run_python(arguments, trees[pin].patched / patch.target)
    assert patched.returncode == 0, patched.stdout + patched.stderr
    # The first failure is enough.
    pristine = run_python([*arguments, "-x"], trees[pin].pristine / patch.target)
    assert pristine.returncode == 1, f"wanted failing tests, not {pristine.returncode}:\n{pristine.stdout}"
    assert " failed" in pristine.stdout.splitlines()[-1]
    assert " error" not in pristine.stdout.splitlines()[-1]
