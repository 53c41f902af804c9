"""Getting a pinned sdist: found with ``unearth``, checked by sha256, kept in the user's cache."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from urllib.parse import urlsplit

import platformdirs
from unearth import PackageFinder

from neaptide.errors import NeaptideError
from neaptide.output import Progress
from neaptide.pins import TargetPin

_CHUNK = 1 << 20


def cache_folder() -> Path:
    return Path(platformdirs.user_cache_dir("neaptide")) / "sdists"


def sha256_of(path: Path) -> str:
    total = hashlib.sha256()
    with open(path, "rb") as handle:
        while chunk := handle.read(_CHUNK):
            total.update(chunk)
    return total.hexdigest()


def check_sha256(path: Path, artefact: TargetPin) -> None:
    found = sha256_of(path)
    if found != artefact.sha256:
        raise NeaptideError(
            f"sha256 {found}", wanted=f"{artefact.sha256}, which the pin names for {artefact.sdist}",
            todo="The file is truncated, altered or another release: get it again.", where=str(path),
        )  # fmt: skip


def sdist_path(artefact: TargetPin, *, frozen: bool, progress: Progress, cache: Path | None = None) -> Path:
    """A verified local copy of the sdist; downloaded only if the cache lacks it.

    Raises:
        NeaptideError: the artefact is no sdist, is not in the cache while ``frozen``, cannot be
            found, or does not have the pin's sha256 (then nothing is kept).
    """
    if artefact.sdist is None:
        raise NeaptideError(
            f"{artefact.described} is a git commit, not on PyPI", wanted="a local checkout of it",
            todo="Use --checkout TARGET=DIR.",
        )  # fmt: skip
    path = (cache or cache_folder()) / artefact.sdist
    if path.is_file():
        if sha256_of(path) == artefact.sha256:
            return path
        progress.note(f"the cached {artefact.sdist} does not have the pin's sha256; fetching it again")
        if not frozen:
            path.unlink()
    if frozen:
        raise NeaptideError(
            f"{artefact.sdist} is not in the cache with the pin's sha256",
            wanted="it there, since --frozen uses no network",
            todo="Run once without --frozen, or give the file with --sdist TARGET=FILE.", where=str(path),
        )  # fmt: skip
    _download(artefact, path, progress)
    return path


def find_sdist(package: str, version: str, *, frozen: bool = False) -> tuple[str, str, str]:
    """Version, file name and sha256 of a release's sdist; of the newest release without ``version``.

    From the index; with ``frozen``, of the file in the cache.

    Raises:
        NeaptideError: the index has no such sdist or states no sha256, or the cache has no such file.
    """
    if frozen:
        path = cache_folder() / f"{package}-{version}.tar.gz"
        if not version or not path.is_file():
            raise NeaptideError(
                f"no {path.name} in the cache", wanted="it there, since --frozen uses no network",
                todo="Run once without --frozen.", where=f"{package}=={version or 'newest'}",
            )  # fmt: skip
        return version, path.name, sha256_of(path)
    asked = f"{package}=={version}" if version else package
    try:
        best = _finder().find_best_match(asked).best
    except Exception as error:
        raise NeaptideError(
            f"the index did not answer ({type(error).__name__}: {error})", wanted="its list of releases",
            todo="Check the network and PIP_INDEX_URL.", where=asked,
        ) from error  # fmt: skip
    digest = ((best.link.hashes if best is not None else None) or {}).get("sha256")
    if best is None or digest is None:
        raise NeaptideError(
            "the index has no such sdist" if best is None else "the index states no sha256 for it",
            wanted="a release with an sdist and its sha256", todo="Check the version.", where=asked,
        )  # fmt: skip
    return str(best.version), best.link.filename, digest


def _finder() -> PackageFinder:
    return PackageFinder(index_urls=os.environ.get("PIP_INDEX_URL", "").split(), no_binary=[":all:"])


def _download(artefact: TargetPin, path: Path, progress: Progress) -> None:
    name = artefact.sdist or ""
    finder = _finder()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    best = None
    try:
        best = finder.find_best_match(f"{artefact.package}=={artefact.version}").best
        if best is None or best.link.filename != name:
            raise NeaptideError(
                f"the index offers {best.link.filename if best else 'no sdist'}", wanted=name,
                todo="Check the pin, and PIP_INDEX_URL if it is set.", where=artefact.described,
            )  # fmt: skip
        with finder.session.get_stream(best.link.normalized) as response, open(partial, "wb") as out:
            size = int(response.headers.get("content-length", 0)) or None
            with progress.bar(name, size) as advance:
                for chunk in response.iter_bytes(_CHUNK):
                    out.write(chunk)
                    advance(len(chunk))
        check_sha256(partial, artefact)
        os.replace(partial, path)
    except NeaptideError:
        raise
    except Exception as error:
        host = urlsplit(best.link.url).hostname if best is not None else "the package index"
        raise NeaptideError(
            f"the download failed ({type(error).__name__}: {error})", wanted=f"{name} from {host}",
            todo="Check the network and run again.", where=artefact.described,
        ) from error  # fmt: skip
    finally:
        partial.unlink(missing_ok=True)
