"""An installed distribution as a target: RECORD kept true, every original kept beside the metadata.

Everything of ours lies in ``*.dist-info/neaptide/``, never inside the package. Order of a write:
originals and new contents are staged there, the journal is written, then files, stale bytecode, RECORD and
record follow, and the journal goes. With a journal on disk a recovery goes forward; without one nothing of the
package has changed yet.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from neaptide import disk, jsonfile
from neaptide.errors import ExitCode, NeaptideError
from neaptide.outcomes import Plan, Reader
from neaptide.pins import Pin, TargetLock, TargetPin
from neaptide.places import (
    LOCK_NAME,
    Accepted,
    Record,
    State,
    file_hashes,
    load_record,
    patch_rows,
    sha256,
)
from neaptide.recordfile import RecordFile


def search_path(python: Path | None) -> list[str]:
    """Where distributions are looked for: this interpreter's path, or another one's."""
    if python is None:
        return sys.path
    code = "import json, sys; print(json.dumps(sys.path))"
    try:
        done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise NeaptideError(
            f"cannot run it ({error})",
            wanted="a Python interpreter",
            todo="Check the path.",
            where=f"--python {python}",
        ) from error
    return [p for p in json.loads(done.stdout) if p]


def find_distribution(package: str, path: list[str]) -> importlib.metadata.Distribution | None:
    return next(iter(importlib.metadata.distributions(name=package, path=path)), None)


class InstalledPlace:
    """One installed distribution of a pinned package."""

    def __init__(
        self,
        distribution: importlib.metadata.Distribution,
        target: str,
        pin: Pin,
        artefact: TargetPin,
        lock: TargetLock | None,
    ) -> None:
        self.target, self.pin, self.artefact, self._lock = target, pin, artefact, lock
        self.site = Path(str(distribution.locate_file("")))
        self.label = f"{artefact.package} in {self.site}"
        self._check_version(distribution.version)
        self._check_editable(distribution)
        self.info = self._metadata_folder(distribution)
        self.folder = self.info / "neaptide"
        self.journal = self.folder / "journal.json"
        self.staged = self.folder / "staged"
        self.originals = self.folder / "pristine"

    def _refuse(self, found: str, wanted: str, todo: str, code: ExitCode = ExitCode.BAD_INPUT) -> NeaptideError:
        return NeaptideError(found, wanted=wanted, todo=todo, where=self.label, code=code)

    def _check_version(self, version: str) -> None:
        try:
            public = Version(version).public
        except InvalidVersion:
            public = version
        if public != self.artefact.version:
            raise self._refuse(
                f"version {version} is installed", f"{self.artefact.version}, which the pin {self.pin.name} names",
                "Install that version, or choose the pin that fits with --pin.",
            )  # fmt: skip

    def _check_editable(self, distribution: importlib.metadata.Distribution) -> None:
        text = distribution.read_text("direct_url.json")
        editable = bool(text) and json.loads(text or "{}").get("dir_info", {}).get("editable", False)
        if editable or not (self.site / self.artefact.package / "__init__.py").is_file():
            raise self._refuse(
                "an editable installation", "a distribution whose files lie in site-packages",
                "Use --checkout TARGET=DIR for a source checkout.",
            )  # fmt: skip

    def _metadata_folder(self, distribution: importlib.metadata.Distribution) -> Path:
        for file in distribution.files or []:
            if file.name == "RECORD" and file.parent.name.endswith(".dist-info"):
                return Path(str(distribution.locate_file(file.parent)))
        raise self._refuse("no RECORD", "a distribution that pip or uv installed", "Install it from a wheel.")

    # What is there

    def lock(self) -> AbstractContextManager[None]:
        return disk.exclusive(self.info)

    def record(self) -> Record | None:
        return load_record(self.folder / LOCK_NAME)

    def accepted(self) -> Accepted:
        return frozenset()

    def state(self) -> State:
        if self.journal.exists() or self.staged.exists():
            return State.INTERRUPTED
        record = self.record()
        if record is None:
            return State.MODIFIED if self._foreign(self._pin_hashes()) else State.PRISTINE
        after = {path: hashes["after"] for path, hashes in record.files.items()}
        return State.MODIFIED if self._foreign(after) else State.APPLIED

    def _pin_hashes(self) -> Mapping[str, str | None]:
        return self._lock.before if self._lock else {}

    def _foreign(self, wanted: Mapping[str, str | None]) -> list[str]:
        return [p for p, value in sorted(wanted.items()) if sha256(self._current(p)) != value]

    def _file(self, path: str) -> Path:
        return self.site / self.artefact.package / path

    def _current(self, path: str) -> bytes | None:
        file = self._file(path)
        return file.read_bytes() if file.is_file() else None

    def read(self, path: str) -> bytes | None:
        """Pristine bytes: the kept original of a file that the series touches, else the file itself."""
        record = self.record()
        if record is not None and path in record.files:
            kept = self._kept(path)
            return kept.read_bytes() if kept.is_file() else None
        return self._current(path)

    def reader(self) -> Reader:
        return self.read

    def _kept(self, path: str) -> Path:
        """Where the original of a touched file is kept; not named ``.py``, so that nothing compiles it."""
        return self.originals / f"{path}.orig"

    def modules(self) -> dict[str, bytes]:
        top = self.site / self.artefact.package
        out = {}
        for file in sorted(top.rglob("*.py")):
            path = file.relative_to(top).as_posix()
            data = self.read(path)
            if data is not None:
                out[path] = data
        return out

    def package_parent(self) -> Path:
        return self.site

    def require_clean(self) -> None:
        """Refuse, by name, files that are neither the pin's nor ours."""
        record = self.record()
        ours = {p: h["after"] for p, h in record.files.items()} if record else {}
        foreign = self._foreign({**self._pin_hashes(), **ours})
        if foreign:
            raise self._refuse(
                f"{', '.join(foreign)} changed by somebody else", f"the bytes of {self.artefact.described}",
                "Reinstall the package, then run again.",
            )  # fmt: skip

    # Writing

    def write(self, plan: Plan, accepted: Accepted) -> bool:
        """Bring the package to the plan's files; False if exactly that is there already."""
        self.require_clean()
        record = Record(
            pin=self.pin.name, target=self.target, base={}, result={}, patches=patch_rows(plan),
            artefact={"package": self.artefact.package, "version": self.artefact.version},
            files=file_hashes(plan), accepted=accepted,
        )  # fmt: skip
        known = self.record()
        if record == known:
            return False
        self._check_pinned(plan)
        wanted: dict[str, bytes | None] = dict(plan.files)
        for path in known.files if known else ():
            wanted.setdefault(path, self.read(path))
        self._stage(wanted, set(plan.files) - set(known.files if known else ()), record)
        self._carry_out()
        return True

    def _check_pinned(self, plan: Plan) -> None:
        pinned = self._pin_hashes()
        for path in plan.files:
            if path not in pinned or sha256(self.read(path)) != pinned[path]:
                raise self._refuse(
                    f"{path} is not the pin's own file", "the sha256 that the pin's lock holds",
                    "Reinstall the package, or record the pin anew with `neaptide pins --lock`.",
                )  # fmt: skip

    def revert(self) -> bool:
        """Every byte as it was before the first apply, RECORD and bytecode included."""
        record = self.record()
        if record is None:
            return False
        self.require_clean()
        self._stage({path: self.read(path) for path in record.files}, set(), None)
        self._carry_out()
        return True

    def _stage(self, wanted: Mapping[str, bytes | None], fresh: set[str], record: Record | None) -> None:
        """New contents, originals of ``fresh`` paths and RECORD; then the journal that makes them count."""
        disk.checkpoint("staging")
        self.staged.mkdir(parents=True, exist_ok=True)
        if not (self.originals / "RECORD").exists():
            disk.write_bytes(self.originals / "RECORD", (self.info / "RECORD").read_bytes())
        for path in sorted(fresh):
            if self._file(path).is_file():
                self._keep(self._file(path), self._kept(path))
            for file in self._bytecode(path):
                self._keep(file, self.originals / "bytecode" / file.relative_to(self.site))
        for path, data in wanted.items():
            if data is not None:
                disk.write_bytes(self.staged / path, data)
        journal = {
            "paths": {p: data is not None for p, data in wanted.items()},
            "record": record.as_dict() if record else None, "written": False,
        }  # fmt: skip
        disk.write_bytes(self.journal, jsonfile.encode(journal))

    def _keep(self, file: Path, kept: Path) -> None:
        """Copy a file with its mode and modification time."""
        status = file.stat()
        disk.write_bytes(kept, file.read_bytes(), mode=status.st_mode & 0o7777)
        os.utime(kept, ns=(status.st_atime_ns, status.st_mtime_ns))

    def _put_back(self, kept: Path, file: Path) -> None:
        status = kept.stat()
        disk.write_bytes(file, kept.read_bytes(), mode=status.st_mode & 0o7777)
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))

    def _bytecode(self, path: str) -> list[Path]:
        file = self._file(path)
        return sorted((file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"))

    def _carry_out(self) -> None:
        """Bring the package to what the journal says; may run again after any interruption."""
        journal = jsonfile.read(self.journal)
        if not journal["written"]:
            for path, present in journal["paths"].items():
                self._place_file(path, present, reverting=journal["record"] is None)
            if journal["record"] is None:
                self._restore_metadata()
            else:
                self._write_metadata(journal["record"])
            disk.write_bytes(self.journal, jsonfile.encode({**journal, "written": True}))
        self._clear(keep_record=journal["record"] is not None)

    def _place_file(self, path: str, present: bool, *, reverting: bool) -> None:
        file = self._file(path)
        for stale in self._bytecode(path):
            disk.remove(stale)
        if present and reverting:
            self._put_back(self._kept(path), file)
        elif present:
            disk.write_bytes(file, (self.staged / path).read_bytes())
        else:
            disk.remove(file)
            disk.prune_empty(file.parent / "__pycache__", self.site)
            disk.prune_empty(file.parent, self.site)

    def _clear(self, *, keep_record: bool) -> None:
        disk.remove_tree(self.staged)
        if not keep_record:
            disk.remove(self.folder / LOCK_NAME)
            disk.remove_tree(self.originals)
        disk.remove(self.journal)
        disk.prune_empty(self.folder, self.info)

    def _write_metadata(self, record: Mapping[str, Any]) -> None:
        disk.write_bytes(self.folder / LOCK_NAME, jsonfile.encode(record))
        self._drop_stale_originals(record["files"])
        rows = RecordFile((self.originals / "RECORD").read_bytes())
        for path in record["files"]:
            rows.set(f"{self.artefact.package}/{path}", self._file(path).read_bytes())
        for name in self._bytecode_rows(rows, record["files"]):
            rows.drop(name)
        for file in [self.folder / LOCK_NAME, *self._kept_files()]:
            rows.set(file.relative_to(self.site).as_posix(), file.read_bytes())
        disk.write_bytes(self.info / "RECORD", rows.encode())

    def _kept_files(self) -> list[Path]:
        return [f for f in sorted(self.originals.rglob("*")) if f.is_file()]

    def _drop_stale_originals(self, files: Iterable[str]) -> None:
        """Originals of files that the series no longer touches."""
        wanted = {self._kept(path) for path in files}
        for file in self._kept_files():
            if file.suffix == ".orig" and file not in wanted:
                disk.remove(file)
                disk.prune_empty(file.parent, self.originals)

    def _bytecode_rows(self, rows: RecordFile, files: Iterable[str]) -> list[str]:
        """RECORD rows of the bytecode of touched files, for every interpreter tag."""
        out = []
        for path in files:
            parent, _, name = f"{self.artefact.package}/{path}".rpartition("/")
            prefix = f"{parent}/__pycache__/{name.removesuffix('.py')}."
            out += [n for n in rows.names() if n.startswith(prefix) and n.endswith(".pyc")]
        return out

    def _restore_metadata(self) -> None:
        kept = self.originals / "bytecode"
        for file in self._kept_files():
            if kept in file.parents:
                self._put_back(file, self.site / file.relative_to(kept))
        disk.write_bytes(self.info / "RECORD", (self.originals / "RECORD").read_bytes())

    def recover(self) -> str:
        """Finish an interrupted write, or clear what was staged before it began."""
        if self.journal.exists():
            self._carry_out()
            return f"{self.label}: recovered an interrupted write (finished)"
        if self.staged.exists():
            record = self.record()
            if record is not None:
                self._drop_stale_originals(record.files)
            self._clear(keep_record=record is not None)
            return f"{self.label}: recovered an interrupted write (undone)"
        return ""
