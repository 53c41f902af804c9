"""Pins: exact upstream artefacts, and the locks that hold what was checked against them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from packaging.version import Version

from neaptide import jsonfile
from neaptide.errors import NeaptideError
from neaptide.outcomes import Guards, Plan

DEFAULT_PIN = "current"
Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Commit = Annotated[str, Meta(pattern="^[0-9a-f]{40}$")]


class TargetPin(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One upstream artefact: an sdist by sha256, or a commit of a git repository.

    ``version`` is what era specifiers are compared with; for a commit it is the version
    that the package declares there.
    """

    version: str
    package: str
    prefix: str
    note: str = ""
    sdist: str | None = None
    sha256: Sha256 | None = None
    repository: str | None = None
    commit: Commit | None = None
    ref: str | None = None

    @property
    def names(self) -> dict[str, str]:
        return {"pkg": self.package, "PREFIX": self.prefix}

    @property
    def described(self) -> str:
        return f"{self.package} {self.version}" + (f" at {self.commit[:12]}" if self.commit else "")


class Pin(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A named set of artefacts; ``date`` stamps the commits made from it."""

    name: str
    description: str
    date: str
    targets: dict[str, TargetPin]

    def target(self, name: str, where: str = "") -> TargetPin:
        """The artefact of a target; refuses one that the pin has not."""
        if name not in self.targets:
            raise NeaptideError(
                f"no target {name!r} in the pin {self.name}", wanted=f"one of {', '.join(sorted(self.targets))}",
                todo="Check the spelling, or choose another pin.", where=where,
            )  # fmt: skip
        return self.targets[name]


def pin_folder(root: Path) -> Path:
    return root / "patches" / "pins"


def pin_names(root: Path) -> list[str]:
    return sorted(p.stem for p in pin_folder(root).glob("*.toml"))


def load_pin(root: Path, name: str) -> Pin:
    path = pin_folder(root) / f"{name}.toml"
    if name not in pin_names(root):
        raise NeaptideError(
            f"no pin {name!r}", wanted=f"one of {', '.join(pin_names(root))}", todo="Check the spelling.",
            where="--pin",
        )  # fmt: skip
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        pin = msgspec.convert({"name": name, **data}, Pin, strict=True)
        datetime.fromisoformat(pin.date)
        for artefact in pin.targets.values():
            Version(artefact.version)
    except (ValueError, msgspec.ValidationError) as error:
        raise NeaptideError(str(error), wanted="the fields of a pin", todo="Mend the pin.", where=str(path)) from error
    for target, artefact in pin.targets.items():
        if (artefact.sdist is None) != (artefact.sha256 is None) or (artefact.commit is None) == (
            artefact.sdist is None
        ):
            raise NeaptideError(
                f"{target}: neither or both of sdist with sha256 and commit", wanted="one of the two",
                todo="Mend the pin.", where=str(path),
            )  # fmt: skip
    return pin


def pin_of_commit(root: Path, target: str, commits: set[str]) -> str | None:
    """The pin whose target is at one of ``commits``, if any."""
    for name in pin_names(root):
        artefact = load_pin(root, name).targets.get(target)
        if artefact is not None and artefact.commit in commits:
            return name
    return None


@dataclass(frozen=True)
class TargetLock:
    """What was checked against one target of a pin.

    Attributes:
        guards: by patch and edit key.
        before, after: sha256 of every file that the whole series touches; None where absent.
        tree_before, tree_after: git tree ids of the whole tree.
        patches: digest of every patch that was applied.
        artefact: the pin's entry that was locked, so that a bumped pin can show upstream's change.
    """

    guards: Mapping[str, Mapping[str, Guards]]
    before: Mapping[str, str | None]
    after: Mapping[str, str]
    tree_before: str
    tree_after: str
    patches: Mapping[str, str]
    artefact: TargetPin


def lock_path(root: Path, pin: str) -> Path:
    return pin_folder(root) / f"{pin}.lock"


def load_lock(root: Path, pin: str) -> dict[str, TargetLock]:
    path = lock_path(root, pin)
    if not path.is_file():
        return {}
    return jsonfile.read(path, lambda data: {name: _lock_from(entry) for name, entry in data["targets"].items()})


def _lock_from(entry: Mapping[str, Any]) -> TargetLock:
    guards = {
        patch: {key: Guards(g["symbol"], g["site"]) for key, g in edits.items()}
        for patch, edits in entry["guards"].items()
    }
    files = entry["files"]
    return TargetLock(
        guards=guards,
        before={p: f["before"] for p, f in files.items()},
        after={p: f["after"] for p, f in files.items()},
        tree_before=entry["tree_before"],
        tree_after=entry["tree_after"],
        patches=entry["patches"],
        artefact=msgspec.convert(entry["artefact"], TargetPin),
    )


def encode_lock(pin: str, locks: Mapping[str, TargetLock]) -> bytes:
    """The bytes of ``patches/pins/PIN.lock``."""
    targets = {
        name: {
            "files": {p: {"before": lock.before[p], "after": lock.after[p]} for p in lock.after},
            "guards": {
                patch: {k: {"site": g.site, "symbol": g.symbol} for k, g in edits.items()}
                for patch, edits in lock.guards.items()
            },
            "artefact": {k: v for k, v in msgspec.to_builtins(lock.artefact).items() if v and k != "note"},
            "patches": dict(lock.patches),
            "tree_after": lock.tree_after,
            "tree_before": lock.tree_before,
        }
        for name, lock in locks.items()
    }
    return jsonfile.encode({"pin": pin, "schema_version": 1, "targets": targets})


def recorded_guards(plan: Plan) -> dict[str, dict[str, Guards]]:
    """Guards of a plan made without comparison, for a new lock."""
    out: dict[str, dict[str, Guards]] = {}
    for outcome in plan.outcomes:
        if outcome.guards is not None and outcome.guards.symbol:
            out.setdefault(outcome.patch, {})[outcome.key] = outcome.guards
    return out
