"""A target, pristine and patched, made from its sdist; the code of each asked in a child process, without a device."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from neaptide.session import Options
from neaptide.sources import PackageFiles, sdist_files

TARGET = "b12x"
PINS = ("current", "r12")


def add_options(sub: argparse.ArgumentParser) -> None:
    """Options of a command that asks both trees."""
    sub.add_argument("--python", default=None, help="an interpreter that has torch (default: this one)")


def check(options: Options, targets: Collection[str], command: str) -> None:
    """Refuse a pin without this code, other targets, and a Python that is none.

    Args:
        targets: those that the command asks, all of them at once.
    """

    def refuse(found: str, wanted: str, todo: str) -> NeaptideError:
        return NeaptideError(found, wanted=wanted, todo=todo, where=command)

    if options.pin not in (None, *PINS):
        raise refuse(f"pin {options.pin!r}", f"one of {', '.join(PINS)}", "Choose another --pin, or leave it out.")
    if options.targets and set(options.targets) != set(targets):
        raise refuse(f"target {', '.join(options.targets)}", " and ".join(sorted(targets)), "Leave --target out.")
    if options.python is not None and not os.access(options.python, os.X_OK):
        raise refuse(f"no program {options.python}", "a Python with torch", "Check the path.")


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
    guards = lock.guards if lock is not None else {}
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


@dataclass(frozen=True)
class Question:
    """A child program ``CHILD SPEC RESULT``, what it is given, and the command that asks."""

    child: Path
    spec: Any
    command: str

    def asked(self, options: Options, progress: Progress) -> Iterator[tuple[str, Any, Any]]:
        """At the chosen pin, or at all: the pin, what upstream's code answers, and what the patched one does."""
        check(options, (TARGET,), self.command)
        for pin in [options.pin] if options.pin else PINS:
            yield (pin, *self.asked_at(pin, options, progress))

    def asked_at(self, pin: str, options: Options, progress: Progress) -> tuple[Any, Any]:
        """What upstream's code answers at a pin, and what the patched one does."""
        source = read_source(options.root, pin, TARGET, progress)
        with tempfile.TemporaryDirectory(prefix="neaptide-trees-") as name:
            pristine, patched = whole_trees(source, Path(name))
            return self.answer(pristine, options.python), self.answer(patched, options.python)

    def answer(self, tree: Path, python: Path | None) -> Any:
        """What the code of one tree says.

        Raises:
            NeaptideError: a Python without torch, or without what the code imports.
        """
        with tempfile.TemporaryDirectory(prefix="neaptide-trees-") as name:
            spec, result = Path(name) / "spec.json", Path(name) / "result.json"
            spec.write_text(json.dumps(self.spec))
            # The switches of b12x change sizes: none is inherited.
            env = {key: value for key, value in os.environ.items() if not key.startswith("B12X_")}
            done = subprocess.run(
                [str(python or sys.executable), str(self.child), str(spec), str(result)],
                env=env | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"},
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            if not result.is_file():
                raise self._refused((done.stderr.strip() or "no output").splitlines()[-1])
            return json.loads(result.read_text())

    def _refused(self, said: str) -> NeaptideError:
        """What a child's last line means: a Python that lacks something, or code that this pin does not have."""
        missing = _MISSING.search(said)
        python = (missing is not None and not missing[1].startswith(("vllm.", "b12x."))) or said == "no output"
        return NeaptideError(
            f"sizes could not be computed: {said}",
            wanted="a Python with torch and what b12x imports" if python else "sizes that this pin's code can compute",
            todo="Name one with --python." if python else "Change the profile, or choose another --pin.",
            where=self.command,
        )  # fmt: skip


_MISSING = re.compile(r"No module named '([\w.]+)'")
