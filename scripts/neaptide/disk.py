"""Every write that neaptide makes to a target goes through here, so that tests can stop it anywhere.

A file is written beside its place and renamed over it. ``checkpoint`` is called before and
after each change; it does nothing, and a test replaces it to end the process there.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from neaptide.errors import NeaptideError

TEMPORARY_SUFFIX = ".neaptide-tmp"


def _nothing(point: str) -> None:
    """The default checkpoint."""


checkpoint: Callable[[str], None] = _nothing


def check_writable(path: Path | None, where: str) -> None:
    """Refuse a file that could not be written, before the work that it is for.

    Args:
        where: the option that names it.
    """
    if path is None:
        return
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    try:
        if path.is_dir():
            raise IsADirectoryError(0, "it is a folder")
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise NeaptideError(
            f"{path}: {error.strerror}", wanted="a place where a file can be written", todo="Choose another.",
            where=where,
        ) from error  # fmt: skip


def write_bytes(path: Path, data: bytes, *, mode: int | None = None) -> None:
    """Replace ``path`` with ``data`` in one step; its directory is made if needed."""
    checkpoint(f"write {path.name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    if mode is None:
        mode = path.stat().st_mode & 0o7777 if path.exists() else 0o644
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    with open(temporary, "wb") as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())
    os.chmod(temporary, mode)
    checkpoint(f"rename {path.name}")
    os.replace(temporary, path)
    checkpoint(f"written {path.name}")


def remove(path: Path) -> None:
    """Remove a file if it is there, and a temporary file that an interrupted write left beside it."""
    checkpoint(f"remove {path.name}")
    path.with_name(path.name + TEMPORARY_SUFFIX).unlink(missing_ok=True)
    path.unlink(missing_ok=True)
    checkpoint(f"removed {path.name}")


def remove_tree(path: Path) -> None:
    checkpoint(f"remove tree {path.name}")
    if path.exists():
        shutil.rmtree(path)
    checkpoint(f"removed tree {path.name}")


def sweep(folder: Path) -> None:
    """Remove temporary files that interrupted writes left anywhere below ``folder``."""
    for file in folder.rglob(f"*{TEMPORARY_SUFFIX}") if folder.is_dir() else ():
        file.unlink(missing_ok=True)


def prune_empty(directory: Path, stop: Path) -> None:
    """Remove empty directories from ``directory`` up to, not including, ``stop``."""
    while directory != stop and stop in directory.parents:
        try:
            directory.rmdir()
        except OSError:
            return
        directory = directory.parent


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold ``folder`` against a second neaptide on the same target; leaves no file behind."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        raise NeaptideError(
            "another neaptide is at work on this target", wanted="the target to itself",
            todo="Wait for it to end.", where=str(folder),
        ) from error  # fmt: skip
    try:
        yield
    finally:
        os.close(handle)
