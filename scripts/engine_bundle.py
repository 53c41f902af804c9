#!/usr/bin/env python3
"""Carry vLLM's published binaries to a GPU machine without a package index, in parts below a size limit.

Where pip works:     engine_bundle.py pack OUTPUT [--limit-mib 61] [--have NAMES]
On the GPU machine:  engine_bundle.py unpack PART... --to FOLDER   (once for each part, or for all)
                     engine_bundle.py check FOLDER                 (what loads, and what does not and why)

Then put FOLDER and FOLDER/nvidia_cutlass_dsl/dsl_packages on PYTHONPATH and run `neaptide bench engine`. The
wheel's largest pieces that the bench does not need are left out. Standard library only; ``pack`` runs pip.
"""

from __future__ import annotations

import argparse
import io
import lzma
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

MIB = 1 << 20
RECIPE = Path(__file__).with_suffix(".toml")
CHECKS = (
    "torch", "vllm", "vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch", "vllm._flashmla_C",
    "vllm._deepselect_C", "vllm.third_party.deep_gemm", "cutlass", "vllm.v1.worker.gpu_worker",
)  # fmt: skip

# The extensions find libtorch through a torch that is loaded already.
LOAD = """
import contextlib, importlib, sys
sys.path[:0] = {site!r}
with contextlib.suppress(ImportError):
    import torch
importlib.import_module({name!r})
"""


def download(recipe: dict, wheels: Path, have: set[str]) -> list[Path]:
    """The wheels of the recipe for its Python and platforms, but for those that the other machine has."""
    names = [n for n in recipe["wheels"] if n.split("==")[0] not in have]
    platforms = [option for p in recipe["platforms"] for option in ("--platform", p)]
    command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", recipe["python"], "--implementation", "cp", *platforms, "-d", str(wheels), *names]
    subprocess.run(command, check=True)
    return sorted(wheels.glob("*.whl"))


def members(wheel: Path, left_out: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """Files of a wheel, but for those whose path begins with one of ``left_out``."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if not name.endswith("/") and not name.startswith(tuple(left_out)):
                yield name, archive.read(name)


class Parts:
    """Writes numbered ``.tar.xz`` parts, each closed before its compressed size passes the limit."""

    def __init__(self, output: Path, limit_bytes: int, preset: int) -> None:
        self.output, self.limit_bytes, self.preset = output, limit_bytes, preset
        self.written: list[Path] = []
        self._pending: list[tuple[str, bytes]] = []
        self._pending_bytes = 0

    def add(self, name: str, data: bytes) -> None:
        size = len(lzma.compress(data, preset=0))
        if self._pending and self._pending_bytes + size > self.limit_bytes:
            self.close()
        self._pending.append((name, data))
        self._pending_bytes += size

    def close(self) -> None:
        """Write what is pending as one part; refuses a part that is still too large."""
        if not self._pending:
            return
        path = self.output / f"part-{len(self.written) + 1}.tar.xz"
        with tarfile.open(path, "w:xz", preset=self.preset) as tar:
            for name, data in self._pending:
                info = tarfile.TarInfo(name)
                info.size, info.mode = len(data), 0o644
                tar.addfile(info, io.BytesIO(data))
        size = path.stat().st_size
        if size > self.limit_bytes:
            largest = max(self._pending, key=lambda item: len(item[1]))[0]
            sys.exit(f"{path.name} has {size} bytes, wanted at most {self.limit_bytes}; its largest file is {largest}")
        print(f"{path.name}: {size / MIB:.1f} MiB, {len(self._pending)} files")
        self.written.append(path)
        self._pending, self._pending_bytes = [], 0


def pack(output: Path, limit_mib: int, have: set[str], preset: int) -> None:
    """Fetch the wheels and write the parts."""
    recipe = tomllib.loads(RECIPE.read_text())
    output.mkdir(parents=True, exist_ok=True)
    parts = Parts(output, limit_mib * MIB, preset)
    with tempfile.TemporaryDirectory() as folder:
        for wheel in download(recipe, Path(folder), have):
            for name, data in members(wheel, recipe["left_out"]):
                parts.add(name, data)
    parts.close()


def unpack(paths: list[Path], folder: Path) -> None:
    """Unpack parts; every member must stay inside the folder."""
    for path in paths:
        with tarfile.open(path, "r:xz") as tar:
            tar.extractall(folder, filter="data")
        print(f"{path.name}: unpacked")


def check(folder: Path) -> int:
    """Import what the engine needs, each in a process of its own; 1 if something does not load."""
    failed = 0
    site = f"{folder}:{folder}/nvidia_cutlass_dsl/dsl_packages"
    for name in CHECKS:
        code = LOAD.format(site=site.split(":"), name=name)
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        print(f"{name}: {'loads' if done.returncode == 0 else 'does not load: ' + reason}")
        failed += done.returncode != 0
    return int(failed > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    subs = parser.add_subparsers(dest="command", required=True)
    one = subs.add_parser("pack", help="fetch wheels and write parts")
    one.add_argument("output", type=Path)
    one.add_argument("--limit-mib", type=int, default=61)
    one.add_argument("--preset", type=int, default=9, choices=range(10), help="xz preset")
    one.add_argument("--have", nargs="*", default=[], help="packages that the other machine has")
    two = subs.add_parser("unpack", help="unpack parts")
    two.add_argument("parts", type=Path, nargs="+")
    two.add_argument("--to", type=Path, required=True)
    three = subs.add_parser("check", help="say what loads")
    three.add_argument("folder", type=Path)
    args = parser.parse_args()
    if args.command == "pack":
        pack(args.output, args.limit_mib, set(args.have), args.preset)
    elif args.command == "unpack":
        unpack(args.parts, args.to)
    return check(args.folder) if args.command == "check" else 0


if __name__ == "__main__":
    sys.exit(main())
