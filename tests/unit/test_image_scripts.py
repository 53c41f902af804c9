"""The image's scripts, run without Docker."""

from __future__ import annotations

import hashlib
import http.server
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from neaptide.image import expected_labels
from neaptide.output import Progress
from neaptide.pins import load_lock, load_pin
from neaptide.session import Options, Session
from programs import BUILD, IMAGE, ROOT, SCRIPTS, command, run


@pytest.mark.parametrize("script", [*SCRIPTS, BUILD], ids=lambda p: p.name)
def test_scripts_parse_and_stop_at_the_first_failure(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text()
    assert text.startswith("#!/usr/bin/env bash\n# ")
    assert "\nset -euo pipefail\n" in text
    assert os.access(script, os.X_OK)


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
