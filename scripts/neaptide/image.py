"""Images with the series in them: what their labels say and what their files are, against this repository.

``verify --installed --frozen`` is the half that runs inside; ``verify --image REF`` starts it there without a network
and compares what it finds with the pin and lock out here.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from typing import Any

from neaptide import commands
from neaptide.commands import Result
from neaptide.errors import ExitCode, NeaptideError
from neaptide.installed import InstalledPlace
from neaptide.pins import TargetLock, lock_path
from neaptide.places import bytes_of, sha256, unlocked_patches
from neaptide.recordfile import RecordFile
from neaptide.session import Session, Work


def verify(session: Session, ref: str | None) -> Result:
    """The command: an image, or what is applied here; with ``--frozen`` the pin's lock and every RECORD as well."""
    if ref is None:
        return verify_frozen(session) if session.options.frozen else commands.verify_places(session)
    if session.options.installed or session.options.checkouts:
        raise NeaptideError(
            "--image with --installed or --checkout", wanted="one of them", todo="Run the command twice."
        )
    return verify_image(session, ref)


def lock_sha256(session: Session) -> str:
    """Of the pin's lock, whose bytes name every touched file by its hash."""
    path = lock_path(session.options.root, session.pin.name)
    if not path.is_file():
        raise NeaptideError(
            "the pin has no lock", wanted=str(path), todo=f"Run `neaptide pins --lock {session.pin.name}`."
        )
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _lock(session: Session, target: str) -> TargetLock:
    lock, artefact = session.locks.get(target), session.pin.targets[target]
    if lock is None or (lock.artefact.sha256, lock.artefact.commit) != (artefact.sha256, artefact.commit):
        found = "says nothing of" if lock is None else "was made for another artefact of"
        raise NeaptideError(
            f"the pin's lock {found} {target}", wanted="a lock of all targets of the pin",
            todo=f"Run `neaptide pins --lock {session.pin.name}`.",
        )  # fmt: skip
    return lock


# Inside


def verify_frozen(session: Session) -> Result:
    """``verify``, and that what is applied is what the lock holds: all targets, patches and files of it.

    Returns:
        ``verify``'s object with ``lock_sha256`` and, for each target, ``files``: the sha256 of every file that the
        lock names, as it is on disk (None: absent).
    """
    wanted = lock_sha256(session)
    code, out = commands.verify_places(session)
    problems = [f"{target}: {why}" for target, why in session.skipped.items()]
    for work in session.places(create=False):
        package = work.place.package_parent() / work.artefact.package
        files = {path: sha256(bytes_of(package / path)) for path in sorted(_locked_files(work))}
        found = [*_unlocked(work), *_differing(work.artefact.package, files, _locked_files(work))]
        if isinstance(work.place, InstalledPlace):
            found += _unrecorded(work.place, known=files)
        out["targets"][work.place.target]["files"] = files
        out["targets"][work.place.target]["problems"] += found
        problems += [f"{work.place.label}: {problem}" for problem in found]
    for problem in problems:
        session.progress.note(problem)
    out = {**out, "lock_sha256": wanted, "pin": session.pin.name, "problems": [*out["problems"], *problems]}
    return (ExitCode.UNVERIFIED if problems else code), out


def _locked_files(work: Work) -> Mapping[str, str]:
    return work.lock.after if work.lock is not None else {}


def _unlocked(work: Work) -> list[str]:
    """Where the record of what was applied is not the lock's."""
    record, lock = work.place.record(), work.lock
    if lock is None:
        return ["the pin's lock says nothing of this target"]
    return [f"patch {line}" for line in unlocked_patches(record, lock.patches)] if record is not None else []


def _differing(package: str, files: Mapping[str, str | None], wanted: Mapping[str, str]) -> list[str]:
    names = [path for path in sorted(wanted) if files.get(path) != wanted[path]]
    return [f"{package}/{name} is not the file of the lock" for name in names]


def _unrecorded(place: InstalledPlace, known: Iterable[str]) -> list[str]:
    """Files that are not as RECORD has them, but for those that the lock speaks of; and files of the package that it
    does not name, but for bytecode.
    """
    rows = RecordFile((place.info / "RECORD").read_bytes())
    locked = {f"{place.artefact.package}/{path}" for path in known}
    checked = [(name, rows.problem(name, place.site / name)) for name in rows.names() if name not in locked]
    there = (path for path in sorted(place.package.rglob("*")) if path.is_symlink() or not path.is_dir())
    names = (path.relative_to(place.site) for path in there)
    new = {path.as_posix() for path in names if "__pycache__" not in path.parts} - {*rows.names()}
    return [f"{name} {why}" for name, why in checked if why] + [f"{name} is not in RECORD" for name in sorted(new)]


