"""The series on the pin's files against the series on the new ones, as ``git range-diff`` shows it."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from neaptide.git import Repo
from neaptide.gitplace import commit_message
from neaptide.outcomes import Plan, Status, Subject
from neaptide.plan import plan_series
from neaptide.rebase.planning import Planned

_DATE = "2000-01-01T00:00:00Z"


def range_diff(planned: Planned) -> str:
    """Touched files only: two histories in a repository that is thrown away. Empty where nothing changed."""
    base = planned.base
    subject = Subject(
        target=planned.plan.subject.target, version=base.lock.artefact.version, names=base.lock.artefact.names,
        read=base.files.read, guards=None,
    )  # fmt: skip
    old = plan_series(subject, [p.patch for p in planned.plan.patches])
    with tempfile.TemporaryDirectory(prefix="neaptide-") as folder:
        repo = Repo(Path(folder))
        repo.run("init", "--quiet", "--template=")
        first, second = _history(repo, old), _history(repo, planned.plan)
        text = repo.run(
            "range-diff", "--no-color", "--no-dual-color", f"{first[0]}..{first[1]}", f"{second[0]}..{second[1]}"
        )
    return _unless_equal(text.decode(errors="replace"))


def _history(repo: Repo, plan: Plan) -> tuple[str, str]:
    """A commit of the touched files as they are, and the last of one commit a patch on it."""
    empty = repo.text("hash-object", "-w", "-t", "tree", "--stdin", stdin=b"")
    root = repo.commit_tree(empty, [], "empty", _DATE)
    touched = sorted(plan.files)
    before = {path: plan.subject.read(path) for path in touched}
    there = {path: data for path, data in before.items() if data is not None}
    base = head = _commit(repo, root, there, "upstream")
    for patch in plan.patches:
        if patch.files and patch.status not in (Status.RETIRED, Status.SUPERSEDED, Status.NOT_APPLICABLE):
            head = _commit(repo, head, patch.files, commit_message(patch))
    return base, head


def _commit(repo: Repo, parent: str, files: Mapping[str, bytes], message: str) -> str:
    return repo.commit_files(parent, files, message, _DATE, repo.top / "scratch-index")


def _unless_equal(text: str) -> str:
    """Nothing, if every patch is the same on both sides."""
    heads = [line for line in text.splitlines() if line[:1].strip()]
    return "" if all(" = " in line for line in heads) else text
