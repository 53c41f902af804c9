"""Kept originals of an installed package: touched files, their bytecode, and RECORD.

They lie in ``*.dist-info/neaptide/pristine`` under names that nothing compiles or imports, with
mode and modification time, so that what is put back is exactly what was there.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from neaptide import disk


def _copy(source: Path, destination: Path) -> None:
    """Copy a file with its mode and modification time."""
    status = source.stat()
    disk.write_bytes(destination, source.read_bytes(), mode=status.st_mode & 0o7777)
    os.utime(destination, ns=(status.st_atime_ns, status.st_mtime_ns))


class Originals:
    """The folder ``folder`` of originals of ``package``, which lies in ``site``."""

    def __init__(self, folder: Path, site: Path, package: Path) -> None:
        self.folder, self._site, self._package = folder, site, package
        self._record = folder / "RECORD"

    def _file(self, path: str) -> Path:
        return self.folder / "files" / f"{path}.orig"

    def _bytecode_folder(self, path: str) -> Path:
        return self.folder / "bytecode" / path

    def bytecode(self, path: str) -> list[Path]:
        """Compiled forms of a module in the package, for every interpreter."""
        file = self._package / path
        return sorted((file.parent / "__pycache__").glob(f"{file.stem}.*.pyc")) if file.suffix == ".py" else []

    def remove_bytecode(self, path: str) -> None:
        for file in self.bytecode(path):
            disk.remove(file)

    def read(self, path: str) -> bytes | None:
        kept = self._file(path)
        return kept.read_bytes() if kept.is_file() else None

    def keep(self, path: str) -> None:
        """Keep a file of the package and its bytecode; nothing for a file that is not there."""
        if (self._package / path).is_file():
            _copy(self._package / path, self._file(path))
        for file in self.bytecode(path):
            _copy(file, self._bytecode_folder(path) / f"{file.name}.orig")

    def put_back(self, path: str) -> None:
        file = self._package / path
        _copy(self._file(path), file)
        for kept in sorted(self._bytecode_folder(path).glob("*.orig")):
            _copy(kept, file.parent / "__pycache__" / kept.name.removesuffix(".orig"))

    def keep_record(self, record: Path) -> None:
        """Keep RECORD as it is, once."""
        if not self._record.exists():
            _copy(record, self._record)

    def put_back_record(self, record: Path) -> None:
        _copy(self._record, record)

    def record_bytes(self) -> bytes:
        return self._record.read_bytes()

    def files_of(self, paths: Collection[str]) -> list[Path]:
        """All that is kept for the given files of the package, RECORD included."""
        wanted = {self._record, *(self._file(path) for path in paths)}
        folders = {self._bytecode_folder(path) for path in paths}
        return [f for f in sorted(self.folder.rglob("*")) if f.is_file() and (f in wanted or f.parent in folders)]

    def drop_all_but(self, paths: Collection[str]) -> None:
        """Forget originals of files that are no longer touched."""
        kept = set(self.files_of(paths))
        for file in sorted(self.folder.rglob("*")):
            if file.is_file() and file not in kept:
                disk.remove(file)
        for folder in sorted((f for f in self.folder.rglob("*") if f.is_dir()), reverse=True):
            disk.prune_empty(folder, self.folder)

    def remove(self) -> None:
        disk.remove_tree(self.folder)