# Outside


def expected_labels(session: Session) -> dict[str, str]:
    """The labels that an image of the session's pin has: pin, tree ids, patches and the lock's sha256."""
    found = {"io.neaptide.lock.sha256": lock_sha256(session), "io.neaptide.pin": session.pin.name}
    patches: list[str] = []
    for target in sorted(session.pin.targets):
        lock = _lock(session, target)
        found[f"io.neaptide.tree.{target}"] = lock.tree_after
        patches += [p.id for p in session.series(target) if p.name in lock.patches]
    return {**found, "io.neaptide.patches": ",".join(patches)}


def verify_image(session: Session, ref: str) -> Result:
    """Compare an image's labels with the pin and lock here, and its files with the lock's hashes.

    The image's own Python does the reading inside, so this finds an image that was built from something else or
    changed since, not one that was made to deceive: that is what its provenance is for.

    Args:
        ref: name, digest or id of an image that the local Docker has.

    Raises:
        NeaptideError: there is no docker, or no such image.
    """
    wanted = expected_labels(session)
    described = _inspect(ref)
    labels = described.get("Config", {}).get("Labels") or {}
    problems = [
        f"label {name} is {labels.get(name, 'absent')}, wanted {value}"
        for name, value in sorted(wanted.items())
        if labels.get(name) != value
    ]
    inside, found = _run_inside(session, ref)
    problems = list(dict.fromkeys(" ".join(problem.split()) for problem in [*problems, *found]))
    for problem in problems:
        session.progress.note(f"{ref}: {problem}")
    if not problems:
        session.progress.note(f"{ref}: verified")
    out = {
        "image": ref,
        "image_id": described.get("Id", ""),
        "inside": inside,
        "labels": {name: labels.get(name) for name in wanted},
        "pin": session.pin.name,
        "problems": problems,
    }
    return ExitCode.UNVERIFIED if problems else ExitCode.DONE, out


def _docker(*arguments: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("docker") is None:
        raise NeaptideError(
            "no docker on PATH", wanted="the docker client", todo="Install it, or use --installed inside the image.",
            where="--image",
        )  # fmt: skip
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False)


def _inspect(ref: str) -> dict[str, Any]:
    done = _docker("image", "inspect", "--format", "json", ref)
    found = _parsed(done.stdout)
    if isinstance(found, list) and len(found) == 1:
        found = found[0]
    if done.returncode or not isinstance(found, dict):
        raise NeaptideError(
            f"docker image inspect ended with {done.returncode} ({_last_line(done.stderr)})", wanted="a local image",
            todo="Build or pull it first.", where=f"--image {ref}",
        )  # fmt: skip
    return found


def _run_inside(session: Session, ref: str) -> tuple[dict[str, Any], list[str]]:
    """What the image's own ``verify`` says, and its problems in lines."""
    command = ("verify", "--installed", "--frozen", "--json", "--pin", session.pin.name)
    done = _docker("run", "--rm", "--network", "none", "--entrypoint", "neaptide", ref, *command)
    found = _parsed(done.stdout)
    if not isinstance(found, dict):
        return {}, [f"inside: the check ended with {done.returncode} and no report ({_last_line(done.stderr)})"]
    problems = [f"inside: {problem}" for problem in found.get("problems", [])]
    if "error" in found:
        problems.append(f"inside: {found['error'].get('found', 'an error')}")
    if found.get("lock_sha256") != lock_sha256(session):
        problems.append(f"inside: the lock has sha256 {found.get('lock_sha256')}, wanted {lock_sha256(session)}")
    for target, artefact in sorted(session.pin.targets.items()):
        files = found.get("targets", {}).get(target, {}).get("files", {})
        differing = _differing(artefact.package, files, _lock(session, target).after)
        problems += [f"inside: {line}" for line in differing if not any(line in problem for problem in problems)]
    if done.returncode and not problems:
        problems.append(f"inside: the check ended with {done.returncode}")
    return found, problems


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]
