"""Writing a release into a pin, and recording its lock; both or neither."""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from neaptide import pinning
from neaptide.disk import write_bytes
from neaptide.errors import ExitCode, NeaptideError
from neaptide.output import Progress
from neaptide.pins import Pin, encode_lock, load_lock, load_pin, lock_path, pin_folder, pin_names
from neaptide.rebase.planning import Planned
from neaptide.session import Options, Session

_NAME = re.compile(r"^[a-z0-9][a-z0-9.-]*$")


@dataclass(frozen=True)
class Written:
    """The pin that was written, or would be."""

    name: str
    files: list[str]
    code: ExitCode

    def as_dict(self) -> dict[str, Any]:
        return {"files": self.files, "name": self.name}


def encode_pin(pin: Pin) -> bytes:
    """The bytes of ``patches/pins/NAME.toml``."""
    lines = [f"description = {_quoted(pin.description)}", f"date = {_quoted(pin.date)}"]
    for name, artefact in pin.targets.items():
        lines += ["", f"[targets.{name}]"]
        fields = msgspec.to_builtins(artefact)
        order = ("package", "prefix", "version", "sdist", "sha256", "repository", "commit", "ref", "note")
        lines += [f"{key} = {_quoted(fields[key])}" for key in order if fields[key]]
    return ("\n".join(lines) + "\n").encode()


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    return f'"{escaped}"'


def check_new_name(root: Path, name: str) -> None:
    """Refuse a name that is taken, or that is no name of a pin."""
    if not _NAME.match(name) or name in pin_names(root):
        raise NeaptideError(f"the name {name!r}", wanted="a new lower-case name", todo="Choose another.", where="--as")


def write_pin(options: Options, planned: Planned, new_name: str | None, progress: Progress) -> Written:
    """Put the artefact in the pin, or in a copy named ``new_name``, and lock it; other targets keep their locks.

    Raises:
        NeaptideError: what planning on the whole tree finds.
    """
    assert options.pin is not None
    target, old = planned.plan.subject.target, load_pin(options.root, options.pin)
    name = new_name or options.pin
    pin = Pin(
        name=name, description=old.description, date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        targets={**old.targets, target: planned.artefact},
    )  # fmt: skip
    path, lock = pin_folder(options.root) / f"{name}.toml", lock_path(options.root, name)
    files = [path.name, lock.name]
    if options.dry_run:
        progress.note(f"would write {' and '.join(files)}")
        return Written(name, [], ExitCode.DONE)
    before = {file: file.read_bytes() if file.is_file() else None for file in (path, lock)}
    others = {t: entry for t, entry in load_lock(options.root, options.pin).items() if t != target}
    write_bytes(path, encode_pin(pin))
    try:
        if new_name is not None:
            write_bytes(lock, encode_lock(name, others))
        code = _locked(options, name, planned, progress)
    except BaseException:
        _put_back(before)
        raise
    if code is not ExitCode.DONE:
        _put_back(before)
        return Written(name, [], code)
    return Written(name, files, code)


def _locked(options: Options, name: str, planned: Planned, progress: Progress) -> ExitCode:
    """Record the lock: of a commit in its checkout, of a release in a tree that is gone afterwards."""
    target = planned.plan.subject.target
    checkouts = {target: options.checkouts[target]} if planned.artefact.commit else {}
    options.build.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="locking-", dir=options.build) as folder:
        chosen = replace(
            options, pin=name, build=Path(folder), targets=(target,), checkouts=checkouts, accept=(), dry_run=False
        )
        code, _ = pinning.lock_pin(Session(chosen, progress))
    return code


def _put_back(before: dict[Any, bytes | None]) -> None:
    for file, data in before.items():
        if data is None:
            file.unlink(missing_ok=True)
        else:
            write_bytes(file, data)
