"""Parts of the engine bundle: nothing lost, nothing above the limit, and what is left out stays out."""

from __future__ import annotations

import importlib.util
import os
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "engine_bundle.py"


@pytest.fixture(scope="module")
def bundle() -> ModuleType:
    spec = importlib.util.spec_from_file_location("engine_bundle", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_parts_hold_everything_and_keep_the_limit(bundle: ModuleType, tmp_path: Path) -> None:
    files = {f"pkg/{i}.bin": os.urandom(40_000) for i in range(7)}
    with zipfile.ZipFile(tmp_path / "one.whl", "w") as wheel:
        for name, data in {**files, "pkg/left/out.bin": b"x"}.items():
            wheel.writestr(name, data)
    (tmp_path / "parts").mkdir()
    parts = bundle.Parts(tmp_path / "parts", 100_000, 1)
    for name, data in bundle.members(tmp_path / "one.whl", ["pkg/left/"]):
        parts.add(name, data)
    parts.close()
    assert len(parts.written) == 4
    assert all(p.stat().st_size <= 100_000 for p in parts.written)
    bundle.unpack(parts.written, tmp_path / "site")
    found = {p.relative_to(tmp_path / "site").as_posix(): p.read_bytes() for p in (tmp_path / "site/pkg").glob("*")}
    assert found == files


def test_a_file_above_the_limit_is_named(bundle: ModuleType, tmp_path: Path) -> None:
    parts = bundle.Parts(tmp_path, 10_000, 1)
    parts.add("pkg/large.bin", os.urandom(20_000))
    with pytest.raises(SystemExit, match=r"part-1.tar.xz has .* its largest file is pkg/large.bin"):
        parts.close()


def test_what_does_not_load_is_said(bundle: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text("")
    assert bundle.check(tmp_path) == 1
    shown = capsys.readouterr().out
    assert "vllm: loads" in shown
    assert "vllm._C_stable_libtorch: does not load: ModuleNotFoundError" in shown
