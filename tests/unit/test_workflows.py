"""The workflows, and the scripts that they call: the GPU tests, and the series against the newest upstream."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from neaptide import gpu_ci

ROOT = Path(__file__).resolve().parents[2]

WORKFLOWS = ROOT / ".github" / "workflows"
with_workflows = pytest.mark.skipif(not WORKFLOWS.is_dir(), reason="an image has no workflows")


def workflow(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((WORKFLOWS / name).read_text())
    return found


def steps_of(name: str) -> list[dict[str, Any]]:
    return [step for job in workflow(name)["jobs"].values() for step in job["steps"]]


@with_workflows
@pytest.mark.parametrize("name", ["gpu.yml", "upstream.yml"])
def test_workflows_call_scripts_of_the_repository_alone(name: str) -> None:
    for step in steps_of(name):
        if "run" not in step:
            assert re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"])
            continue
        program = step["run"].split()[0]
        assert program == "make" or os.access(ROOT / program, os.X_OK), step
        assert "\n" not in step["run"].strip()


@with_workflows
def test_workflows_have_no_more_rights_than_they_need() -> None:
    for name in ("gpu.yml", "upstream.yml"):
        found = workflow(name)
        assert found["permissions"] == {"contents": "read"}
        assert "concurrency" in found
        assert all("timeout-minutes" in job for job in found["jobs"].values())
    rights = {name: job.get("permissions") for name, job in workflow("upstream.yml")["jobs"].items()}
    assert rights == {"check": None, "issue": {"contents": "read", "issues": "write"}}
    assert "pull_request" not in workflow("gpu.yml")[True]


@with_workflows
def test_the_gpu_workflow_checks_the_topology_first_and_both_pins() -> None:
    (job,) = workflow("gpu.yml")["jobs"].values()
    assert job["runs-on"] == ["self-hosted", "linux", "gpu", "rtx-pro-6000-x4"]
    assert job["strategy"]["matrix"]["pin"] == ["current", "r12"]
    calls = [shlex.split(step["run"].replace("${{ matrix.pin }}", "r12")) for step in job["steps"] if "run" in step]
    assert ["--topology" in call for call in calls] == [True, False]
    for call in calls:
        gpu_ci.parser().parse_args(["--root", ".", *call[1 : call.index("${IMAGE:+--image")]])


# The newest upstream


def check_with(folder: Path, code: int) -> tuple[int, str, str]:
    """Exit code, report and output of ``upstream-check`` with a tool that ends with ``code`` for vLLM."""
    tool = folder / "neaptide"
    tool.write_text(
        "#!/bin/bash\nwhile [[ $# -gt 0 ]]; do case $1 in --against) a=$2;; --report) r=$2;; esac; shift; done\n"
        f'echo "report of $a" > "$r"; echo "{{}}"; [[ $a == vllm==newest ]] && exit {code}; exit 0\n'
    )
    tool.chmod(0o755)
    environment = {**os.environ, "NEAPTIDE": str(tool), "GITHUB_OUTPUT": str(folder / "output")}
    done = subprocess.run([ROOT / "scripts/upstream-check", folder / "reports"], env=environment, capture_output=True)
    return done.returncode, (folder / "reports/report.md").read_text(), (folder / "output").read_text()


@pytest.mark.parametrize("code", [3, 4, 5])
def test_a_series_that_does_not_go_on_is_reported(tmp_path: Path, code: int) -> None:
    ended, report, output = check_with(tmp_path, code)
    assert (ended, output) == (0, "issue=true\n")
    assert report.count("report of vllm==newest") == 2
    assert f"## vllm at pin r12 (exit code {code})" in report
    assert "b12x" not in report
    assert len(list((tmp_path / "reports").glob("*.json"))) == 4


@pytest.mark.parametrize(("code", "ended"), [(0, 0), (1, 0), (2, 1)])
def test_what_is_well_or_could_not_be_checked_opens_no_issue(tmp_path: Path, code: int, ended: int) -> None:
    assert check_with(tmp_path, code) == (ended, "", "issue=false\n")


@pytest.mark.parametrize(("number", "call"), [("", "issue create --title"), ("7", "issue edit 7 --body-file")])
def test_one_issue_is_opened_or_updated(tmp_path: Path, number: str, call: str) -> None:
    gh = tmp_path / "gh"
    gh.write_text(f'#!/bin/bash\necho "$*" >> {tmp_path}/calls\n[[ $2 == list ]] && echo "{number}"\nexit 0\n')
    gh.chmod(0o755)
    (tmp_path / "report.md").write_text("é" * 40_000)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run([ROOT / "scripts/upstream-issue", tmp_path / "report.md"], env=environment, check=True)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 2
    assert calls[0].startswith("issue list --state open")
    assert calls[1].startswith(call)
