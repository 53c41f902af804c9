"""Git plumbing, isolated from the user's configuration and hooks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from neaptide.errors import NeaptideError

IDENTITY = "neaptide <neaptide@localhost>"
_CONFIG = (
    "safe.directory=*", "core.hooksPath=/dev/null", "core.fsmonitor=false", "core.quotePath=true",
    "core.autocrlf=false", "commit.gpgSign=false", "gc.auto=0", "maintenance.auto=false",
    "core.attributesFile=/dev/null", "i18n.commitEncoding=UTF-8", "i18n.logOutputEncoding=UTF-8",
)  # fmt: skip
DIFF_OPTIONS = ("--binary", "--full-index", "--no-renames", "--no-ext-diff", "--no-textconv", "--no-color")


class GitError(Exception):
    """A git command failed; the text is its stderr."""


@dataclass(frozen=True)
class Entry:
    """A blob in a tree."""

    mode: str
    blob: str


class Repo:
    """A git repository with a work tree."""

    def __init__(self, top: Path) -> None:
        executable = shutil.which("git")
        if executable is None:
            raise NeaptideError(
                "git is not installed", wanted="git on PATH", todo="Install git; apply --installed does without it."
            )
        self.top = top
        self._git = executable

    def run(
        self,
        *args: str,
        stdin: bytes | None = None,
        env: Mapping[str, str] | None = None,
    ) -> bytes:
        """stdout of a git command; GitError when it fails."""
        config = [c for item in _CONFIG for c in ("-c", item)]
        keep = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
        isolated = {
            "GIT_ATTR_NOSYSTEM": "1", "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_TERMINAL_PROMPT": "0",
            "LC_ALL": "C", "TZ": "UTC",
        }  # fmt: skip
        done = subprocess.run(
            [self._git, *config, *args], cwd=self.top, input=stdin, capture_output=True,
            env={**keep, **isolated, **(env or {})}, check=False,
        )  # fmt: skip
        if done.returncode:
            raise GitError(done.stderr.decode(errors="replace").strip() or f"git {args[0]} failed")
        return done.stdout

    def text(self, *args: str, **options: object) -> str:
        return self.run(*args, **options).decode().strip()  # type: ignore[arg-type]

    def is_top(self) -> bool:
        """Whether this folder is the top of a work tree of its own."""
        try:
            found = self.text("rev-parse", "--show-toplevel")
        except (GitError, FileNotFoundError, NotADirectoryError):
            return False
        return Path(found).resolve() == self.top.resolve()

    def path(self, name: str) -> Path:
        """A path of the git directory (worktrees included)."""
        return self.top / self.text("rev-parse", "--git-path", name)

    def head(self) -> str:
        try:
            return self.text("rev-parse", "--verify", "--quiet", "HEAD^{commit}")
        except GitError:
            return ""

    def origin(self) -> str:
        """The URL of the remote named origin, without a login in it; empty without one."""
        if "origin" not in self.text("remote").split():
            return ""
        return re.sub(r"^(\w+://)[^/@]*@", r"\1", self.text("remote", "get-url", "origin"))

    def head_ref(self) -> str:
        """The branch that HEAD names, or ``HEAD`` when detached."""
        try:
            return self.text("symbolic-ref", "--quiet", "HEAD")
        except GitError:
            return "HEAD"

    def tree(self, commit: str) -> str:
        return self.text("rev-parse", f"{commit}^{{tree}}")

    def object_format(self) -> str:
        return self.text("rev-parse", "--show-object-format")

    def exists(self, commit: str) -> bool:
        try:
            self.run("cat-file", "-e", f"{commit}^{{commit}}")
        except GitError:
            return False
        return True

    def is_ancestor(self, older: str, newer: str) -> bool:
        try:
            self.run("merge-base", "--is-ancestor", older, newer)
        except GitError:
            return False
        return True

    def entries(self, commit: str, paths: Sequence[str]) -> dict[str, Entry]:
        """Blobs of ``commit`` at the given paths."""
        out: dict[str, Entry] = {}
        if not paths:
            return out
        listing = self.run("ls-tree", "-z", "--full-tree", commit, "--", *paths)
        for line in listing.split(b"\0"):
            if line:
                meta, name = line.split(b"\t", 1)
                mode, kind, blob = meta.decode().split()
                if kind == "blob":
                    out[name.decode()] = Entry(mode, blob)
        return out

    def blob(self, commit: str, path: str) -> bytes | None:
        try:
            return self.run("cat-file", "blob", f"{commit}:{path}")
        except GitError:
            return None

    def listing(self, commit: str, prefix: str) -> list[str]:
        out = self.run("ls-tree", "-r", "-z", "--name-only", "--full-tree", commit, "--", prefix)
        return [p.decode() for p in out.split(b"\0") if p]

    def blobs(self, commit: str, prefix: str, suffix: str) -> dict[str, bytes]:
        """Contents of all files below ``prefix`` whose path ends with ``suffix``, in one reading."""
        out = self.run("ls-tree", "-r", "-z", "--format=%(objectname) %(path)", "--full-tree", commit, "--", prefix)
        entries = [line.decode().split(" ", 1) for line in out.split(b"\0") if line]
        wanted = [(name, path) for name, path in entries if path.endswith(suffix)]
        read = self.run("cat-file", "--batch", stdin="".join(f"{name}\n" for name, _ in wanted).encode())
        found, at = {}, 0
        for _, path in wanted:
            header_end = read.index(b"\n", at)
            size = int(read[at:header_end].rsplit(b" ", 1)[1])
            found[path] = read[header_end + 1 : header_end + 1 + size]
            at = header_end + 1 + size + 1
        return found

    def untracked(self) -> list[str]:
        """Files that are neither tracked nor ignored."""
        out = self.run("ls-files", "--others", "--exclude-standard", "-z")
        return [p.decode() for p in out.split(b"\0") if p]

    def dirty(self) -> list[str]:
        """Tracked files that differ from HEAD, in the index or the work tree; untracked ones are left out."""
        out = self.run("status", "--porcelain", "-z", "--untracked-files=no", "--no-renames")
        return [line[3:].decode() for line in out.split(b"\0") if line]

    def commit_files(
        self, parent: str, files: Mapping[str, bytes], message: str, date: str, scratch_index: Path
    ) -> str:
        """A commit on ``parent`` in which ``files`` have the given bytes; only objects are written."""
        env = {"GIT_INDEX_FILE": str(scratch_index)}
        scratch_index.with_name(scratch_index.name + ".lock").unlink(missing_ok=True)
        self.run("read-tree", parent, env=env)
        old = self.entries(parent, sorted(files))
        lines = []
        for path in sorted(files):
            blob = self.text("hash-object", "-w", "--stdin", stdin=files[path])
            mode = old[path].mode if path in old else "100644"
            lines.append(f"{mode} {blob}\t{path}\n")
        self.run("update-index", "--index-info", stdin="".join(lines).encode(), env=env)
        tree = self.text("write-tree", env=env)
        return self.commit_tree(tree, [parent], message, date)

    def commit_tree(self, tree: str, parents: Sequence[str], message: str, date: str) -> str:
        name, _, mail = IDENTITY.partition(" <")
        who: dict[str, str] = {}
        for role in ("AUTHOR", "COMMITTER"):
            who |= {f"GIT_{role}_NAME": name, f"GIT_{role}_EMAIL": mail.rstrip(">"), f"GIT_{role}_DATE": date}
        above = [a for p in parents for a in ("-p", p)]
        return self.text("commit-tree", tree, *above, "-F", "-", stdin=message.encode(), env=who)


@contextmanager
def bare_view(repo: Repo) -> Iterator[Repo]:
    """An empty bare repository that borrows the objects of ``repo``, without its user's settings and attributes."""
    with tempfile.TemporaryDirectory(prefix="neaptide-") as folder:
        view = Repo(Path(folder))
        view.run("init", "--quiet", "--bare", "--template=", f"--object-format={repo.object_format()}")
        objects = repo.path("objects").resolve()
        (Path(folder) / "objects" / "info").mkdir(exist_ok=True)
        (Path(folder) / "objects" / "info" / "alternates").write_text(f"{objects}\n")
        yield view
