"""The real upstreams of the pins: names, trees, and running Python on them."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from neaptide.model import Patch
from neaptide.pins import load_pin
from neaptide.series import applies_to, load_series

ROOT = Path(__file__).resolve().parents[2]
PINS = ("current", "r12")
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_TARGET_DEVICE": "empty",
}  # fmt: skip


@dataclass(frozen=True)
class Trees:
    """One pin: ``patched`` and ``pristine`` hold a folder for each target."""

    pin: str
    patched: Path
    pristine: Path


def patches_of(pin: str) -> list[Patch]:
    """All patches that have something to do at a pin."""
    targets = load_pin(ROOT, pin).targets
    return [p for t, a in sorted(targets.items()) for p in load_series(ROOT, t) if applies_to(p, a.version)]


def run_python(arguments: list[str], tree: Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run this interpreter with a tree first on its path."""
    path = os.pathsep.join([str(tree), str(ROOT / "tests" / "upstream")])
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
