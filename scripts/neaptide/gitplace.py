"""A git work tree as a target: one commit a patch, the ref moved once, recoverable at any point.

Order of a write: objects (unreferenced, harmless), journal, work-tree files, index, ref, record,
journal removed. Until the ref has moved a recovery goes back, afterwards it goes forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from neaptide import disk, jsonfile
from neaptide.declared import declared_version
from neaptide.errors import NeaptideError
from neaptide.git import Repo
from neaptide.outcomes import PatchPlan, Plan, Reader
from neaptide.pins import Pin, TargetPin
from neaptide.places import (
    LOCK_NAME,
    Accepted,
    Record,
    State,
    file_hashes,
    listed,
    load_record,
    patch_rows,
)


def commit_message(patch: PatchPlan) -> str:
    """Subject, the patch's description, and its identity as trailers."""
    header = patch.patch.header
    return (
        f"{patch.patch.id}: {header.title}\n\n{header.description.strip()}\n\n"
        f"Origin: {header.origin}\nForwarded: {header.forwarded}\nNeaptide-Patch: {patch.patch.digest}\n"
    )


class GitPlace:
    """A work tree whose HEAD is upstream's, or upstream's with the series on top."""

    def __init__(self, top: Path, target: str, pin: Pin, artefact: TargetPin) -> None:
        self.top, self.target, self.pin, self.artefact = top, target, pin, artefact
        self.label = f"{target} in {top}"
        if not top.is_dir():
            raise self._refuse("no such folder", "a git checkout of the package", "Check the path.")
        self.repo = Repo(top)
        if not self.repo.is_top():
            raise self._refuse("not the top of a git work tree", "a git checkout", "Give its top folder.")
        if not self.repo.head():
            raise self._refuse("the repository has no commit", "upstream's commit at HEAD", "Check it out.")
        if not (top / artefact.package).is_dir():
            raise self._refuse(
                f"no folder {artefact.package}/", f"the package of the pin ({artefact.described})",
                "Choose the pin that fits with --pin.",
            )  # fmt: skip
        self.folder = self.repo.path("neaptide")
        self.journal = self.folder / "journal.json"

    def _refuse(self, found: str, wanted: str, todo: str) -> NeaptideError:
        return NeaptideError(found, wanted=wanted, todo=todo, where=self.label)

    # What is there

    def lock(self) -> AbstractContextManager[None]:
        return disk.exclusive(self.folder)

    def record(self) -> Record | None:
        return load_record(self.folder / LOCK_NAME)

    def accepted(self) -> Accepted:
        record = self.record()
        return record.accepted if record else frozenset()

    def state(self) -> State:
        if self.journal.exists():
            return State.INTERRUPTED
        record, head = self.record(), self.repo.head()
        dirty = bool(self.repo.dirty())
        if record is None or not record.patches or head != record.result["commit"]:
            if record is not None and self._built_on(record, head):
                return State.MODIFIED
            return State.MODIFIED if dirty else State.PRISTINE
        return State.MODIFIED if dirty else State.APPLIED

    def _built_on(self, record: Record, head: str) -> bool:
        """Whether HEAD holds commits of the series without being exactly its end."""
        commits = [p["commit"] for p in record.patches if p.get("commit")]
        if not commits or head == record.result["commit"]:
            return False
        return self.repo.exists(commits[0]) and self.repo.is_ancestor(commits[0], head)

    def base(self) -> str:
        """The commit that the series stands on, or would stand on."""
        record, head = self.record(), self.repo.head()
        if record is not None and record.patches and head == record.result["commit"]:
            return record.base["commit"]
        if record is not None and self._built_on(record, head):
            raise self._refuse(
                f"HEAD {head[:12]} has other commits on, or only some of, the series",
                f"HEAD at the series' end {record.result['commit'][:12]} or at its base {record.base['commit'][:12]}",
                "Move HEAD to one of the two.",
            )  # fmt: skip
        return head

    def check_version(self) -> None:
        """Refuse a checkout that declares another version than the pin's; eras are chosen by it.

        Raises:
            NeaptideError: PKG-INFO or pyproject.toml name another version. A checkout that declares none is taken.
        """
        found = declared_version(self.repo.blob("HEAD", "PKG-INFO"), self.repo.blob("HEAD", "pyproject.toml"))
        if found and found != self.artefact.version:
            raise self._refuse(
                f"the checkout declares version {found}", f"{self.artefact.version}, as in the pin {self.pin.name}",
                "Check that version out, or choose the pin that fits with --pin.",
            )  # fmt: skip

    def altered(self) -> list[str]:
        """Files that somebody else changed since they were committed."""
        return self.repo.dirty()

    def require_clean(self) -> None:
        if dirty := self.altered():
            raise self._refuse(
                f"uncommitted changes in {listed(dirty)}", "a clean checkout",
                "Put them back there (git checkout -- FILE), or make them a patch of the series.",
            )  # fmt: skip

    def _inside(self, path: str) -> str:
        return f"{self.artefact.package}/{path}"

    def read(self, path: str) -> bytes | None:
        return self.repo.blob(self.base(), self._inside(path))

    def reader(self) -> Reader:
        base = self.base()
        return lambda path: self.repo.blob(base, self._inside(path))

    def modules(self) -> dict[str, bytes]:
        """All Python files of the pristine package, by path inside it."""
        base, prefix = self.base(), f"{self.artefact.package}/"
        return {path.removeprefix(prefix): data for path, data in self.repo.blobs(base, prefix, ".py").items()}

    def package_parent(self) -> Path:
        return self.top

    # Writing

    def build(self, plan: Plan) -> tuple[str, list[str]]:
        """Commit objects for the plan on the base: the last commit, and one id a patch ("" where none)."""
        self.folder.mkdir(parents=True, exist_ok=True)
        parent, commits = self.base(), []
        for patch in plan.patches:
            if not patch.files:
                commits.append("")
                continue
            files = {self._inside(p): data for p, data in patch.files.items()}
            scratch = self.folder / "scratch-index"
            parent = self.repo.commit_files(parent, files, commit_message(patch), self.pin.date, scratch)
            scratch.unlink(missing_ok=True)
            commits.append(parent)
        return parent, commits

    def precheck(self, plan: Plan) -> None:
        """Refuse, before anything is written anywhere, what stands in the way of the plan's files."""
        self.require_clean()
        head = self.repo.head()
        self._check_paths(head, self._changed(head, self.build(plan)[0]))

    def undo_point(self) -> Callable[[], None]:
        """A function that comes back to the present state."""
        head, record = self.repo.head(), self.record()
        return lambda: self._move(self.repo.head(), head, record)

    def write(self, plan: Plan, accepted: Accepted) -> bool:
        """Commit the plan; False if exactly that is there already."""
        self.require_clean()
        base, head = self.base(), self.repo.head()
        end, commits = self.build(plan)
        rows = [{**row, "commit": c} for row, c in zip(patch_rows(plan), commits, strict=True)]
        record = Record(
            pin=self.pin.name, target=self.target, artefact=self._artefact(base),
            base={"commit": base, "tree": self.repo.tree(base)},
            result={"commit": end, "tree": self.repo.tree(end)},
            patches=rows, files=file_hashes(plan), accepted=accepted,
        )  # fmt: skip
        if end == head and record == self.record():
            return False
        self._move(head, end, record)
        return True

    def _artefact(self, base: str) -> dict[str, str]:
        known = self.record()
        if self.artefact.sdist and known is not None and "sha256" in known.artefact:
            return dict(known.artefact)
        return {"commit": base, "package": self.artefact.package, "version": self.artefact.version}

    def revert(self) -> bool:
        """Back to the base; what was read of drift stays remembered. False if nothing was applied."""
        record = self.record()
        if record is None or not record.patches:
            return False
        self.require_clean()
        self._move(self.repo.head(), self.base(), replace(record, patches=[], files={}, result=record.base))
        return True

    def _changed(self, old: str, new: str) -> list[str]:
        listing = self.repo.run("diff-tree", "-r", "-z", "--name-only", "--no-renames", old, new)
        return [p.decode() for p in listing.split(b"\0") if p]

    def _move(self, old: str, new: str, record: Record | None) -> None:
        paths = self._changed(old, new)
        self._check_paths(old, paths)
        before = self.record()
        journal: dict[str, Any] = {
            "from": old, "paths": paths, "record_after": record.as_dict() if record else None,
            "record_before": before.as_dict() if before else None, "ref": self.repo.head_ref(), "to": new,
        }  # fmt: skip
        disk.write_bytes(self.journal, jsonfile.encode(journal))
        self._materialise(new, paths)
        disk.checkpoint("ref")
        self.repo.run("update-ref", "-m", "neaptide", "HEAD", new, old)
        disk.checkpoint("ref moved")
        self._finish(journal["record_after"])

    def _check_paths(self, old: str, paths: Sequence[str]) -> None:
        """Refuse files that git converts on checkout, links and untracked files in the way, and a git at work."""
        if self.repo.path("index.lock").exists():
            raise self._refuse(
                "git is at work here (index.lock exists)", "the index to itself",
                "Wait for it to end; if none runs, remove the file.",
            )  # fmt: skip
        entries = self.repo.entries(old, paths)
        for path in paths:
            file = self.top / path
            for parent in list(file.parents)[: len(Path(path).parts) - 1]:
                if parent.is_symlink() or (parent.exists() and not parent.is_dir()):
                    raise self._refuse(f"{parent} is no folder", "folders above every touched file", "Move it away.")
            if path not in entries:
                if file.exists() or file.is_symlink():
                    raise self._refuse(f"an untracked file {path}", "nothing in its place", "Move it away.")
            elif file.is_symlink() or file.read_bytes() != self.repo.blob(old, path):
                raise self._refuse(
                    f"{path} differs from its blob", "no line-ending conversion, filter or link on it",
                    "Turn the conversion off for this checkout.",
                )  # fmt: skip

    def _materialise(self, commit: str, paths: Sequence[str]) -> None:
        """Work-tree files and index entries of ``paths`` as in ``commit``."""
        entries = self.repo.entries(commit, paths)
        for path in paths:
            file = self.top / path
            if path in entries:
                data = self.repo.run("cat-file", "blob", entries[path].blob)
                executable = entries[path].mode == "100755"
                kept = file.exists() and bool(file.stat().st_mode & 0o100) == executable
                disk.write_bytes(file, data, mode=None if kept else 0o755 if executable else 0o644)
            else:
                disk.remove(file)
                disk.prune_empty(file.parent, self.top)
        lines = [
            f"{entries[p].mode} {entries[p].blob}\t{p}\n" if p in entries else f"0 {'0' * 40}\t{p}\n" for p in paths
        ]
        disk.checkpoint("index")
        self.repo.run("update-index", "--index-info", stdin="".join(lines).encode())
        self.repo.run("update-index", "-q", "--refresh")
        disk.checkpoint("index written")

    def _finish(self, record: Mapping[str, Any] | None) -> None:
        path = self.folder / LOCK_NAME
        if record is None:
            disk.remove(path)
        else:
            disk.write_bytes(path, jsonfile.encode(record))
        disk.remove(self.journal)

    def recover(self) -> str:
        """Finish or undo an interrupted write; says what was done, or nothing."""
        disk.sweep(self.folder)
        if not self.journal.exists():
            return ""
        journal = jsonfile.read(self.journal, _checked_journal)
        forward = self.repo.head() == journal["to"]
        self._check_interrupted(journal)
        for name in ("index.lock", "HEAD.lock", f"{journal['ref']}.lock"):
            self.repo.path(name).unlink(missing_ok=True)
        self._materialise(journal["to" if forward else "from"], journal["paths"])
        self._finish(journal["record_after" if forward else "record_before"])
        return f"{self.label}: recovered an interrupted write ({'finished' if forward else 'undone'})"

    def _check_interrupted(self, journal: Mapping[str, Any]) -> None:
        """A HEAD or file that is neither as before nor as after was changed by somebody else: refuse."""
        if self.repo.head() not in (journal["from"], journal["to"]):
            raise self._refuse(
                f"HEAD moved to {self.repo.head()[:12]} after an interrupted write",
                f"HEAD at {journal['from'][:12]} or {journal['to'][:12]}", "Move HEAD back with git, then run again.",
            )  # fmt: skip
        for path in journal["paths"]:
            file = self.top / path
            found = file.read_bytes() if file.is_file() else None
            if found not in [self.repo.blob(journal[side], path) for side in ("from", "to")]:
                raise self._refuse(
                    f"{path} was changed after an interrupted write", "its bytes as before or as after that write",
                    "Restore it with git, then run again.",
                )  # fmt: skip


def _checked_journal(data: Any) -> dict[str, Any]:
    wanted = ("from", "paths", "record_after", "record_before", "ref", "to")
    return {**data, **{key: data[key] for key in wanted}}
