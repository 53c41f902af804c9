"""Modules of a target at a pin, pristine and with the series applied, without a repository around them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from neaptide.archive import unpack
from neaptide.bench.view import make_view
from neaptide.errors import ExitCode, NeaptideError
from neaptide.fetch import sdist_path
from neaptide.outcomes import Subject
from neaptide.output import Progress
from neaptide.pins import TargetPin, load_lock, load_pin
from neaptide.plan import plan_series
from neaptide.rebase.planning import files_of
from neaptide.series import load_series
from neaptide.sources import PackageFiles, sdist_files


@dataclass(frozen=True)
class Source:
    """One target of a pin.

    Attributes:
        archive: its sdist.
        pristine: its modules.
        changed: the files that the series changes or adds, by path inside the package.
    """

    artefact: TargetPin
    archive: Path
    pristine: PackageFiles
    changed: Mapping[str, bytes]


def read_source(root: Path, pin: str, target: str, progress: Progress) -> Source:
    """Reads the sdist once, and plans the whole series on it in memory.

    Raises:
        NeaptideError: the series does not plan clean.
    """
    artefact, lock = load_pin(root, pin).targets[target], load_lock(root, pin).get(target)
    archive, series = sdist_path(artefact, frozen=False, progress=progress), load_series(root, target)
    files = sdist_files(archive, artefact.package, files_of(series))
    guards = {patch: dict(edits) for patch, edits in lock.guards.items()} if lock is not None else {}
    plan = plan_series(Subject(target, artefact.version, artefact.names, files.read, files.read, guards), series)
    if plan.exit_code() is not ExitCode.DONE:
        raise NeaptideError(
            f"the series does not plan clean on {target} at {pin}", wanted="a series that `neaptide apply` takes",
            todo="Run `neaptide apply --dry-run` with this pin.", code=plan.exit_code(),
        )  # fmt: skip
    return Source(artefact, archive, files, plan.files)


def whole_trees(source: Source, folder: Path) -> tuple[Path, Path]:
    """Two folders to put on a path: the package as released, and a patched view of it."""
    tree = folder / "pristine"
    unpack(source.archive, source.archive.name.removesuffix(".tar.gz"), tree)
    return tree, make_view(tree / source.artefact.package, source.changed, folder / "patched").parent


def module_trees(source: Source, modules: Mapping[str, str], folder: Path) -> tuple[Path, Path]:
    """The same with some modules alone: names of packages to nothing but what is asked for.

    Args:
        modules: path inside the package by module name; those that a tree does not have are left out.
    """
    package = source.artefact.package
    for name, changed in (("pristine", {}), ("patched", source.changed)):
        for path in modules.values():
            data = changed.get(path, source.pristine.read(path))
            if data is not None:
                place = folder / name / package / path
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(data)
    return folder / "pristine", folder / "patched"
