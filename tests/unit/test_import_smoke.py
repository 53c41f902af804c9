"""The import smoke: what is a failed patch, and what is a machine that lacks something."""

from __future__ import annotations

from pathlib import Path

import pytest
from toy import PACKAGE, ToyRepository

NATIVE = {
    "toy/native.py": 'raise ImportError("needs an extension that is not built")\n',
    "toy/user.py": "from toy import native\n\nUSED = native\n",
    # Of a name that a patch may have taken away.
    "toy/late.py": "from toy.core import no_such_name\n\nUSED = no_such_name\n",
}
EDIT = {"file": "user.py", "symbol": "<module>", "import": "import math"}


def repository(folder: Path, **overlay: str) -> ToyRepository:
    """A toy whose patch touches a module that upstream itself cannot load, with overlay modules beside it."""
    made = ToyRepository(folder, {**PACKAGE, **NATIVE})
    files = {f"{name}.py": text for name, text in overlay.items()}
    for name, text in files.items():
        made.add_overlay(name, text)
    made.add_patch("user", EDIT, overlay=[{"src": name, "dest": name, "mode": "new"} for name in files])
    return made


def test_a_module_that_does_not_load_on_this_machine_is_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert repository(tmp_path, fine="X = 1\n").run("apply") == 0
    said = "".join(capsys.readouterr())
    assert "toy.user (does not load on this machine: ImportError: needs an extension that is not built)" in said
    assert "imported toy.fine" in said


@pytest.mark.parametrize(
    "text",
    [
        'raise ImportError("our own")\n',
        "from toy.core import no_such_name\n",
        "import toy.late\n",
        "import toy.no_such_module\n",
        "raise OSError\n",
    ],
)
def test_a_module_of_ours_that_does_not_load_is_a_failed_patch(tmp_path: Path, text: str) -> None:
    assert repository(tmp_path, bad=text).run("apply") == 5
