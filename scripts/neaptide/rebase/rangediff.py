"""The series on the pin's files against the series on the new ones, as ``git range-diff`` shows it."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from neaptide.git import Repo
from neaptide.gitplace import commit_message
from neaptide.outcomes import Plan, Subject
from neaptide.plan import plan_series
from neaptide.rebase.planning import Planned

_DATE = "2000-01-01T00:00:00Z"
# A line on a pair of commits, its numbers padded to the widest; what differs in them stands below, indented by four.
_HEAD = re.compile(r"^ {0,3}(?:\d+|-): +\S+ (?P<sign>[=!<>]) ", re.MULTILINE)


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
        first, second = history(repo, old), history(repo, planned.plan)
        text = repo.run(
            "range-diff", "--no-color", "--no-dual-color", f"{first[0]}..{first[-1]}", f"{second[0]}..{second[-1]}"
        ).decode(errors="replace")
    return "" if all(head["sign"] == "=" for head in _HEAD.finditer(text)) else text


def history(repo: Repo, plan: Plan, folder: str = "") -> list[str]:
    """Commits of the touched files as they are, and after each patch; one that changes nothing has that before it.

    Args:
        folder: where the files stand in the commits.
    """
    empty = repo.text("hash-object", "-w", "-t", "tree", "--stdin", stdin=b"")
    before = {path: plan.subject.read(path) for path in plan.files}
    steps = [({path: data for path, data in before.items() if data is not None}, "upstream")]
    steps += [(dict(patch.files), commit_message(patch)) for patch in plan.patches]
    commits = [repo.commit_tree(empty, [], "empty", _DATE)]
    for files, message in steps:
        here = {str(Path(folder, path)): data for path, data in files.items()}
        scratch = repo.path("scratch-index")
        commits.append(repo.commit_files(commits[-1], here, message, _DATE, scratch) if here else commits[-1])
    return commits[1:]
