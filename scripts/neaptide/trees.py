"""Trees of unpacked sdists under ``build/PIN/TARGET``, each a repository with one base commit."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from neaptide import archive, jsonfile
from neaptide.disk import write_bytes
from neaptide.errors import NeaptideError
from neaptide.git import GitError, Repo
from neaptide.gitplace import GitPlace
from neaptide.output import Progress
from neaptide.pins import Pin, TargetPin
from neaptide.places import LOCK_NAME, Record


@dataclass(frozen=True)
class TreeMaker:
    """Makes and replaces the tree of one artefact of a pin."""

    pin: Pin
    target: str
    artefact: TargetPin
    progress: Progress

    def ensure(self, top: Path, sdist: Callable[[], Path], scratch: Path | None) -> Path:
        """The unpacked sdist with its base commit; made whole and checked before it takes its place.

        Args:
            top: where the tree is, or shall be.
            sdist: gives the verified archive; asked only if it is needed.
            scratch: for a dry run, the temporary folder in which a missing tree is made.

        Returns:
            The tree's folder.
        """
        old = GitPlace(top, self.target, self.pin, self.artefact) if top.exists() else None
        if old is not None and self._is_tree(old):
            return top
        if scratch is not None:
            top = scratch / self.target
        elif old is not None:
            self._require_replaceable(old)
        source = sdist()
        staging = top.parent / f".{top.name}.new"
        shutil.rmtree(staging, ignore_errors=True)
        self.progress.note(f"unpacking {self.artefact.sdist}")
        try:
            tree = self._unpacked(source, staging)
            if old is not None and scratch is None:
                os.replace(top, staging / "old")
            os.replace(tree, top)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        return top

    def _is_tree(self, place: GitPlace) -> bool:
        record = place.record()
        return record is not None and record.artefact.get("sha256") == self.artefact.sha256

    def _require_replaceable(self, place: GitPlace) -> None:
        """A tree of an older artefact is replaced only if all of it is ours."""
        record = place.record()
        ours = record is not None and "sdist" in record.artefact
        at_ours = record is not None and place.repo.head() in (record.base["commit"], record.result["commit"])
        if not ours or not at_ours or place.repo.dirty() or place.repo.untracked():
            raise NeaptideError(
                "a folder with changes, or one that neaptide did not make", wanted="an unchanged tree, or no folder",
                todo="Move it away.", where=str(place.top),
            )  # fmt: skip

    def _unpacked(self, source: Path, staging: Path) -> Path:
        artefact = self.artefact
        name = (artefact.sdist or "").removesuffix(".tar.gz")
        tree = staging / name
        Repo(source.parent)  # git must be there before anything is unpacked
        archive.unpack(source, name, tree)
        create_tree(tree, self.pin.date)
        repo = Repo(tree)
        base = {"commit": repo.head(), "tree": repo.tree("HEAD")}
        record = Record(
            pin=self.pin.name, target=self.target, base=base, result=base, patches=[], files={},
            artefact={"sdist": artefact.sdist or "", "sha256": artefact.sha256 or "",
                      "package": artefact.package, "version": artefact.version},
            accepted=frozenset(),
        )  # fmt: skip
        write_bytes(repo.path("neaptide") / LOCK_NAME, jsonfile.encode(record.as_dict()))
        return tree


def create_tree(top: Path, date: str) -> None:
    """Make an unpacked sdist a repository with one base commit; ids depend on its bytes and ``date`` only."""
    repo = Repo(top)
    repo.run("init", "--quiet", "--initial-branch=patched", "--template=")
    attributes = top / ".git" / "info" / "attributes"
    attributes.parent.mkdir(exist_ok=True)
    attributes.write_text("* -text -filter -ident -working-tree-encoding -eol\n")
    try:
        repo.run("add", "--all", "--force")
    except GitError as error:
        raise NeaptideError(
            f"git cannot store the tree ({error})", wanted="a plain source tree", todo="Check the disk.", where=str(top)
        ) from error
    commit = repo.commit_tree(repo.text("write-tree"), [], f"upstream: {top.name}\n", date)
    repo.run("update-ref", "HEAD", commit)
