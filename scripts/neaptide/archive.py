"""Unpacking an sdist so that nothing lands, and no link points, outside its folder."""

from __future__ import annotations

import os
import shutil
import tarfile
import zlib
from pathlib import Path, PurePosixPath

from neaptide.errors import NeaptideError


def unpack(archive: Path, top: str, destination: Path) -> None:
    """Unpack ``archive``, whose only top folder must be ``top``, as the new folder ``destination``.

    All members are checked before anything is written; the folder appears in one step.

    Raises:
        NeaptideError: a truncated or damaged archive, a member outside ``top``, a link that
            leaves it or is absolute, or a member that is neither file, folder nor link.
    """
    try:
        with tarfile.open(archive, "r:gz") as tar:
            members = tar.getmembers()
            for member in members:
                _check(archive, top, member)
            staging = destination.with_name(destination.name + ".unpacking")
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)
            try:
                _extract(tar, members, staging)
                os.replace(staging / top, destination)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        if isinstance(error, OSError) and not isinstance(error, EOFError) and error.errno is not None:
            raise
        raise _refuse(archive, f"a damaged archive ({error})", "a whole gzip-compressed tar") from error


def _extract(tar: tarfile.TarFile, members: list[tarfile.TarInfo], staging: Path) -> None:
    for member in members:
        path = staging / member.name
        path.parent.mkdir(parents=True, exist_ok=True)
        if member.isdir():
            path.mkdir(exist_ok=True)
        elif member.issym():
            os.symlink(member.linkname, path)
        else:
            content = tar.extractfile(member)
            assert content is not None
            with content, open(path, "xb") as out:
                shutil.copyfileobj(content, out, 1 << 20)
            path.chmod(0o755 if member.mode & 0o100 else 0o644)


def _refuse(archive: Path, found: str, wanted: str) -> NeaptideError:
    return NeaptideError(found, wanted=wanted, todo="Do not use this file; get it again.", where=str(archive))


def _check(archive: Path, top: str, member: tarfile.TarInfo) -> None:
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts or path.parts[:1] != (top,):
        raise _refuse(archive, f"the member {member.name!r}", f"members inside {top}/ only")
    if member.issym() or member.islnk():
        base = path.parent if member.issym() else PurePosixPath()
        if PurePosixPath(member.linkname).is_absolute() or not _stays(base, member.linkname, top):
            raise _refuse(archive, f"the link {member.name!r} to {member.linkname!r}", f"links that stay inside {top}/")
    elif not (member.isfile() or member.isdir()):
        raise _refuse(archive, f"the special file {member.name!r}", "files, folders and links only")


def _stays(base: PurePosixPath, link: str, top: str) -> bool:
    parts: list[str] = list(base.parts)
    for part in PurePosixPath(link).parts:
        if part == "..":
            if not parts:
                return False
            parts.pop()
        else:
            parts.append(part)
    return parts[:1] == [top]


def read_member(archive: Path, name: str) -> bytes | None:
    """Bytes of one file of an archive, or None."""
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            if member.name == name and member.isfile():
                content = tar.extractfile(member)
                return content.read() if content is not None else None
    return None
