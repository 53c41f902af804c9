"""Finding an installed distribution that a pin's series may be applied to."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from neaptide.errors import NeaptideError
from neaptide.pins import TargetPin


@dataclass(frozen=True)
class Installation:
    """``site`` holds the package's folder, ``info`` is its ``*.dist-info``."""

    site: Path
    info: Path


def search_path(python: Path | None) -> list[str]:
    """Where distributions are looked for: this interpreter's path, or another one's."""
    return sys.path if python is None else _path_of(python)


# Every target and pin asks.
@functools.cache
def _path_of(python: Path) -> list[str]:
    code = "import json, sys; print(json.dumps(sys.path))"
    try:
        done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise NeaptideError(
            f"cannot run it ({error})",
            wanted="a Python interpreter",
            todo="Check the path.",
            where=f"--python {python}",
        ) from error
    return [p for p in json.loads(done.stdout) if p]


def find_installation(artefact: TargetPin, python: Path | None) -> Installation | None:
    """The installed package of a pin, or None.

    Raises:
        NeaptideError: another version, an editable installation, or one without RECORD.
    """
    path = search_path(python)
    found = next(iter(importlib.metadata.distributions(name=artefact.package, path=path)), None)
    if found is None:
        return None
    site = Path(str(found.locate_file("")))
    where = f"{artefact.package} in {site}"
    _check_version(found.version, artefact, where)
    if _is_editable(found) or not (site / artefact.package / "__init__.py").is_file():
        raise NeaptideError(
            "an editable installation", wanted="a distribution whose files lie in site-packages",
            todo="Use --checkout TARGET=DIR for a source checkout.", where=where,
        )  # fmt: skip
    for file in found.files or []:
        if file.name == "RECORD" and file.parent.name.endswith(".dist-info"):
            return Installation(site, Path(str(found.locate_file(file.parent))))
    raise NeaptideError(
        "no RECORD", wanted="a distribution that pip or uv installed", todo="Install it from a wheel.", where=where
    )


def public_version(version: str) -> str:
    """Without the local part behind ``+``; a version of another form as it is."""
    try:
        return Version(version).public
    except InvalidVersion:
        return version


def _check_version(version: str, artefact: TargetPin, where: str) -> None:
    if public_version(version) != artefact.version:
        raise NeaptideError(
            f"version {version} is installed", wanted=f"{artefact.version}, which the pin names",
            todo="Install that version, or choose the pin that fits with --pin.", where=where,
        )  # fmt: skip


def _is_editable(distribution: importlib.metadata.Distribution) -> bool:
    text = distribution.read_text("direct_url.json")
    try:
        return bool(text) and bool(json.loads(text or "{}").get("dir_info", {}).get("editable", False))
    except (ValueError, AttributeError) as error:
        raise NeaptideError(
            f"direct_url.json is not readable ({error})", wanted="sound metadata", todo="Reinstall the package.",
            where=distribution.metadata["Name"],
        ) from error  # fmt: skip
