"""An installed distribution as a target: RECORD kept true, every original kept beside the metadata.

Everything of ours lies in ``*.dist-info/neaptide/``, never inside the package. Order of a write:
originals and new contents are staged there, the journal is written, then files, stale bytecode, RECORD and
record follow, and the journal goes. With a journal on disk a recovery goes forward; without one nothing of the
package has changed yet.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from neaptide import disk, jsonfile
from neaptide.distribution import Installation
from neaptide.errors import NeaptideError
from neaptide.originals import Originals
from neaptide.outcomes import Plan, Reader
from neaptide.pins import Pin, TargetLock, TargetPin
from neaptide.places import (
    LOCK_NAME,
    Accepted,
    Record,
    State,
    bytes_of,
    file_hashes,
    load_record,
    patch_rows,
    sha256,
)
from neaptide.recordfile import RecordFile

# What becomes of a touched file: new bytes from the staging folder, its kept original, or nothing.
STAGED, ORIGINAL, ABSENT = "staged", "original", "absent"


class InstalledPlace:
    """One installed distribution of a pinned package."""

    def __init__(
        self, found: Installation, target: str, pin: Pin, artefact: TargetPin, lock: TargetLock | None
    ) -> None:
        self.target, self.pin, self.artefact, self._lock = target, pin, artefact, lock
        self.site, self.info = found.site, found.info
        self.label = f"{artefact.package} in {self.site}"
        self.package = self.site / artefact.package
        self.folder = self.info / "neaptide"
        self.journal = self.folder / "journal.json"
        self.staged = self.folder / "staged"
        self.originals = Originals(self.folder / "pristine", self.site, self.package)

    def _refuse(self, found: str, wanted: str, todo: str) -> NeaptideError:
        return NeaptideError(found, wanted=wanted, todo=todo, where=self.label)

    # What is there

    def lock(self) -> AbstractContextManager[None]:
        return disk.exclusive(self.info)

    def record(self) -> Record | None:
        return load_record(self.folder / LOCK_NAME)

    def accepted(self) -> Accepted:
        return frozenset()

    def state(self) -> State:
        record = self.record()
        if self.journal.exists() or self.staged.exists() or (record is None and self.folder.exists()):
            return State.INTERRUPTED
        if record is None:
            return State.MODIFIED if self._foreign(self._pin_hashes()) else State.PRISTINE
        after = {path: hashes["after"] for path, hashes in record.files.items()}
        return State.MODIFIED if self._foreign(after) else State.APPLIED

    def _pin_hashes(self) -> Mapping[str, str | None]:
        return self._lock.before if self._lock else {}

    def _foreign(self, wanted: Mapping[str, str | None]) -> list[str]:
        return [p for p, value in sorted(wanted.items()) if sha256(self._current(p)) != value]

    def _current(self, path: str) -> bytes | None:
        return bytes_of(self.package / path)

    def read(self, path: str) -> bytes | None:
        """Pristine bytes: the kept original of a file that the series touches, else the file itself."""
        record = self.record()
        if record is not None and path in record.files:
            return self.originals.read(path)
        return self._current(path)

    def reader(self) -> Reader:
        return self.read

    def modules(self) -> dict[str, bytes]:
        """All Python files of the pristine package, by path inside it."""
        names = [f.relative_to(self.package).as_posix() for f in sorted(self.package.rglob("*.py"))]
        return {name: data for name in names if (data := self.read(name)) is not None}

    def package_parent(self) -> Path:
        return self.site

    def altered(self) -> list[str]:
        """Files that are neither the pin's nor ours."""
        record = self.record()
        ours = {p: h["after"] for p, h in record.files.items()} if record else {}
        return self._foreign({**self._pin_hashes(), **ours})

    def require_clean(self) -> None:
        """Refuse, by name, files that are neither the pin's nor ours."""
        if foreign := self.altered():
            raise self._refuse(
                f"{', '.join(foreign)} changed by somebody else", f"the bytes of {self.artefact.described}",
                "Reinstall the package, then run again.",
            )  # fmt: skip

    # Writing

    def precheck(self, plan: Plan) -> None:
        """Refuse, before anything is written anywhere, files that are links or not the pin's own."""
        self.require_clean()
        pinned = self._pin_hashes()
        for path in plan.files:
            file = self.package / path
            if any(p.is_symlink() for p in (file, *file.parents) if self.package in p.parents):
                raise self._refuse(
                    f"{path} is reached through a link", "plain files", "Reinstall with copies (uv: --link-mode copy)."
                )
            if path not in pinned or sha256(self.read(path)) != pinned[path]:
                raise self._refuse(
                    f"{path} is not the pin's own file", "the sha256 that the pin's lock holds",
                    "Reinstall the package, or record the pin anew with `neaptide pins --lock`.",
                )  # fmt: skip

    def write(self, plan: Plan, accepted: Accepted) -> bool:
        """Bring the package to the plan's files; False if exactly that is there already."""
        record = Record(
            pin=self.pin.name, target=self.target, base={}, result={}, patches=patch_rows(plan),
            artefact={"package": self.artefact.package, "version": self.artefact.version},
            files=file_hashes(plan), accepted=accepted,
        )  # fmt: skip
        if record == self.record():
            return False
        self.precheck(plan)
        self._change(plan.files, record)
        return True

    def revert(self) -> bool:
        """Every byte as it was before the first apply, RECORD and bytecode included."""
        if self.record() is None:
            return False
        self.require_clean()
        self._change({}, None)
        return True

    def undo_point(self) -> Callable[[], None]:
        """A function that comes back to the present state."""
        record = self.record()
        paths = record.files if record is not None else ()
        files = {p: data for p in paths if (data := self._current(p)) is not None}
        return lambda: self._change(files, record)

    def _change(self, files: Mapping[str, bytes], record: Record | None) -> None:
        """Make ``files`` the touched files of the package and ``record`` what is known of them."""
        known = self.record()
        before = set(known.files) if known else set()
        disk.checkpoint("staging")
        self.staged.mkdir(parents=True, exist_ok=True)
        self.originals.keep_record(self.info / "RECORD")
        for path in sorted(set(files) - before):
            self.originals.keep(path)
        for path, data in files.items():
            disk.write_bytes(self.staged / path, data)
        paths = {p: self._step(p, files) for p in sorted(before | set(files))}
        journal = {"paths": paths, "record": record.as_dict() if record else None, "written": False}
        disk.write_bytes(self.journal, jsonfile.encode(journal))
        self._carry_out()

    def _step(self, path: str, files: Mapping[str, bytes]) -> dict[str, str | None]:
        """What becomes of one file, with the hashes before and after that a recovery checks."""
        after = files[path] if path in files else self.originals.read(path)
        how = STAGED if path in files else ABSENT if after is None else ORIGINAL
        return {"after": sha256(after), "before": sha256(self._current(path)), "how": how}

    def _carry_out(self) -> None:
        """Bring the package to what the journal says; may run again after any interruption."""
        journal = jsonfile.read(self.journal, _checked_journal)
        if not journal["written"]:
            for path, step in journal["paths"].items():
                self._place_file(path, step["how"])
            if journal["record"] is None:
                self.originals.put_back_record(self.info / "RECORD")
            else:
                self._write_metadata(journal["record"])
            disk.write_bytes(self.journal, jsonfile.encode({**journal, "written": True}))
        self._clear(journal["record"]["files"] if journal["record"] is not None else None)

    def _place_file(self, path: str, how: str) -> None:
        file = self.package / path
        self.originals.remove_bytecode(path)
        if how == STAGED:
            disk.write_bytes(file, (self.staged / path).read_bytes())
        elif how == ORIGINAL:
            self.originals.put_back(path)
        else:
            disk.remove(file)
            disk.prune_empty(file.parent / "__pycache__", self.site)
            disk.prune_empty(file.parent, self.site)

    def _write_metadata(self, record: Mapping[str, Any]) -> None:
        """The record, and RECORD with true rows for every touched file and every file of ours."""
        disk.write_bytes(self.folder / LOCK_NAME, jsonfile.encode(record))
        rows = RecordFile(self.originals.record_bytes())
        for path in record["files"]:
            inside = f"{self.artefact.package}/{path}"
            rows.set(inside, (self.package / path).read_bytes())
            rows.drop_bytecode(inside)
        for file in [self.folder / LOCK_NAME, *self.originals.files_of(record["files"])]:
            rows.set(file.relative_to(self.site).as_posix(), file.read_bytes())
        disk.write_bytes(self.info / "RECORD", rows.encode())

    def _clear(self, touched: Collection[str] | None) -> None:
        """Take away all but the originals of ``touched`` files; None: all of ours.

        The staging folder marks the work unfinished until the end.
        """
        if touched is None:
            disk.remove(self.folder / LOCK_NAME)
            self.originals.remove()
        else:
            self.originals.drop_all_but(touched)
        disk.remove(self.journal)
        disk.remove_tree(self.staged)
        disk.prune_empty(self.folder, self.info)

    def recover(self) -> str:
        """Finish an interrupted write, or clear what was staged before it began."""
        disk.sweep(self.folder)
        record = self.record()
        if self.journal.exists():
            self._check_interrupted()
            self._carry_out()
            return f"{self.label}: recovered an interrupted write (finished)"
        if self.staged.exists() or (record is None and self.folder.exists()):
            self._clear(record.files if record is not None else None)
            return f"{self.label}: recovered an interrupted write (undone)"
        return ""

    def _check_interrupted(self) -> None:
        """A file that is neither as before nor as after was changed by somebody else: refuse."""
        journal = jsonfile.read(self.journal, _checked_journal)
        for path, step in journal["paths"].items():
            if sha256(self._current(path)) not in (step["before"], step["after"]):
                raise self._refuse(
                    f"{path} was changed after an interrupted write", "its bytes as before or as after that write",
                    "Put its bytes back, or reinstall the package.",
                )  # fmt: skip


def _checked_journal(data: Any) -> dict[str, Any]:
    paths = {path: {key: step[key] for key in ("after", "before", "how")} for path, step in data["paths"].items()}
    return {"paths": paths, "record": data["record"], "written": bool(data["written"])}
