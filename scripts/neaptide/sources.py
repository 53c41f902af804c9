"""The package's files at a release or a commit, read once and kept in memory."""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from neaptide.errors import NeaptideError
from neaptide.git import Repo


@dataclass(frozen=True)
class PackageFiles:
    """Bytes of a package's modules, and of other files that were asked for, by path inside the package."""

    files: Mapping[str, bytes]

    def read(self, path: str) -> bytes | None:
        return self.files.get(path)


def sdist_files(archive: Path, package: str, others: Collection[str]) -> PackageFiles:
    """One reading of an sdist: every ``.py`` of ``package`` below the archive's top folder, and ``others``.

    Raises:
        NeaptideError: a damaged archive, or one without the package.
    """
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                path = _inside(member.name, package)
                if path is not None and member.isfile() and (path.endswith(".py") or path in others):
                    content = tar.extractfile(member)
                    assert content is not None
                    found[path] = content.read()
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise NeaptideError(
            f"a damaged archive ({error})", wanted="a whole gzip-compressed tar", todo="Get it again.",
            where=str(archive),
        ) from error  # fmt: skip
    return _checked(found, package, str(archive))


def commit_files(repo: Repo, commit: str, package: str, others: Collection[str]) -> PackageFiles:
    """The same of a commit, without touching the work tree."""
    blobs = repo.blobs(commit, f"{package}/", ".py")
    found = {path.removeprefix(f"{package}/"): data for path, data in blobs.items()}
    for path in others:
        data = repo.blob(commit, f"{package}/{path}") if path not in found else None
        if data is not None:
            found[path] = data
    return _checked(found, package, f"{repo.top} at {commit[:12]}")


def _inside(name: str, package: str) -> str | None:
    parts = name.split("/", 2)
    return parts[2] if len(parts) == 3 and parts[1] == package else None


def _checked(found: dict[str, bytes], package: str, where: str) -> PackageFiles:
    if "__init__.py" not in found:
        raise NeaptideError(
            f"no package {package}", wanted=f"{package}/__init__.py", todo="Check the target and the pin's package.",
            where=where,
        )  # fmt: skip
    return PackageFiles(found)
