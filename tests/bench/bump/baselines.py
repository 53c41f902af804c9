"""The line-based tools: the series as ``git format-patch`` writes it, brought to a release patch by patch."""

from __future__ import annotations

import itertools
import os
import re
import resource
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from neaptide.errors import NeaptideError
from neaptide.git import DIFF_OPTIONS, Repo
from neaptide.outcomes import Plan
from neaptide.rebase.rangediff import history

_HUNK = re.compile(r"^@@ .* @@ (?P<where>.*)$", re.MULTILINE)
_ISOLATED = {
    "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "GIT_EDITOR": "true", "GIT_TERMINAL_PROMPT": "0",
    "GIT_AUTHOR_NAME": "bump", "GIT_AUTHOR_EMAIL": "bump@localhost", "GIT_COMMITTER_NAME": "bump",
    "GIT_COMMITTER_EMAIL": "bump@localhost", "LC_ALL": "C",
}  # fmt: skip


@dataclass
class Brought:
    """What a tool made of the series on one release.

    Attributes:
        states: touched files before the series and after each patch, by path inside the package.
        named: by patch, for each file the function names in the headers of the hunks that the tool handed back.
    """

    states: list[dict[str, bytes]]
    cpu_seconds: float = 0.0
    named: list[dict[str, str]] = field(default_factory=list)


def require_tools() -> None:
    """Refuse to compare with tools that are not here."""
    missing = [name for name in ("git", "patch") if shutil.which(name) is None]
    if missing:
        raise NeaptideError(
            f"{' and '.join(missing)} not on PATH", wanted="git and GNU patch, which the series is compared with",
            todo="Install them, then run again.",
        )  # fmt: skip


class Workshop:
    """A repository that holds the pin's files and the series as commits, and each release as a commit.

    Args:
        folder: an empty folder; ``plan`` is the series on the pin's own files.
    """

    def __init__(self, folder: Path, package: str, plan: Plan) -> None:
        self.top, self.package = folder / "tree", package
        self.top.mkdir()
        self.paths = sorted(plan.files)
        self.repo = Repo(self.top)
        self.repo.run("init", "--quiet", "--template=")
        # Hunk headers that name Python functions, as a careful exporter has them.
        attributes = self.top / ".git" / "info" / "attributes"
        attributes.parent.mkdir(exist_ok=True)
        attributes.write_text("*.py diff=python -text\n")
        self.patches = self._export(folder / "series", plan)

    def _export(self, folder: Path, plan: Plan) -> list[Path | None]:
        """One file a patch; None for a patch that changes nothing."""
        out: list[Path | None] = []
        for number, (parent, head) in enumerate(itertools.pairwise(history(self.repo, plan, self.package))):
            path = folder / f"{number:02}.patch"
            if head != parent:
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(self.repo.run("format-patch", "--stdout", *DIFF_OPTIONS, f"{parent}..{head}"))
            out.append(path if head != parent else None)
        return out

    def import_tree(self, files: Mapping[str, bytes]) -> str:
        """A commit without parent of ``files`` of the package."""
        stream = [b"feature done\ncommit refs/heads/import\ncommitter bump <bump@localhost> 0 +0000\ndata 0\n"]
        stream += [b"deleteall\n"]
        for path, data in sorted(files.items()):
            stream.append(f"M 100644 inline {self.package}/{path}\ndata {len(data)}\n".encode() + data + b"\n")
        self.repo.run("update-ref", "-d", "refs/heads/import")
        self.repo.run("fast-import", "--quiet", "--done", stdin=b"".join([*stream, b"done\n"]))
        return self.repo.text("rev-parse", "refs/heads/import")

    def bring(self, commit: str, tool: Callable[[Workshop, Path], None]) -> Brought:
        """Let a tool apply the series on a release, patch after patch, whatever becomes of each."""
        self.repo.run("checkout", "--quiet", "--force", "--detach", commit)
        self.repo.run("clean", "--quiet", "-fdx")
        brought = Brought([self._state()])
        for patch in self.patches:
            if patch is not None:
                begun = _children_seconds()
                tool(self, patch)
                brought.cpu_seconds += _children_seconds() - begun
            brought.named.append(self._rejected())
            brought.states.append(self._state())
        return brought

    def _state(self) -> dict[str, bytes]:
        files = {path: self.top / self.package / path for path in self.paths}
        return {path: file.read_bytes() for path, file in files.items() if file.is_file()}

    def _rejected(self) -> dict[str, str]:
        """Function names in the headers of rejected hunks, by file; the files of rejects are removed."""
        out = {}
        for file in sorted(self.top.rglob("*.rej")):
            path = file.relative_to(self.top / self.package).as_posix().removesuffix(".rej")
            out[path] = "\n".join(_HUNK.findall(file.read_text(errors="replace")))
            file.unlink()
        return out

    def call(self, *command: str) -> int:
        """Exit status of a tool; what it says of a hunk that it hands back is in the file of rejects."""
        keep = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
        done = subprocess.run(
            command, cwd=self.top, env={**keep, **_ISOLATED}, stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
        return done.returncode


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def git_am(shop: Workshop, patch: Path) -> None:
    """``git am -3``; of a conflict upstream's side is kept, and what merged counts."""
    if shop.call("git", "-c", "gc.auto=0", "am", "--quiet", "-3", str(patch)) == 0:
        return
    for path, kept in _unmerged(shop):
        file = shop.top / path
        if kept and file.is_file():
            file.write_bytes(_upstreams_side(file.read_bytes()))
            shop.call("git", "add", "--", path)
        else:
            shop.call("git", "rm", "--quiet", "--force", "--", path)
    merged = shop.call("git", "diff", "--cached", "--quiet")
    if not merged or shop.call("git", "am", "--continue"):
        shop.call("git", "am", "--skip")


def _unmerged(shop: Workshop) -> list[tuple[str, bool]]:
    """Paths in conflict, and whether upstream has the file."""
    out: dict[str, bool] = {}
    for line in shop.repo.run("ls-files", "--unmerged", "-z").split(b"\0"):
        if line:
            meta, path = line.decode().split("\t", 1)
            out[path] = out.get(path, False) or meta.split()[2] == "2"
    return sorted(out.items())


def _upstreams_side(data: bytes) -> bytes:
    """A merged file with upstream's side of every conflict block."""
    out, side = [], ""
    for line in data.splitlines(keepends=True):
        if line.startswith(b"<<<<<<< "):
            side = "upstream"
        elif side and line.startswith(b"||||||| "):
            side = "base"
        elif side and line.rstrip(b"\r\n") == b"=======":
            side = "series"
        elif side and line.startswith(b">>>>>>> "):
            side = ""
        elif side in ("", "upstream"):
            out.append(line)
    return b"".join(out)


def git_apply(shop: Workshop, patch: Path) -> None:
    """``git apply``: a patch that does not fit whole changes nothing."""
    shop.call("git", "apply", "--whitespace=nowarn", str(patch))


def git_apply_reject(shop: Workshop, patch: Path) -> None:
    """``git apply --reject``: each hunk that fits."""
    shop.call("git", "apply", "--whitespace=nowarn", "--reject", str(patch))


def gnu_patch(shop: Workshop, patch: Path) -> None:
    """``patch -F3``: each hunk that fits when up to three lines of its context are left out."""
    shop.call("patch", "-p1", "-F3", "--force", "--no-backup-if-mismatch", "-i", str(patch))


TOOLS: dict[str, Callable[[Workshop, Path], None]] = {
    "git am -3": git_am,
    "git apply --reject": git_apply_reject,
    "git apply": git_apply,
    "patch -F3": gnu_patch,
}
