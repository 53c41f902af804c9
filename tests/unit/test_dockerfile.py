"""The Dockerfile and the compose file, read."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from pathlib import Path
from types import ModuleType

import yaml
from programs import ROOT, SCRIPTS, instructions

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
    page = (ROOT / "docs/image.md").read_text()
    left_out = re.findall(
        r"`(VLLM_\w+)`", page.split("passes these variables on,\nbut for ")[1].split("; add those")[0]
    )
    assert set(given) | set(left_out) == module.NAMES
    assert not set(given) & set(left_out)
    rows = set(re.findall(r"^\| `(VLLM_\w+)` \|", page, re.MULTILINE))
    assert rows == module.NAMES
    assert service["deploy"]["resources"]["reservations"]["devices"][0]["count"] == 4
    assert service["ipc"] == "host"
