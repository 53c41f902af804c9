"""Unpacking an sdist so that nothing lands, and no link points, outside its folder."""

from __future__ import annotations

import gzip
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
        NeaptideError: a truncated or damaged archive, a member outside ``top``, a link that leaves
            it, is absolute or leads through another link, a member below a link or a file, a repository's
            own folder, or a member that is neither file, folder nor link.
    """
    try:
        with tarfile.open(archive, "r:gz") as tar:
            members = tar.getmembers()
            _read_to_the_end(tar)
            _check_all(archive, top, members)
            staging = destination.with_name(destination.name + ".unpacking")
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)
            try:
                _extract(tar, members, staging)
                os.replace(staging / top, destination)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _refuse(archive, f"a damaged archive ({error})", "a whole gzip-compressed tar") from error


def _read_to_the_end(tar: tarfile.TarFile) -> None:
    """Reach the checksum of the compressed stream, which lies behind the last member."""
    stream = tar.fileobj
    assert stream is not None
    while stream.read(1 << 20):
        pass


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


def _check_all(archive: Path, top: str, members: list[tarfile.TarInfo]) -> None:
    links = {PurePosixPath(m.name) for m in members if m.issym()}
    kinds: dict[PurePosixPath, str] = {}
    for member in members:
        path = PurePosixPath(member.name)
        _check_place(archive, top, member, path)
        kind = "folder" if member.isdir() else "link" if member.issym() else "file"
        if path in kinds and not kind == kinds[path] == "folder":
            raise _refuse(archive, f"the member {member.name!r} twice", "each member once")
        for parent in path.parents:
            if parent in links or kinds.get(parent, "folder") != "folder":
                raise _refuse(archive, f"{member.name!r} below a link or a file", "folders above every member")
        if member.issym() and not _stays(path.parent, member.linkname, top, links):
            raise _refuse(archive, f"the link {member.name!r} to {member.linkname!r}", f"links that stay inside {top}/")
        if member.islnk() and kinds.get(PurePosixPath(member.linkname)) != "file":
            raise _refuse(archive, f"the link {member.name!r} to {member.linkname!r}", "a link to an earlier file")
        kinds[path] = kind
    if not any(p != PurePosixPath(top) for p in kinds) or kinds.get(PurePosixPath(top), "folder") != "folder":
        raise _refuse(archive, "no file inside its top folder", f"a source tree in {top}/")


def _check_place(archive: Path, top: str, member: tarfile.TarInfo, path: PurePosixPath) -> None:
    if path.is_absolute() or ".." in path.parts or path.parts[:1] != (top,):
        raise _refuse(archive, f"the member {member.name!r}", f"members inside {top}/ only")
    if any(part.lower() == ".git" for part in path.parts):
        raise _refuse(archive, f"the member {member.name!r}", "a source tree without a repository in it")
    if not (member.isfile() or member.isdir() or member.issym() or member.islnk()):
        raise _refuse(archive, f"the special file {member.name!r}", "files, folders and links only")


def _stays(base: PurePosixPath, link: str, top: str, links: set[PurePosixPath]) -> bool:
    """Whether a link's target lies inside ``top`` without leading through another link."""
    if PurePosixPath(link).is_absolute():
        return False
    here = base
    for part in PurePosixPath(link).parts:
        if here in links or (part == ".." and here == PurePosixPath()):
            return False
        here = here.parent if part == ".." else here / part
    return here.parts[:1] == (top,)
