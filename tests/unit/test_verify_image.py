"""``neaptide verify --image``, with a stand-in for Docker that looks into an environment of this machine."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from installing import lay_in, make_environment
from neaptide.image import expected_labels
from neaptide.output import Progress
from neaptide.session import Options, Session
from programs import command
from toy import OTHER_EDIT, PACKAGE, SCALE_EDIT, VERSION, ToyRepository, write_files

# `docker image inspect` prints what a file holds; `docker run` runs neaptide on an environment of this machine.
FAKE_DOCKER = """
import os, sys
from pathlib import Path
arguments = sys.argv[1:]
image = Path(IMAGE)
if arguments[:4] == ["image", "inspect", "--format", "json"]:
    if arguments[4] != "toy:good":
        sys.exit("Error: No such image: " + arguments[4])
    print((image / "inspect.json").read_text())
else:
    start = ["run", "--rm", "--network", "none", "--entrypoint", "neaptide", "toy:good"]
    assert arguments[:len(start)] == start, arguments
    if (image / "broken").exists():
        sys.exit("exec: neaptide: not found")
    inside = ["--root", str(image / "root"), "--python", str(image / "venv/bin/python")]
    os.execv(sys.executable, [sys.executable, "-m", "neaptide", *arguments[len(start):], *inside])
