"""The series planned on a release or commit that no pin names: touched files only, nothing is unpacked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from neaptide.errors import NeaptideError
from neaptide.fetch import sdist_path
from neaptide.git import Repo
from neaptide.model import Anchor, Edit, Patch, Rule, expand
from neaptide.outcomes import EditOutcome, Guards, Plan, Status, Subject
from neaptide.output import Progress
from neaptide.pins import TargetLock, TargetPin, load_lock, load_pin, pin_names
from neaptide.plan import plan_series
from neaptide.rebase.whereabouts import Finder, Whereabouts
from neaptide.series import edits_for, requires_for
from neaptide.sources import PackageFiles, commit_files, sdist_files


@dataclass(frozen=True)
class Base:
    """A pin's target that a release is compared with: its name, its lock and its files."""

    pin: str
    lock: TargetLock
    files: PackageFiles


@dataclass(frozen=True)
class Planned:
    """A plan on a release, what it was compared with, and what became of each symbol that is not as it was."""

    artefact: TargetPin
    base: Base
    plan: Plan
    whereabouts: Mapping[tuple[str, str], Whereabouts]

    def about(self, outcome: EditOutcome) -> Whereabouts | None:
        return self.whereabouts.get((outcome.patch, outcome.key))


class Library:
    """Files of pins and releases, each read once.

    Args:
        checkouts: folders of git checkouts by target, for pins and releases that are commits.
    """

    def __init__(self, root: Path, checkouts: Mapping[str, Path], progress: Progress, *, frozen: bool) -> None:
        self.root, self.checkouts, self.progress, self.frozen = root, checkouts, progress, frozen
        self._files: dict[tuple[str, str], PackageFiles] = {}
        self._bases: dict[tuple[str, str], Base] = {}

    def files(self, target: str, artefact: TargetPin, others: frozenset[str]) -> PackageFiles:
        """Modules of the package at an artefact, and the other files that the series names."""
        key = (target, artefact.sha256 or artefact.commit or "")
        if key not in self._files:
            self._files[key] = self._read(target, artefact, others)
        return self._files[key]

    def _read(self, target: str, artefact: TargetPin, others: frozenset[str]) -> PackageFiles:
        if artefact.commit is None:
            path = sdist_path(artefact, frozen=self.frozen, progress=self.progress)
            return sdist_files(path, artefact.package, others)
        if target not in self.checkouts:
            raise NeaptideError(
                f"{artefact.described} is a git commit", wanted=f"--checkout {target}=DIR",
                todo="Clone the repository and give its folder.",
            )  # fmt: skip
        return commit_files(Repo(self.checkouts[target]), artefact.commit, artefact.package, others)

    def forget(self, target: str, artefact: TargetPin) -> None:
        """Drop a release's files from memory."""
        self._files.pop((target, artefact.sha256 or artefact.commit or ""), None)

    def pins_of(self, target: str) -> dict[str, tuple[TargetPin, TargetLock]]:
        """Every locked pin of a target, by name."""
        out = {}
        for name in pin_names(self.root):
            artefact, lock = load_pin(self.root, name).targets.get(target), load_lock(self.root, name).get(target)
            if artefact is not None and lock is not None:
                out[name] = artefact, lock
        return out

    def base(self, target: str, name: str, others: frozenset[str]) -> Base:
        if (target, name) not in self._bases:
            pins = self.pins_of(target)
            if name not in pins:
                raise NeaptideError(
                    f"the pin {name} has no lock for {target}", wanted=f"one of {', '.join(sorted(pins))}",
                    todo="Record it with `neaptide pins --lock`.", where="--pin",
                )  # fmt: skip
            _, lock = pins[name]
            self._bases[target, name] = Base(name, lock, self.files(target, lock.artefact, others))
        return self._bases[target, name]


def files_of(patches: list[Patch]) -> frozenset[str]:
    """Files other than modules that the series relies on, in every era."""
    anchors: list[Anchor] = []
    for patch in patches:
        anchors += [*patch.header.requires, *(a for era in patch.header.eras for a in era.requires)]
    return frozenset(a.file for a in anchors if not a.file.endswith(".py"))


def best_pin(pins: Mapping[str, tuple[TargetPin, TargetLock]], patches: list[Patch], version: str) -> str:
    """The pin whose eras fit a version best; of equals the newest that is not newer, else the oldest.

    Raises:
        NeaptideError: no pin has a lock for the target.
    """
    if not pins:
        raise NeaptideError(
            "no pin has a lock for this target", wanted="one to compare with", todo="Run `neaptide pins --lock PIN`."
        )

    at = {name: Version(artefact.version) for name, (artefact, _) in sorted(pins.items())}
    fits = {
        name: sum(edits_for(p, artefact.version) == edits_for(p, version) for p in patches)
        for name, (artefact, _) in pins.items()
    }
    best = [name for name in at if fits[name] == max(fits.values())]
    not_newer = [name for name in best if at[name] <= Version(version)]
    return max(not_newer, key=at.__getitem__) if not_newer else min(best, key=at.__getitem__)


def guards_for(pins: Mapping[str, tuple[TargetPin, TargetLock]], first: str) -> dict[str, dict[str, Guards]]:
    """Guards of one pin, and those of the others for edits of eras that it has not."""
    merged: dict[str, dict[str, Guards]] = {}
    for name in [first, *sorted(set(pins) - {first})]:
        for patch, edits in pins[name][1].guards.items():
            merged[patch] = {**edits, **merged.get(patch, {})}
    return merged


def plan_on(
    library: Library, target: str, artefact: TargetPin, patches: list[Patch], pin: str | None = None
) -> Planned:
    """Plan the series on ``artefact``, compared with ``pin``, or with the pin that fits best."""
    pins, others = library.pins_of(target), files_of(patches)
    name = pin or best_pin(pins, patches, artefact.version)
    base = library.base(target, name, others)
    here = library.files(target, artefact, others)
    subject = Subject(
        target=target, version=artefact.version, names=artefact.names, read=here.read, original=base.files.read,
        guards=guards_for(pins, name), unpinned=True,
    )  # fmt: skip
    plan = plan_series(subject, patches)
    finder = Finder(base.files.files, here.files)
    rules = _rules(patches, artefact)
    where = {
        (o.patch, o.key): finder.about(
            o.file, o.symbol, rules.get((o.patch, o.file, o.symbol)), search=o.status in (Status.CONFLICT, Status.UNMET)
        )
        for o in plan.outcomes
        if o.status is not Status.CLEAN and o.file.endswith(".py")
    }
    return Planned(artefact, base, plan, where)


def _rules(patches: list[Patch], artefact: TargetPin) -> dict[tuple[str, str, str], Rule]:
    """The first rule of each patch in each symbol, which a candidate is asked for."""
    out: dict[tuple[str, str, str], Rule] = {}
    for patch in patches:
        anchors: list[Edit | Anchor] = [*edits_for(patch, artefact.version)]
        for anchor in [*anchors, *requires_for(patch, artefact.version)]:
            names = dict(artefact.names)
            key = patch.name, expand(anchor.file, names), expand(anchor.symbol, names)
            if anchor.match is not None:
                out.setdefault(key, expand(anchor.match, names))
    return out
