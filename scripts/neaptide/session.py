"""From command-line options to places, plans and writes."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from neaptide import jsonfile
from neaptide.disk import TEMPORARY_SUFFIX, write_bytes
from neaptide.distribution import find_installation
from neaptide.errors import ExitCode, NeaptideError
from neaptide.fetch import check_sha256, sdist_path
from neaptide.git import Repo
from neaptide.gitplace import GitPlace
from neaptide.installed import InstalledPlace
from neaptide.model import Patch
from neaptide.outcomes import Guards, Plan, Reader, Subject
from neaptide.output import Progress
from neaptide.pins import (
    DEFAULT_PIN,
    TargetLock,
    TargetPin,
    load_lock,
    load_pin,
    pin_of_commit,
)
from neaptide.places import LOCK_NAME, State, load_record
from neaptide.plan import plan_series
from neaptide.series import check_known, load_series, select
from neaptide.sources import PackageFiles, sdist_files
from neaptide.trees import TreeMaker


@dataclass(frozen=True)
class Options:
    """What a command was asked for."""

    root: Path
    build: Path
    pin: str | None = None
    targets: tuple[str, ...] = ()
    checkouts: dict[str, Path] = field(default_factory=dict)
    sdists: dict[str, Path] = field(default_factory=dict)
    installed: bool = False
    python: Path | None = None
    only: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    accept: tuple[str, ...] = ()
    frozen: bool = False
    dry_run: bool = False


@dataclass(frozen=True)
class Work:
    """One target of a command: where, at which artefact, with which recorded checks."""

    place: GitPlace | InstalledPlace
    artefact: TargetPin
    lock: TargetLock | None


class Session:
    """Options resolved against the repository: the pin, its locks, and the places."""

    def __init__(self, options: Options, progress: Progress) -> None:
        self.options, self.progress = options, progress
        self.pin = load_pin(options.root, options.pin or self._implied_pin())
        self.locks = load_lock(options.root, self.pin.name)
        self.skipped: dict[str, str] = {}
        self._scratch = tempfile.TemporaryDirectory(prefix="neaptide-", ignore_cleanup_errors=True)
        self._check_targets()

    def _implied_pin(self) -> str:
        """A checkout at a pin's commit (or with the series on it) means that pin; else the default."""
        for target, folder in self.options.checkouts.items():
            if not folder.is_dir():
                continue
            repo = Repo(folder)
            commits = {repo.head()} if repo.is_top() else set()
            record_path = repo.path("neaptide") / LOCK_NAME if commits else None
            record = load_record(record_path) if record_path is not None else None
            if record is not None:
                commits.add(record.base.get("commit", ""))
            found = pin_of_commit(self.options.root, target, commits)
            if found is not None:
                return found
        return DEFAULT_PIN

    def _check_targets(self) -> None:
        asked = {*self.options.targets, *self.options.checkouts, *self.options.sdists}
        for target in sorted(asked):
            self.pin.target(target)
        for target in self.options.targets:
            if self.options.checkouts and target not in self.options.checkouts:
                raise NeaptideError(
                    f"--target {target} without its --checkout", wanted="both", todo="Give its folder too."
                )

    @property
    def targets(self) -> list[str]:
        """The targets that the command is about; with --patch, only those of the named patches."""
        asked = set(self.options.targets or self.options.checkouts or self.pin.targets)
        if self.options.only:
            names = {t: {n for p in self.series(t) for n in (p.id, p.name)} for t in asked}
            asked = {t for t in asked if names[t] & set(self.options.only)} or asked
        return sorted(asked)

    # Places

    def tree_folder(self, target: str) -> Path:
        return self.options.build / self.pin.name / target

    def places(self, *, create: bool) -> list[Work]:
        """The places of the command; with ``create``, missing trees are fetched and unpacked."""
        works: list[Work] = []
        for target in self.targets:
            artefact = self.pin.targets[target]
            place = self._place(target, artefact, create=create)
            if place is not None:
                works.append(Work(place, artefact, self.locks.get(target)))
        if not works and self.options.installed:
            raise NeaptideError(
                "; ".join(self.skipped.values()), wanted="at least one of the pin's packages installed",
                todo="Install it, or name its interpreter with --python.", where="--installed",
            )  # fmt: skip
        return works

    def _place(self, target: str, artefact: TargetPin, *, create: bool) -> GitPlace | InstalledPlace | None:
        if self.options.installed:
            found = find_installation(artefact, self.options.python)
            if found is None:
                self.skipped[target] = f"{artefact.package} is not installed"
                return None
            return InstalledPlace(found, target, self.pin, artefact, self.locks.get(target))
        if target in self.options.checkouts:
            place = GitPlace(self.options.checkouts[target], target, self.pin, artefact)
            place.check_version()
            return place
        if artefact.sdist is None:
            raise NeaptideError(
                f"{artefact.described} is a git commit, not on PyPI", wanted=f"--checkout {target}=DIR",
                todo="Clone the repository and give its folder.", where=f"pin {self.pin.name}",
            )  # fmt: skip
        top = self.tree_folder(target)
        given = self._sdist(target, artefact) if target in self.options.sdists else None
        if create:
            maker = TreeMaker(self.pin, target, artefact, self.progress)
            scratch = Path(self._scratch.name) if self.options.dry_run else None
            top = maker.ensure(top, lambda: given or self._sdist(target, artefact), scratch)
        if not top.is_dir():
            self.skipped[target] = f"{top} does not exist"
            return None
        return GitPlace(top, target, self.pin, artefact)

    def _sdist(self, target: str, artefact: TargetPin) -> Path:
        given = self.options.sdists.get(target)
        if given is None:
            return sdist_path(artefact, frozen=self.options.frozen, progress=self.progress)
        if not given.is_file():
            raise NeaptideError(
                "no such file", wanted=artefact.sdist or "", todo="Check the path.", where=f"--sdist {target}={given}"
            )
        check_sha256(given, artefact)
        return given

    # Plans

    def series(self, target: str) -> list[Patch]:
        return load_series(self.options.root, target)

    def chosen(self, target: str) -> list[Patch]:
        """The series, or the part of it that was asked for."""
        patches = self.series(target)
        named = (*self.options.only, *self.options.without, *self.options.accept)
        check_known(named, [p for t in self.targets for p in self.series(t)])
        mine = {n for p in patches for n in (p.id, p.name)}
        only = [n for n in self.options.only if n in mine]
        return select(patches, only, [n for n in self.options.without if n in mine])

    def subject(self, work: Work, guards: Mapping[str, Mapping[str, Guards]] | None) -> Subject:
        return Subject(
            target=work.place.target,
            version=work.artefact.version,
            names=work.artefact.names,
            read=work.place.reader(),
            original=self._original(work),
            guards=guards,
        )

    def plan(self, work: Work, patches: Sequence[Patch], *, recording: bool = False) -> Plan:
        recorded = work.lock.guards if work.lock is not None else {}
        return plan_series(self.subject(work, None if recording else recorded), patches)

    def _original(self, work: Work) -> Reader:
        """The locked artefact's own bytes, for showing what upstream changed since; None where not at hand."""
        artefact = work.lock.artefact if work.lock is not None else work.artefact
        place = work.place
        if artefact.commit is not None:
            if not isinstance(place, GitPlace):
                return lambda path: None
            repo, commit = place.repo, artefact.commit
            return lambda path: repo.blob(commit, f"{artefact.package}/{path}")

        @functools.cache
        def files() -> PackageFiles:
            try:
                return sdist_files(self._sdist(place.target, artefact), artefact.package, ())
            except NeaptideError:
                return PackageFiles({})

        return lambda path: files().read(path)

    def locked(self, works: Sequence[Work]) -> ExitStack:
        """Hold every place against other neaptide processes."""
        stack = ExitStack()
        for work in works:
            stack.enter_context(work.place.lock())
        return stack

    def recover(self, works: Sequence[Work]) -> None:
        """Finish or undo what an earlier process left half written; a dry run says so instead."""
        for work in works:
            if self.options.dry_run:
                if work.place.state() is State.INTERRUPTED:
                    raise NeaptideError(
                        "a write was interrupted", wanted="a whole target for a dry run",
                        todo="Run the command without --dry-run; it recovers first.", where=work.place.label,
                        code=ExitCode.UNVERIFIED,
                    )  # fmt: skip
                continue
            note = work.place.recover()
            if note:
                self.progress.note(note)

    def write_tree_record(self) -> None:
        """``build/PIN/neaptide.lock.json``: the records of all trees of the pin, if they changed."""
        records = {}
        for target in sorted(self.pin.targets):
            top = self.tree_folder(target)
            if top.is_dir():
                record = GitPlace(top, target, self.pin, self.pin.targets[target]).record()
                if record is not None:
                    records[target] = record.as_dict()
        path = self.options.build / self.pin.name / LOCK_NAME
        path.with_name(path.name + TEMPORARY_SUFFIX).unlink(missing_ok=True)
        data = jsonfile.encode({"pin": self.pin.name, "schema_version": 1, "targets": records})
        if not path.is_file() or path.read_bytes() != data:
            write_bytes(path, data)


def trees_only(options: Options) -> bool:
    return not options.installed and not options.checkouts
