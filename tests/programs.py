"""The image's programs and the Dockerfile that calls them, run and read by tests; and stand-ins for other programs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMAGE = ROOT / "scripts" / "image"
SCRIPTS = sorted(p for p in IMAGE.iterdir() if p.is_file() and p.suffix != ".py")
BUILD = ROOT / "scripts" / "build-image"
Done = subprocess.CompletedProcess[str]


def run(script: Path, *arguments: str | Path, path: Path | None = None, **variables: str) -> Done:
    """Run a script; ``path`` comes first on PATH, behind it this interpreter's folder."""
    folders = [*([str(path)] if path else []), str(Path(sys.executable).parent), os.environ["PATH"]]
    return subprocess.run(
        [str(script), *map(str, arguments)], env={**os.environ, "PATH": os.pathsep.join(folders), **variables},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def command(folder: Path, name: str, code: str) -> Path:
    """A Python program called ``name`` in ``folder``, which is returned."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!{sys.executable}\n{code}")
    (folder / name).chmod(0o755)
    return folder


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions in order, with their text on one line."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(i.split(None, 1)[0], i.split(None, 1)[1]) for i in joined.splitlines() if i.strip()]
