"""A patched view of an installed vLLM: links to its files, but for those that the series changes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def make_view(package: Path, files: Mapping[str, bytes], folder: Path) -> Path:
    """Make ``folder/NAME`` look like ``package`` with ``files`` in place of its own.

    Folders that hold no changed file are linked whole. Nothing of the installed package is touched.

    Args:
        package: the installed package's folder.
        files: new contents, by path inside the package.
        folder: an empty folder; put it first on PYTHONPATH.

    Returns:
        The view's package folder.
    """
    top = folder / package.name
    real = {parent for path in files for parent in Path(path).parents}
    for directory in sorted(real | {Path(".")}):
        (top / directory).mkdir(parents=True, exist_ok=True)
        for entry in sorted((package / directory).iterdir()) if (package / directory).is_dir() else ():
            inside = directory / entry.name
            if inside not in real and inside.as_posix() not in files and entry.name != "__pycache__":
                os.symlink(entry, top / inside)
    for path, data in files.items():
        (top / path).write_bytes(data)
    return top
