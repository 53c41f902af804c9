"""Ask the code of a target, pristine and patched, in a child process each: what it would allocate, without a device."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from neaptide.archive import unpack
from neaptide.bench.view import make_view
from neaptide.errors import ExitCode, NeaptideError
from neaptide.fetch import sdist_path
from neaptide.output import Progress
from neaptide.session import Options, Session

TARGET = "b12x"
PINS = ("current", "r12")


def add_options(sub: argparse.ArgumentParser) -> None:
    """Options of a command that asks both trees."""
    sub.add_argument("--python", default=None, help="an interpreter that has torch (default: this one)")


@dataclass(frozen=True)
class Question:
    """A child program ``CHILD SPEC RESULT``, what it is given, and the command that asks."""

    child: Path
    spec: Any
    command: str

    def refuse(self, found: str, wanted: str, todo: str) -> NeaptideError:
        return NeaptideError(found, wanted=wanted, todo=todo, where=self.command)

    def check(self, options: Options) -> None:
        """Refuse a pin without this code, another target, and a Python that is none."""
        if options.pin not in (None, *PINS):
            raise self.refuse(f"pin {options.pin!r}", f"one of {', '.join(PINS)}", "Leave --pin out for both.")
        if options.targets not in ((), (TARGET,)):
            raise self.refuse(f"target {options.targets[0]!r}", TARGET, "Leave --target out.")
        if options.python is not None and not os.access(options.python, os.X_OK):
            raise self.refuse(f"no program {options.python}", "a Python with torch", "Check the path.")

    def asked(self, options: Options, progress: Progress) -> Iterator[tuple[str, Any, Any]]:
        """At the chosen pin, or at all: the pin, what upstream's code answers, and what the patched one does."""
        self.check(options)
        for pin in [options.pin] if options.pin else PINS:
            yield (pin, *self.asked_at(pin, options, progress))

    def asked_at(self, pin: str, options: Options, progress: Progress) -> tuple[Any, Any]:
        """What upstream's code answers at a pin, and what the patched one does."""
        session = Session(replace(options, pin=pin, targets=(TARGET,), dry_run=True), progress)
        work = session.places(create=True)[0]
        plan = session.plan(work, session.series(TARGET))
        if plan.exit_code() is not ExitCode.DONE:
            raise NeaptideError(
                f"the series does not plan clean at {session.pin.name}", wanted="a series that `neaptide apply` takes",
                todo="Run `neaptide apply --dry-run` with this pin.", code=plan.exit_code(),
            )  # fmt: skip
        with tempfile.TemporaryDirectory(prefix="neaptide-trees-") as name:
            source = sdist_path(work.artefact, frozen=False, progress=progress)
            tree = Path(name) / "pristine"
            unpack(source, source.name.removesuffix(".tar.gz"), tree)
            view = make_view(tree / work.artefact.package, plan.files, Path(name) / "patched").parent
            return self._answer(tree, options.python), self._answer(view, options.python)

    def _answer(self, tree: Path, python: Path | None) -> Any:
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
                raise self.refuse(
                    f"sizes could not be computed: {(done.stderr.strip() or 'no output').splitlines()[-1]}",
                    "a Python with torch and what b12x imports",
                    "Name one with --python.",
                )
            return json.loads(result.read_text())
