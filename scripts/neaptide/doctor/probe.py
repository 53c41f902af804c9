"""Asking an interpreter what it sees, in a process of its own: the tool itself needs no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from neaptide.errors import NeaptideError

CHILD = Path(__file__).with_name("child.py")
SECONDS = 300


@dataclass(frozen=True)
class Probe:
    """What an interpreter sees.

    Attributes:
        torch: ``error`` ("" for none), and with torch ``version``, ``cuda``, ``devices`` and ``peers_refused``.
        cuda_driver: the newest CUDA that the driver serves, "" without one.
        modules: whether each can be found.
        packages: ``folder`` and ``version`` of each, "" for none.
        imports: why each cannot be imported, "" if it can.
        nccl: ``library``, ``error``, ``version``, and the ``missing`` symbols.
    """

    torch: Mapping[str, Any]
    cuda_driver: str = ""
    modules: Mapping[str, bool] = field(default_factory=dict)
    packages: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    imports: Mapping[str, str] = field(default_factory=dict)
    nccl: Mapping[str, Any] = field(default_factory=dict)


def probe(
    python: Path | None = None,
    *,
    modules: Sequence[str] = (),
    packages: Sequence[str] = (),
    imports: Sequence[str] = (),
    symbols: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Probe:
    """What ``python`` (default: this one) sees with ``environment`` (default: this process').

    Raises:
        NeaptideError: it does not run, or does not answer.
    """
    spec = {"imports": imports, "modules": modules, "packages": packages, "symbols": symbols}
    interpreter = str(python or sys.executable)
    env = {**(os.environ if environment is None else environment), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [interpreter, "-W", "ignore", str(CHILD), json.dumps(spec)],
            capture_output=True, text=True, check=False, env=env, cwd=os.path.sep, timeout=SECONDS,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _refuse(interpreter, f"cannot run it ({error})") from error
    marked = [line for line in done.stdout.splitlines() if line.startswith("NEAPTIDE")]
    if not marked:
        raise _refuse(interpreter, f"it ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    return Probe(**json.loads(marked[-1].removeprefix("NEAPTIDE")))


def _refuse(interpreter: str, found: str) -> NeaptideError:
    return NeaptideError(found, wanted="a Python that answers", todo="Check the path.", where=f"--python {interpreter}")
