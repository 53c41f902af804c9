"""What stands at each target (an installed package, a checkout, a tree), and whether the series still is as applied."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from neaptide.distribution import public_version, search_path
from neaptide.errors import NeaptideError
from neaptide.gitplace import GitPlace
from neaptide.model import Patch
from neaptide.outcomes import IN_FORCE, Status
from neaptide.pins import DEFAULT_PIN, TargetLock, load_pin, pin_names
from neaptide.places import Record, State, bytes_of, sha256, unlocked_patches
from neaptide.session import Options, Session, Work


@dataclass(frozen=True)
class Applied:
    """One target.

    Attributes:
        place: where, for people; or why there is none.
        folder: the package's; None where there is none.
        state: of :class:`State`.
        statuses: of every patch that the record names, by id.
        altered: files that are no longer as they were applied.
        stale: patches whose source in the repository is another than what was applied.
        lock: how the target differs from the pin's lock; empty if it does not.
        locked: whether the pin has a lock for it.
    """

    target: str
    package: str
    version: str
    place: str
    folder: Path | None
    state: State
    statuses: Mapping[str, str]
    altered: tuple[str, ...] = ()
    stale: tuple[str, ...] = ()
    lock: tuple[str, ...] = ()
    locked: bool = False

    @property
    def patches(self) -> list[str]:
        """Ids of the patches whose code is there."""
        return [name for name, status in self.statuses.items() if status in IN_FORCE]

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "folder": str(self.folder or ""), "patches": self.patches, "state": self.state.value}


def at_installed_pin(session: Session) -> Session:
    """The session at the pin that is installed, where no pin was asked for."""
    pin = session.options.pin or _installed_pin(session.options)
    return session if pin == session.pin.name else Session(replace(session.options, pin=pin), session.progress)


def _versions(options: Options, package: str) -> list[str]:
    path = search_path(options.python)
    return [found.version for found in importlib.metadata.distributions(name=package, path=path)][:1]


def _installed_pin(options: Options) -> str:
    """The first pin, the default before others, of which a package is installed in its version; else the default."""
    names = sorted(pin_names(options.root), key=lambda name: (name != DEFAULT_PIN, name))
    for name in names:
        for artefact in load_pin(options.root, name).targets.values():
            if any(public_version(version) == artefact.version for version in _versions(options, artefact.package)):
                return name
    return DEFAULT_PIN


def look_at_target(session: Session, target: str, *, asked: bool) -> Applied:
    """What stands there. A package that is missing or not the pin's is a state here, and no refusal.

    Args:
        asked: for the session's places; else for the package where it is installed, and its tree where it is not.
    """
    artefact = session.pin.targets[target]
    installed = session.options.installed or (not asked and bool(_versions(session.options, artefact.package)))
    options = replace(session.options, pin=session.pin.name, targets=(target,), installed=installed)
    if options.checkouts and target not in options.checkouts:
        return Applied(target, artefact.package, artefact.version, "no --checkout", None, State.ABSENT, {})
    alone = Session(options, session.progress)
    try:
        works = alone.places(create=False)
    except NeaptideError as error:
        if not options.installed:
            raise
        return Applied(target, artefact.package, artefact.version, str(error), None, State.ABSENT, {})
    if not works:
        place = alone.skipped[target]
        return Applied(target, artefact.package, artefact.version, place, None, State.ABSENT, {})
    return _look_at(works[0], session.series(target))


def _look_at(work: Work, series: Sequence[Patch]) -> Applied:
    place, record = work.place, work.place.record()
    state = place.state()
    package = place.package_parent() / work.artefact.package
    statuses: dict[str, str] = {}
    altered: list[str] = []
    if record is not None and state is not State.PRISTINE:
        statuses = {row["id"]: row.get("status", Status.CLEAN) for row in record.patches}
        altered = _altered(package, record)
        if isinstance(place, GitPlace):
            prefix = f"{work.artefact.package}/"
            altered += [path for name in place.repo.dirty() if (path := name.removeprefix(prefix)) not in altered]
    digests = {patch.id: patch.digest for patch in series}
    stale = [row["id"] for row in record.patches if digests.get(row["id"]) != row["digest"]] if record else []
    return Applied(
        target=place.target, package=work.artefact.package, version=work.artefact.version, place=place.label,
        folder=package, state=state, statuses=statuses, altered=tuple(sorted(altered)), stale=tuple(stale),
        lock=tuple(_lock_differences(work.lock, record if statuses else None)), locked=work.lock is not None,
    )  # fmt: skip


def _altered(package: Path, record: Record) -> list[str]:
    """Files of the record whose bytes are no longer those that were written."""
    return [path for path, hashes in record.files.items() if sha256(bytes_of(package / path)) != hashes["after"]]


def _lock_differences(lock: TargetLock | None, record: Record | None) -> list[str]:
    """What was recorded at applying against what the pin's lock holds."""
    if lock is None or record is None:
        return []
    found = unlocked_patches(record, lock.patches)
    files = [path for path, hashes in record.files.items() if hashes["after"] != lock.after.get(path)]
    return found or [f"{path} is another than the lock's" for path in files]
