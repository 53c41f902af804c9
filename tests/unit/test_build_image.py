"""``scripts/build-image``, with a stand-in for Docker."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from programs import BUILD, IMAGE, ROOT, Done, command, instructions, run
from toy import git

DIGEST = "sha256:" + "5" * 64
FAKE_BUILDX = """
import json, sys
arguments = sys.argv[1:]
if arguments[:3] == ["buildx", "imagetools", "inspect"]:
    print(json.dumps({"digest": "DIGEST"}))
elif arguments[:2] == ["buildx", "build"]:
    print(json.dumps(arguments))
"""


@pytest.fixture
def docker(tmp_path: Path) -> Path:
    return command(tmp_path / "bin", "docker", FAKE_BUILDX.replace("DIGEST", DIGEST))


def build(*arguments: str, path: Path) -> Done:
    """Run build-image; where this is no git repository (in the image), with a revision."""
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, check=False).returncode == 0
    return run(BUILD, *([] if head else ["--revision", "given"]), *arguments, path=path)


def arguments_of(done: Done) -> list[str]:
    assert done.returncode == 0, done.stderr
    return shlex.split(done.stdout)


def test_a_dry_run_prints_the_build(docker: Path) -> None:
    words = arguments_of(build("--dry-run", "--source", "https://example.org/n", path=docker))
    assert words[:3] == ["docker", "buildx", "build"]
    assert {"--provenance=mode=max", "--sbom=true", "--load"} < set(words)
    assert words[words.index("--target") + 1] == "serve"
    values = [w.split("=", 1) for before, w in itertools.pairwise(words) if before == "--build-arg"]
    given = dict(values)
    declared = {t.partition("=")[0] for k, t in instructions() if k == "ARG"}
    assert set(given) - {"SOURCE_DATE_EPOCH"} <= declared
    assert given["BASE_DIGEST"] == DIGEST
    assert ("ARG", f"BASE_NAME={given['BASE_NAME']}") in instructions()
    assert given["SOURCE"] == "https://example.org/n"
    if given["REVISION"] != "given":
        assert given["REVISION"].removesuffix("-dirty") == git(ROOT, "rev-parse", "HEAD")
        assert re.fullmatch(r"\d{4}(-\d\d){2}T\d\d(:\d\d){2}Z", given["CREATED"])
    labels = [w for before, w in itertools.pairwise(words) if before == "--label"]
    assert labels == run(IMAGE / "write-labels").stdout.splitlines()


def test_options_reach_buildx(docker: Path) -> None:
    base = f"example.org/cuda:13@{DIGEST}"
    done = build("--stage", "test", "--tag", "a:b", "--base", base, "--", "--push", path=docker)
    assert done.returncode == 0, done.stderr
    words = json.loads(done.stdout)
    assert words[words.index("--target") + 1] == "test"
    assert words[words.index("--tag") + 1] == "a:b"
    assert "BASE_NAME=example.org/cuda:13" in words
    assert "--push" in words
    assert "--load" not in words


def test_without_docker_a_build_is_refused_and_a_dry_run_says_what_it_would_resolve(tmp_path: Path) -> None:
    none = command(tmp_path / "none", "docker", "raise SystemExit(1)\n")
    done = build(path=none)
    assert done.returncode == 2
    assert done.stderr.startswith("error: no docker with buildx on PATH")
    done = build("--dry-run", path=none)
    assert any(w.startswith("BASE_DIGEST=DIGEST-OF-nvidia/cuda:13") for w in arguments_of(done))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--stage", "other"], "wanted serve or test"),
        (["--base", "cuda:13@latest"], "the base's digest is latest"),
        (["--pin", "other"], "no pin 'other'"),
        (["--quick"], "unknown argument --quick"),
    ],
)
def test_bad_calls_of_the_build(docker: Path, given: list[str], said: str) -> None:
    done = build("--dry-run", *given, path=docker)
    assert done.returncode == 2
    assert said in done.stderr
