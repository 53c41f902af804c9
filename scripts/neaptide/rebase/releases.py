"""What ``TARGET==VERSION`` and ``TARGET@COMMIT`` name: an artefact to plan against."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from packaging.version import InvalidVersion, Version

from neaptide.declared import declared_version
from neaptide.errors import NeaptideError
from neaptide.fetch import find_sdist
from neaptide.git import GitError, Repo
from neaptide.pins import TargetPin

NEWEST = "newest"
_ASKED = re.compile(r"^(?P<target>[a-z0-9_-]+)(?P<kind>==|@)(?P<what>[A-Za-z0-9][\w.+/-]*)$")


@dataclass(frozen=True)
class Asked:
    """A target, and a release or (``commit``) a revision of its checkout."""

    target: str
    what: str
    commit: bool

    @property
    def text(self) -> str:
        return f"{self.target}{'@' if self.commit else '=='}{self.what}"


def parse(text: str) -> Asked:
    """``vllm==0.34.0``, ``vllm==newest`` or ``b12x@REVISION``.

    Raises:
        NeaptideError: another form, or a version that is none.
    """
    found = _ASKED.match(text)
    wanted = "TARGET==VERSION, TARGET==newest, or TARGET@REVISION with --checkout"
    if found is None:
        raise NeaptideError(f"{text!r}", wanted=wanted, todo="Check the spelling.")
    asked = Asked(found["target"], found["what"], found["kind"] == "@")
    if not asked.commit and asked.what != NEWEST:
        try:
            Version(asked.what)
        except InvalidVersion as error:
            raise NeaptideError(f"the version {asked.what!r}", wanted=wanted, todo="Check the spelling.") from error
    return asked


def release(asked: Asked, like: TargetPin, *, frozen: bool) -> TargetPin:
    """The sdist of a release, by the index's name and sha256; with ``frozen`` from the cache alone.

    Args:
        like: the entry of the pin that names the package.
    """
    if like.package != asked.target:
        raise NeaptideError(
            f"the pin's {asked.target} is the package {like.package}, at a commit", wanted="a package of PyPI",
            todo="Give --pin current, or a revision with TARGET@REVISION.", where=asked.text,
        )  # fmt: skip
    wanted = "" if asked.what == NEWEST else asked.what
    version, name, sha256 = find_sdist(like.package, wanted, frozen=frozen)
    return msgspec.structs.replace(
        like, version=version, sdist=name, sha256=sha256, repository=None, commit=None, ref=None, note=""
    )


def revision(asked: Asked, repo: Repo, known: Sequence[tuple[str, str]]) -> TargetPin:
    """A commit of a checkout, of the version that it declares, or that its nearest tag has.

    Args:
        known: names and prefixes that the package has had; the commit's are the first whose package it holds.

    Raises:
        NeaptideError: no such revision, no package of a known name, or no version.
    """
    try:
        commit = repo.text("rev-parse", "--verify", "--quiet", f"{asked.what}^{{commit}}")
    except GitError as error:
        raise NeaptideError(
            f"no revision {asked.what!r}", wanted="a commit of that checkout", todo="Fetch it first.",
            where=str(repo.top),
        ) from error  # fmt: skip
    package, prefix = _names_at(repo, commit, known)
    return TargetPin(
        version=_version_at(repo, commit), package=package, prefix=prefix, repository=repo.origin() or None,
        commit=commit, ref=asked.what if asked.what != commit else None,
    )  # fmt: skip


def _version_at(repo: Repo, commit: str) -> str:
    """As setuptools-scm has it where a project leaves its version to the tags, but for the commits since."""
    found = declared_version(None, repo.blob(commit, "pyproject.toml"))
    if not found:
        try:
            found = repo.text("describe", "--tags", "--abbrev=0", commit).removeprefix("v")
        except GitError:
            found = ""
    try:
        return str(Version(found))
    except InvalidVersion as error:
        raise NeaptideError(
            f"{found!r} is the version at {commit[:12]}" if found else f"no version at {commit[:12]}",
            wanted="one in pyproject.toml, or a tag that is one, on a commit at or before it",
            todo="Fetch the tags.", where=str(repo.top),
        ) from error  # fmt: skip


def _names_at(repo: Repo, commit: str, known: Sequence[tuple[str, str]]) -> tuple[str, str]:
    for package, prefix in known:
        if repo.blob(commit, f"{package}/__init__.py") is not None:
            return package, prefix
    raise NeaptideError(
        f"no package at {commit[:12]}", wanted=f"a folder {' or '.join(p for p, _ in known)} with __init__.py",
        todo="Check the checkout.", where=str(repo.top),
    )  # fmt: skip
