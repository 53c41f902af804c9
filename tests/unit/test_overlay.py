"""Overlay modules in a series: new and replacing files, and the drop-in contract."""

from __future__ import annotations

import pytest
from neaptide import contract
from neaptide.contract import broken_promises
from toy import (
    MODULE,
    SCALE_EDIT,
    Upstream,
    commit_all,
    write_files,
)


@pytest.mark.parametrize(
    ("mode", "dest", "changes", "status", "code"),
    [
        ("new", "sub/new.py", [], "clean", 0),
        ("new", "other.py", [], "conflict", 3),
        ("replace", "none.py", [], "conflict", 3),
        ("replace", "core.py", [("return sorted(out)", "return (sorted(out))  # c")], "clean", 0),
        ("replace", "core.py", [("return sorted(out)", "return out")], "drift", 4),
    ],
)
def test_overlay_modes(
    upstream: Upstream, mode: str, dest: str, changes: list[tuple[str, str]], status: str, code: int
) -> None:
    upstream.toy.add_overlay("ours.py", MODULE + "OURS = 1\n")
    upstream.toy.add_patch("ours", overlay=[{"src": "ours.py", "dest": dest, "mode": mode}])
    upstream.run("pins", "--lock", "current")
    if changes:
        upstream.change(*changes)
    assert upstream.statuses() == (code, {"ours": [status]})
    if status == "drift":
        assert "+    return out" in upstream.run("apply")[2]
        assert upstream.run("apply", "--accept-drift", "ours")[0] == 0
    if status in ("clean", "drift"):
        assert (upstream.folder / "toy" / dest).read_text() == MODULE + "OURS = 1\n"


@pytest.mark.parametrize("later", [True, False])
def test_no_edit_of_an_overlaid_file(upstream: Upstream, later: bool) -> None:
    upstream.toy.add_overlay("core.py", MODULE)
    upstream.toy.add_patch("ours", overlay=[{"src": "core.py", "dest": "core.py", "mode": "replace"}])
    upstream.toy.add_patch("list", SCALE_EDIT)
    write_files(upstream.toy.root, {"patches/toy/series": "ours\nlist\n" if later else "list\nours\n"})
    assert upstream.run("pins", "--lock", "current")[0] == (2 if later else 3)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("def scale", "def scaled", "scale is gone"),
        ("def scale(values, factor=2)", "def scale(values)", "scale"),
        ("def scale(values, factor=2)", "def scale(values, factor)", "factor lost its default"),
        ("    def total", "    def sum", "Pool.total is gone"),
        ('*, name="pool"', "*, name", "Pool.__init__"),
        ("LIMIT = 8 * 1024", "LIMIT = 1", ""),
        ("def scale(values, factor=2)", "def scale(values, factor=3, *more, extra=1)", ""),
        ("import math\n", "from math import floor\nclass math: floor = floor\n", ""),
        ("def scale(values, factor=2):", "def scale(:", "does not compile"),
    ],
)
def test_drop_in_contract(upstream: Upstream, old: str, new: str, problem: str) -> None:
    assert MODULE.count(old) == 1
    upstream.toy.add_overlay("core.py", MODULE.replace(old, new))
    upstream.toy.add_patch("ours", overlay=[{"src": "core.py", "dest": "core.py", "mode": "replace"}])
    code, report, _ = upstream.run("pins", "--lock", "current")
    assert code == (5 if problem else 0), report
    assert problem in report.get("error", {"found": ""})["found"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("def f(a, b, /): pass", "def f(a, /): pass"),
        ("def f(a, /): pass", "def f(b, /, c): pass"),
        ("def f(a): pass", "def f(a, /): pass"),
        ("def f(*a): pass", "def f(): pass"),
        ("def f(**k): pass", "def f(): pass"),
        ("def f(a, b=1): pass", "def f(*args): pass"),
        ("def f(*, a=1): pass", "def f(*, a): pass"),
        ("def f(*, a): pass", "def f(b, *, a): pass"),
        ("class f:\n    def __call__(self, a): pass", "class f:\n    def __call__(self): pass"),
        ("class f:\n    LIMIT = 1", "class f:\n    pass"),
        ("class f:\n    @staticmethod\n    def g(a): pass", "class f:\n    def g(a): pass"),
        ("def f(): pass", "async def f(): pass"),
        ("_hidden = 1", ""),
        ("f, g = 1, 2", "g = 2"),
    ],
)
def test_promises_that_are_broken(old: str, new: str) -> None:
    users = {"core.py": old.encode(), "__init__.py": b"from .core import _hidden, f"}
    assert broken_promises("toy", "core.py", old.encode(), new.encode(), users)
    users = {"__init__.py": old.encode(), "sub.py": b"from toy import _hidden, f"}
    assert broken_promises("toy", "__init__.py", old.encode(), new.encode(), users)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("import math\nf = 1", "f = 2"),
        ("def f(a, b): pass", "def f(*args, **kwargs): pass"),
        ("def f(a): pass", "def f(a, *, b=1): pass"),
        ("def f(*, a): pass", "def f(a): pass"),
        ("f = 1", "f, g = 1, 2"),
        ("def f(): pass", "from elsewhere import f"),
        ("f = 1", "try:\n    from fast import f\nexcept ImportError:\n    f = 1"),
    ],
)
def test_promises_that_are_kept(old: str, new: str) -> None:
    users = {"core.py": old.encode(), "a.py": b"from .core import f"}
    assert broken_promises("toy", "core.py", old.encode(), new.encode(), users) == []


