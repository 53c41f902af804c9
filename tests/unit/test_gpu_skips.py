"""Which skips of a GPU run are faults, and that every reason of tests/gpu is known."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpu_standins import GPU, host
from neaptide.errors import NeaptideError
from neaptide.gpu_skips import DSA_INDEXER, KINDS, NSA_INDEXER, Host, fault_of, read_outcome

NOTHING = Host(0, (0, 0), {}, {})
SKIPS = [
    ("torch is not installed beside this Python", NOTHING, host()),
    ("vLLM is not installed beside this Python", NOTHING, host()),
    ("torch and vLLM are not installed beside this Python", NOTHING, host()),
    ("not installed beside this Python: cutlass, triton", NOTHING, host()),
    ("torch sees no CUDA device", NOTHING, host(1)),
    ("two CUDA devices are needed, and torch sees 1", host(1), host(2)),
    ("4 CUDA devices are needed, and torch sees 2", host(2), host(4)),
    ("NEAPTIDE_TEST_B12X_UPSTREAM and NEAPTIDE_TEST_B12X_PATCHED must name trees of b12x",
     host(NEAPTIDE_TEST_B12X_PATCHED="/a"), host(NEAPTIDE_TEST_B12X_PATCHED="/a", NEAPTIDE_TEST_B12X_UPSTREAM="/b")),
    ("NEAPTIDE_TEST_VLLM_PATCHED must name trees", host(), host(NEAPTIDE_TEST_VLLM_PATCHED="/a")),
    ("NEAPTIDE_TEST_B12X_UPSTREAM names no tree", host(), host(NEAPTIDE_TEST_B12X_UPSTREAM="/a")),
    ("the scorers need compute capability 12.x, and this device has 9.0", host(1, (9, 0)), host(1, (12, 1))),
    ("needs a CUDA device of compute capability 9.0", host(), host(1, (9, 0))),
    ("no patched b12x on PYTHONPATH", host(), host(NEAPTIDE_TEST_B12X_PATCHED="/a")),
    ("FlashAttention 3 is not there: built without it", host(), host(1, (9, 0))),
    ("FlashAttention is not there: No module named 'vllm._vllm_fa3_C'", host(), host(1, (9, 0))),
]  # fmt: skip


@pytest.mark.parametrize(("reason", "without", "having"), SKIPS)
def test_a_skip_is_a_fault_where_the_host_has_what_it_wants(reason: str, without: Host, having: Host) -> None:
    assert fault_of(reason, without) == ""
    assert fault_of(reason, having) == "this host could have run it"


@pytest.mark.parametrize(
    ("reason", "folder", "other"),
    [
        ("no tree with b12x.attention.nsa_indexer: set NEAPTIDE_TEST_B12X_PATCHED", NSA_INDEXER, DSA_INDEXER),
        ("this b12x prepares no plans", DSA_INDEXER, NSA_INDEXER),
    ],
)
def test_a_skip_by_the_version_of_b12x(tmp_path: Path, reason: str, folder: str, other: str) -> None:
    for name in (folder, other):
        (tmp_path / name.split("/")[-1] / name).mkdir(parents=True)
    lacking, having = (str(tmp_path / name.split("/")[-1]) for name in (other, folder))
    assert fault_of(reason, host(NEAPTIDE_TEST_B12X_PATCHED=lacking)) == ""
    assert fault_of(reason, host(NEAPTIDE_TEST_B12X_PATCHED=having)) != ""


def test_an_unknown_reason_is_a_fault_on_every_host() -> None:
    assert "no known kind" in fault_of("it rained", NOTHING)
    assert "no known kind" in fault_of("torch sees no CUDA device, or so", NOTHING)


EXAMPLES = {
    "torch.cuda.device_count()": "1", "world": "4", "' and '.join(unset)": "NEAPTIDE_TEST_A and NEAPTIDE_TEST_B",
    "', '.join(absent)": "torch, cutlass", "PACKAGE": "b12x.attention.nsa_indexer",
}  # fmt: skip


def reasons(tree: ast.AST) -> Iterator[str]:
    """What the functions that look for obstacles return, and constants that tests skip with; examples for values."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.strip("_") in ("missing", "without_kernels"):
            returned = [r.value for r in ast.walk(node) if isinstance(r, ast.Return) and r.value is not None]
            yield from (text for value in returned for text in texts(value))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.skip":
            yield from texts(node.args[0])
        if isinstance(node, ast.keyword) and node.arg == "reason":
            yield from texts(node.value)


def texts(value: ast.expr) -> Iterator[str]:
    if isinstance(value, ast.IfExp):
        yield from (*texts(value.body), *texts(value.orelse))
    elif isinstance(value, ast.Constant) and value.value:
        yield str(value.value)
    elif isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "format":
        yield ast.literal_eval(value.func.value).replace("{}", "9")
    elif isinstance(value, ast.JoinedStr):
        yield "".join(
            EXAMPLES.get(ast.unparse(part.value), "why")
            if isinstance(part, ast.FormattedValue)
            else ast.literal_eval(part)
            for part in value.values
        )


@pytest.mark.parametrize("file", sorted(p.name for p in GPU.glob("*.py")))
def test_every_reason_that_tests_give_is_of_a_known_kind(file: str) -> None:
    found = list(reasons(ast.parse((GPU / file).read_text())))
    assert [text for text in found if "no known kind" in fault_of(text, NOTHING)] == []


def test_the_reasons_are_found() -> None:
    found = [text for path in GPU.glob("*.py") for text in reasons(ast.parse(path.read_text()))]
    kinds = {kind.pattern.pattern for kind in KINDS for text in found if kind.pattern.fullmatch(text)}
    assert {kind.pattern.pattern for kind in KINDS} == kinds


JUNIT = """<?xml version="1.0"?><testsuites><testsuite name="pytest">
<testcase classname="tests.gpu.test_a" name="test_runs"/>
<testcase classname="tests.gpu.test_a" name="test_fails"><failure message="no"/></testcase>
<testcase classname="tests.gpu.test_a" name="test_breaks"><error message="no"/></testcase>
<testcase classname="tests.gpu.test_a" name="test_needs_four">
<skipped type="pytest.skip" message="4 CUDA devices are needed, and torch sees 2">x.py:1: ...</skipped></testcase>
<testcase classname="tests.gpu.test_a" name="test_odd"><skipped message="it rained"/></testcase>
</testsuite></testsuites>"""


def test_a_junit_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "junit.xml").write_text(JUNIT)
    found = read_outcome(tmp_path / "junit.xml", host(2))
    assert (found.tests, found.failed) == (5, ("tests.gpu.test_a::test_fails", "tests.gpu.test_a::test_breaks"))
    assert [skip.test.split("::")[1] for skip in found.skips] == ["test_needs_four", "test_odd"]
    assert [(skip.reason, skip.test) for skip in found.faults] == [("it rained", "tests.gpu.test_a::test_odd")]
    for text in (None, "<testsuites"):
        (tmp_path / "junit.xml").unlink() if text is None else (tmp_path / "junit.xml").write_text(text)
        with pytest.raises(NeaptideError, match="no JUnit file"):
            read_outcome(tmp_path / "junit.xml", host())
