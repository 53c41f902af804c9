"""What ``TARGET==VERSION`` and ``TARGET@COMMIT`` name: an artefact to plan against."""

from __future__ import annotations

import re
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


def revision(asked: Asked, repo: Repo, like: TargetPin) -> TargetPin:
    """A commit of a checkout; its package and prefix are those of the target's known names that it holds.

    Raises:
        NeaptideError: no such revision, no package of a known name, or no version declared there.
    """
    try:
        commit = repo.text("rev-parse", "--verify", "--quiet", f"{asked.what}^{{commit}}")
    except GitError as error:
        raise NeaptideError(
            f"no revision {asked.what!r}", wanted="a commit of that checkout", todo="Fetch it first.",
            where=str(repo.top),
        ) from error  # fmt: skip
    package, prefix = _names_at(repo, commit, asked, like)
    version = declared_version(None, repo.blob(commit, "pyproject.toml")) or like.version
    return TargetPin(
        version=version, package=package, prefix=prefix, repository=repo.origin() or None, commit=commit,
        ref=asked.what if asked.what != commit else None,
    )  # fmt: skip


_KNOWN_NAMES = {"b12x": (("b12x", "B12X"), ("sparkinfer", "SPARKINFER")), "vllm": (("vllm", "VLLM"),)}


def _names_at(repo: Repo, commit: str, asked: Asked, like: TargetPin) -> tuple[str, str]:
    known = _KNOWN_NAMES.get(asked.target, ((like.package, like.prefix),))
    for package, prefix in known:
        if repo.blob(commit, f"{package}/__init__.py") is not None:
            return package, prefix
    raise NeaptideError(
        f"no package at {commit[:12]}", wanted=f"a folder {' or '.join(p for p, _ in known)} with __init__.py",
        todo="Check the checkout.", where=str(repo.top),
    )  # fmt: skip