"""


@dataclass(frozen=True)
class ToyImage:
    """An "image" of the toy: a repository and an environment of its own, and labels in a file."""

    repository: ToyRepository
    folder: Path
    site: Path
    capsys: pytest.CaptureFixture[str]

    def verify(self, *arguments: str) -> tuple[int, dict[str, object]]:
        self.capsys.readouterr()
        code = self.repository.run("verify", "--json", *arguments)
        return code, json.loads(self.capsys.readouterr().out)

    def label(self, labels: Mapping[str, str]) -> None:
        described = [{"Id": "sha256:1", "Config": {"Labels": dict(labels)}}]
        (self.folder / "inspect.json").write_text(json.dumps(described))

    @property
    def labels(self) -> dict[str, str]:
        root = self.repository.root
        return expected_labels(Session(Options(root=root, build=root / "build"), Progress()))

    def problems(self) -> list[str]:
        """The problems that verify lists: one line each for people, too."""
        self.capsys.readouterr()
        code = self.repository.run("verify", "--json", "--image", "toy:good")
        out, err = self.capsys.readouterr()
        problems: list[str] = json.loads(out)["problems"]
        assert code == (5 if problems else 0)
        assert err.splitlines() == ([f"toy:good: {p}" for p in problems] or ["toy:good: verified"])
        return problems


@pytest.fixture
def image(
    toy: ToyRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> ToyImage:
    toy.add_overlay("deep.py", "VALUE = 1\n")
    toy.add_patch("first", SCALE_EDIT)
    toy.add_patch("second", OTHER_EDIT, overlay=[{"src": "deep.py", "dest": "deep.py", "mode": "new"}])
    toy.lock()
    folder = tmp_path / "image"
    shutil.copytree(toy.root, folder / "root")
    python, site = make_environment(folder / "venv")
    write_files(tmp_path / "sdist", PACKAGE)
    lay_in(site, tmp_path / "sdist" / "toy", VERSION)
    assert toy.run("apply", "--installed", "--python", str(python)) == 0
    bin_folder = command(tmp_path / "bin", "docker", FAKE_DOCKER.replace("IMAGE", repr(str(folder))))
    monkeypatch.setenv("PATH", f"{bin_folder}{os.pathsep}{os.environ['PATH']}")
    made = ToyImage(toy, folder, site, capsys)
    made.label(made.labels)
    return made


def test_a_sound_image_is_verified(image: ToyImage) -> None:
    assert image.problems() == []
    code, report = image.verify("--image", "toy:good")
    assert code == 0
    assert report["labels"] == image.labels
    assert report["image_id"] == "sha256:1"


def test_altered_and_missing_labels_are_named(image: ToyImage) -> None:
    labels = image.labels
    right = {name: labels[name] for name in ("io.neaptide.tree.toy", "io.neaptide.patches")}
    image.label({**{n: v for n, v in labels.items() if n != "io.neaptide.patches"}, "io.neaptide.tree.toy": "0" * 40})
    assert image.problems() == [
        f"label io.neaptide.patches is absent, wanted {right['io.neaptide.patches']}",
        f"label io.neaptide.tree.toy is {'0' * 40}, wanted {right['io.neaptide.tree.toy']}",
    ]
    assert right["io.neaptide.patches"] == "toy/first,toy/second"


@pytest.mark.parametrize(
    ("name", "how", "said"),
    [
        ("core.py", "altered", "is not the file of the lock"),
        ("core.py", "absent", "is not the file of the lock"),
        ("deep.py", "altered", "is not the file of the lock"),
        ("deep.py", "absent", "is not the file of the lock"),
        ("__init__.py", "altered", "is not as RECORD has it"),
    ],
)
def test_an_altered_file_inside_is_named(image: ToyImage, name: str, how: str, said: str) -> None:
    path = image.site / "toy" / name
    if how == "absent":
        path.unlink()
    else:
        path.write_text(path.read_text() + "# altered\n")
    problems = image.problems()
    assert [p for p in problems if f"toy/{name} {said}" in p]
    assert all(p.startswith("inside: ") for p in problems)


def test_a_file_that_record_does_not_name_is_named(image: ToyImage) -> None:
    """Whoever adds a module or data to the package; bytecode, which an interpreter writes, is no problem."""
    write_files(
        image.site / "toy", {"extra.py": "X = 1\n", "data/a, b.txt": "x", "__pycache__/core.cpython-1.pyc": "x"}
    )
    (image.site / "toy/link.py").symlink_to(image.site / "toy/nowhere.py")
    names = ("toy/data/a, b.txt", "toy/extra.py", "toy/link.py")
    assert [p.rpartition(": ")[2] for p in image.problems()] == [f"{name} is not in RECORD" for name in names]


@pytest.mark.parametrize("hashed", ["md5=1B2M2Y8AsgTpgAmY7PhCfg", "=abc", "sha256"])
def test_a_hash_of_another_kind_is_a_problem_and_no_end(image: ToyImage, hashed: str) -> None:
    record = next(image.site.glob("toy-*.dist-info")) / "RECORD"
    lines = record.read_text().splitlines()
    changed = [f"toy/__init__.py,{hashed},0" if line.startswith("toy/__init__.py,") else line for line in lines]
    assert changed != lines
    record.write_text("\n".join(changed) + "\n")
    (problem,) = image.problems()
    assert "toy/__init__.py " in problem


def test_a_second_row_of_a_name_counts_too(image: ToyImage) -> None:
    record = next(image.site.glob("toy-*.dist-info")) / "RECORD"
    record.write_text(record.read_text() + "toy/__init__.py,sha256=AAAA,0\n")
    (problem,) = image.problems()
    assert problem.endswith("toy/__init__.py is not as RECORD has it")


def test_a_lock_of_another_artefact_is_refused(image: ToyImage) -> None:
    pin = image.repository.root / "patches/pins/current.toml"
    pin.write_text(re.sub(r'sha256 = "\w+"', f'sha256 = "{"0" * 64}"', pin.read_text()))
    code, report = image.verify("--image", "toy:good")
    assert code == 2
    assert "was made for another artefact of toy" in str(report["error"])


def test_an_image_with_another_lock_and_files_to_it_is_not_verified(image: ToyImage) -> None:
    lock = image.folder / "root/patches/pins/current.lock"
    core = image.site / "toy/core.py"
    was = hashlib.sha256(core.read_bytes()).hexdigest()
    core.write_text(core.read_text() + "# altered\n")
    now = hashlib.sha256(core.read_bytes()).hexdigest()
    lock.write_text(lock.read_text().replace(was, now))
    problems = image.problems()
    assert [p for p in problems if p.startswith("inside: the lock has sha256")]
    assert [p for p in problems if p.endswith("toy/core.py is not the file of the lock")]


def test_a_part_of_the_series_is_not_the_lock(image: ToyImage) -> None:
    python = image.folder / "venv/bin/python"
    assert image.repository.run("apply", "--installed", "--python", str(python), "--patch", "first") == 0
    assert image.verify("--installed", "--python", str(python))[0] == 0
    code, report = image.verify("--installed", "--frozen", "--python", str(python))
    assert code == 5
    assert "patch second is not applied" in str(report["problems"])


def test_without_the_package_the_image_is_not_verified(image: ToyImage) -> None:
    shutil.rmtree(image.site / "toy")
    assert image.problems()
    (image.folder / "broken").touch()
    assert image.problems() == [
        "inside: the check ended with 1 and no report (exec: neaptide: not found)"
    ]  # fmt: skip


def test_no_image_and_no_docker_are_clear_errors(image: ToyImage, monkeypatch: pytest.MonkeyPatch) -> None:
    code, report = image.verify("--image", "toy:other")
    assert code == 2
    assert "No such image: toy:other" in str(report["error"])
    assert image.verify("--image", "toy:good", "--installed")[0] == 2
    monkeypatch.setenv("PATH", "/nowhere")
    code, report = image.verify("--image", "toy:good")
    assert code == 2
    assert "no docker on PATH" in str(report["error"])