def test_other_upstream_files_need_not_be_python() -> None:
    """Packages ship templates and sources of other versions under ``.py`` names."""
    users = {"core.py": b"f = 1", "template.py": b"{{ core }} print 'core'"}
    assert broken_promises("toy", "core.py", b"f = 1", b"f = 2", users) == []


def test_an_upstream_module_that_does_not_parse(upstream: Upstream) -> None:
    """Exit 2 with the file's name for a replaced file, as for an edited one."""
    upstream.toy.add_overlay("core.py", MODULE)
    upstream.toy.add_patch("ours", overlay=[{"src": "core.py", "dest": "core.py", "mode": "replace"}])
    upstream.toy.lock()
    upstream.change(("def scale(", "def scale[[("))
    code, report, _ = upstream.run("apply")
    assert (code, report["error"]["where"]) == (2, "core.py")


@pytest.mark.parametrize(
    ("file", "text"), [("toy/__init__.py", 'assert __name__ == "toy"\n'), ("toy/a.pyi", "x: int\n")]
)
def test_files_of_other_names(upstream: Upstream, file: str, text: str) -> None:
    """A package's ``__init__`` is imported under its own name; a stub is edited, not imported."""
    write_files(upstream.folder, {file: text})
    commit_all(upstream.folder, "one more file")
    edit_ = {"file": file.removeprefix("toy/"), "symbol": "<module>", "import": "import math"}
    upstream.toy.add_patch("imports", edit_)
    assert upstream.run("pins", "--lock", "current")[0] == 0
    assert upstream.run("apply")[0] == 0
    assert (upstream.folder / file).read_text() == "import math\n" + text


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("from vllm.v1.worker.workspace import lock", True),
        ("import vllm.v1.worker.workspace as w", True),
        ("vllm.v1.worker.workspace.lock()", True),
        ("from .workspace import lock", True),
        ("    from . import workspace", True),
        ("if x: from vllm.v1.worker import workspace", True),
        ("from vllm.v1.worker import (\n    other,\n    workspace,\n)", True),
        ("from vllm.v1.worker import other, \\\n    workspace", True),
        ("workspace = 5\nfrom vllm.v1.worker import other\n", False),
        ("from vllm.v1.worker import other\nworkspace()", False),
    ],
)
def test_modules_that_may_import_a_replaced_one_are_read(text: str, found: bool) -> None:
    assert contract._may_import(text.encode(), "vllm.v1.worker.workspace") == found
