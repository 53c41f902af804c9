"""The image's scripts, Dockerfile and compose file, and ``verify --image`` with a stand-in for Docker."""

from __future__ import annotations

import hashlib
import http.server
import importlib.util
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from installing import lay_in, make_environment
from neaptide.image import expected_labels
from neaptide.output import Progress
from neaptide.pins import load_lock, load_pin
from neaptide.session import Options, Session
from toy import OTHER_EDIT, PACKAGE, SCALE_EDIT, VERSION, ToyRepository, git, make_checkout, write_files

ROOT = Path(__file__).resolve().parents[2]
IMAGE = ROOT / "scripts" / "image"
SCRIPTS = sorted(p for p in IMAGE.iterdir() if p.is_file() and p.suffix != ".py")
BUILD = ROOT / "scripts" / "build-image"
DIGEST = "sha256:" + "5" * 64
Done = subprocess.CompletedProcess[str]


def run(script: Path, *arguments: str | Path, path: Path | None = None, **variables: str) -> Done:
    """Run a script; ``path`` comes first on PATH, behind it this interpreter's folder."""
    folders = [*([str(path)] if path else []), str(Path(sys.executable).parent), os.environ["PATH"]]
    return subprocess.run(
        [str(script), *map(str, arguments)], env={**os.environ, "PATH": os.pathsep.join(folders), **variables},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def command(folder: Path, name: str, code: str) -> Path:
    """A Python program called ``name`` in ``folder``, which is returned."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!{sys.executable}\n{code}")
    (folder / name).chmod(0o755)
    return folder


# Scripts and files


@pytest.mark.parametrize("script", [*SCRIPTS, BUILD], ids=lambda p: p.name)
def test_scripts_parse_and_stop_at_the_first_failure(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text()
    assert text.startswith("#!/usr/bin/env bash\n# ")
    assert "\nset -euo pipefail\n" in text
    assert os.access(script, os.X_OK)


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions in order, with their text on one line."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(i.split(None, 1)[0], i.split(None, 1)[1]) for i in joined.splitlines() if i.strip()]


INSTALLS = re.compile(
    r"apt-get (update|install .*)|rm -rf /var/lib/apt/lists/\*|python3 -m venv /opt/\w+|/opt/\w+/bin/pip install .*"
)


def test_every_run_installs_packages_or_calls_a_script() -> None:
    called = set()
    for kind, text in instructions():
        for part in re.sub(r"--mount=\S+\s*", "", text).split("&&") if kind == "RUN" else ():
            words = [w for w in shlex.split(part) if not re.match(r"[A-Z]+=", w)]
            if words[0].startswith("/opt/neaptide/scripts/image/"):
                called.add(Path(words[0]).name)
            else:
                assert INSTALLS.fullmatch(part.strip()), part
    assert called == {
        "apply-series", "check-image", "check-toolchain", "install-packages", "make-user", "write-sbom"
    }  # fmt: skip
    assert called < {p.name for p in SCRIPTS}


def test_the_image_serves_as_another_user_than_root_on_a_base_by_digest() -> None:
    stages = {m[2]: m[1] for k, t in instructions() if k == "FROM" and (m := re.fullmatch(r"(\S+) AS (\S+)", t))}
    assert stages["base"] == "${BASE_NAME}@${BASE_DIGEST}"
    assert ("ARG", "BASE_DIGEST") in instructions()
    assert {"base", "packages", "patched", "serve", "test"} <= set(stages)
    users = [t for k, t in instructions() if k == "USER"]
    assert users[0] == users[-1] == "10001"
    entry = [json.loads(t.removeprefix("CMD ")) for k, t in instructions() if k == "ENTRYPOINT"]
    assert [Path(e[0]).name for e in entry] == ["entrypoint"]


def test_what_the_image_copies_is_in_the_build_context() -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for kind, text in instructions():
        if kind == "COPY" and not text.startswith("--from"):
            for source in text.split()[:-1]:
                assert source == "." or source.split("/")[0] in allowed, source
                assert source == "." or list(ROOT.glob(source)), source


def switches() -> ModuleType:
    spec = importlib.util.spec_from_file_location("switches", ROOT / "overlay/vllm/neaptide_switches.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_compose_and_the_table_know_every_switch() -> None:
    module = switches()
    service = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["vllm"]
    given = {k: v for k, v in service["environment"].items() if k.startswith("VLLM_")}
    for name, value in given.items():
        default = re.fullmatch(rf"\$\{{{name}:-(.*)\}}", value)
        assert default is not None, name
        assert module.VARIABLES[name](environment={name: default[1]}) == module.VARIABLES[name](environment={}), name
    rows = set(re.findall(r"^\| `(VLLM_\w+)` \|", (ROOT / "docs/image.md").read_text(), re.MULTILINE))
    assert rows == module.NAMES
    assert service["deploy"]["resources"]["reservations"]["devices"][0]["count"] == 4
    assert service["ipc"] == "host"


def test_labels_are_those_of_the_lock() -> None:
    done = run(IMAGE / "write-labels")
    assert done.returncode == 0, done.stderr
    labels = dict(line.split("=", 1) for line in done.stdout.splitlines())
    version = labels.pop("org.opencontainers.image.version")
    assert f'__version__ = "{version}"' in (ROOT / "scripts/neaptide/__init__.py").read_text()
    assert labels == expected_labels(Session(Options(root=ROOT, build=ROOT / "build"), Progress()))
    lock = load_lock(ROOT, "current")
    assert {t: labels[f"io.neaptide.tree.{t}"] for t in lock} == {t: entry.tree_after for t, entry in lock.items()}
    assert set(labels["io.neaptide.patches"].split(",")) == {f"{t}/{p}" for t, e in lock.items() for p in e.patches}
    data = (ROOT / "patches/pins/current.lock").read_bytes()
    assert labels["io.neaptide.lock.sha256"] == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("script", ["write-labels", "install-packages"])
def test_an_unknown_pin_is_refused(script: str) -> None:
    more = ["--dry-run", "folder"] if script == "install-packages" else []
    done = run(IMAGE / script, "--pin", "../current", *more)
    assert done.returncode == 2
    assert "no pin '../current'; wanted one of current" in done.stderr


def test_the_pins_packages_are_installed() -> None:
    done = run(IMAGE / "install-packages", "--dry-run", "folder")
    wanted = {f"{a.package}=={a.version}" for a in load_pin(ROOT, "current").targets.values()}
    assert set(done.stdout.split()) == wanted


def test_the_entry_point_serves_or_runs(tmp_path: Path) -> None:
    folder = command(tmp_path / "bin", "vllm", "import sys\nprint(sys.argv[1:])\n")
    for given, served in ((["serve", "m"], ["serve", "m"]), (["--help"], ["serve", "--help"]), ([], ["serve"])):
        assert run(IMAGE / "entrypoint", *given, path=folder).stdout == f"{served}\n"
    done = run(IMAGE / "entrypoint", "echo", "served", path=folder, VLLM_NEAPTIDE_PROFILE_WARMUP="0")
    assert (done.stdout, done.stderr) == ("served\n", "VLLM_NEAPTIDE_PROFILE_WARMUP=0\n")


@pytest.fixture
def server() -> Iterator[Callable[[int], str]]:
    """Starts servers that answer with one status; gives their URL."""
    started: list[http.server.ThreadingHTTPServer] = []

    def start(status: int) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status if self.path == "/health" else 404)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        started.append(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=started[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{started[-1].server_port}/health"

    yield start
    for one in started:
        one.shutdown()
        one.server_close()


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_health_is_the_servers_answer_else_that_the_process_lives(server: Callable[[int], str]) -> None:
    def health(url: str, pid: int) -> int:
        return run(
            IMAGE / "healthcheck",
            NEAPTIDE_HEALTH_URL=url,
            NEAPTIDE_HEALTH_PID=str(pid),
            http_proxy="http://127.0.0.1:9",
        ).returncode

    gone = subprocess.Popen([sys.executable, "-c", "pass"])
    gone.wait()
    assert health(server(200), gone.pid) == 0
    assert health(server(503), os.getpid()) == 1
    assert health("http://127.0.0.1:1/health", os.getpid()) == 0
    assert health("http://127.0.0.1:1/health", gone.pid) == 1


def test_a_missing_tool_of_the_toolchain_is_named(tmp_path: Path) -> None:
    for name in ("mktemp", "rm", "bash", "env"):
        found = shutil.which(name)
        assert found is not None
        (tmp_path / name).symlink_to(found)
    done = subprocess.run(
        ["bash", str(IMAGE / "check-toolchain")],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 5
    assert "no nvcc" in done.stderr


# scripts/build-image

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


# neaptide verify --image

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
    assert "patch second is not as the lock has it" in str(report["problems"])


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


# scripts/image/apply-export


@dataclass(frozen=True)
class Export:
    """An exported series of the toy, and a clone of upstream at its base."""

    folder: Path
    clone: Path
    tree: str

    def apply(self, *options: str) -> Done:
        return run(IMAGE / "apply-export", *options, self.folder, self.clone)

    def state(self) -> tuple[str, str]:
        return git(self.clone, "status", "--porcelain"), git(self.clone, "rev-parse", "HEAD")


@pytest.fixture
def export(toy: ToyRepository, tmp_path: Path) -> Export:
    toy.add_overlay("deep.py", "VALUE = 'ü'\n")
    toy.add_patch("first", SCALE_EDIT)
    toy.add_patch("second", OTHER_EDIT, overlay=[{"src": "deep.py", "dest": "deep.py", "mode": "new"}])
    toy.lock()
    checkout = make_checkout(tmp_path / "checkout")
    git(checkout, "remote", "add", "origin", "https://example.org/toy.git")
    clone = tmp_path / "clone"
    shutil.copytree(checkout, clone)
    given = ("--checkout", f"toy={checkout}")
    assert toy.run("apply", *given) == 0
    assert toy.run("export", *given, "--output", str(tmp_path / "export")) == 0
    return Export(tmp_path / "export/toy", clone, git(checkout, "rev-parse", "HEAD^{tree}"))


def test_an_export_gives_the_tree_that_it_promises(export: Export) -> None:
    lock = json.loads((export.folder / "integration.lock.json").read_text())["result"]
    done = export.apply("--patch-sha256", lock["patch_sha256"], "--tree", lock["tree"])
    assert done.returncode == 0, done.stderr
    assert git(export.clone, "write-tree") == export.tree
    assert (export.clone / "toy/deep.py").read_text() == "VALUE = 'ü'\n"
    again = export.apply()
    assert again.returncode == 2
    assert "wanted a clean checkout" in again.stderr


def reworded(export: Export) -> str:
    path = export.folder / "integration.patch"
    path.write_text(path.read_text().replace("'ü'", "'u'"))
    return "integration.patch has sha256"


def reworded_and_listed(export: Export) -> str:
    """A patch and a manifest that agree with each other, and with no lock: the tree tells."""
    reworded(export)
    (export.folder / "integration.lock.json").unlink()
    manifest = json.loads((export.folder / "manifest.json").read_text())
    data = (export.folder / "integration.patch").read_bytes()
    manifest["files"]["integration.patch"] = hashlib.sha256(data).hexdigest()
    (export.folder / "manifest.json").write_text(json.dumps(manifest))
    return f"wanted {export.tree}. The checkout was put back."


def manifest_altered(export: Export) -> str:
    path = export.folder / "manifest.json"
    path.write_text(path.read_text().replace("current", "other"))
    return "manifest.json has sha256"


def single_patch_altered(export: Export) -> str:
    path = next(export.folder.glob("0001-*.patch"))
    path.write_text(path.read_text() + "\n")
    return f"{path.name} has sha256"


def patch_missing(export: Export) -> str:
    (export.folder / "integration.patch").unlink()
    return "integration.patch is listed and not in"


def not_an_export(export: Export) -> str:
    (export.folder / "manifest.json").write_text('{"files": {"../x": "1"}}')
    return "is not what neaptide export writes"


@pytest.mark.parametrize(
    "alter",
    [reworded, reworded_and_listed, manifest_altered, single_patch_altered, patch_missing, not_an_export],
)
def test_an_altered_export_is_refused_and_the_checkout_left(export: Export, alter: Callable[[Export], str]) -> None:
    before = export.state()
    said = alter(export)
    done = export.apply()
    assert done.returncode == 5
    assert said in done.stderr
    assert export.state() == before == ("", before[1])


@pytest.mark.parametrize("option", ["--patch-sha256", "--tree"])
def test_what_the_build_arguments_say_counts(export: Export, option: str) -> None:
    done = export.apply(option, "0" * 40)
    assert done.returncode == 5
    assert option in done.stderr
    assert export.state()[0] == ""


def test_another_base_is_refused(export: Export) -> None:
    write_files(export.clone, {"toy/new.py": ""})
    git(export.clone, "add", "-A")
    git(export.clone, "commit", "-q", "-m", "upstream moves on")
    done = export.apply()
    assert done.returncode == 2
    assert "which the export was made on" in done.stderr
