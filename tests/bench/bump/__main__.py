"""The bump benchmark: the series of pin ``current`` on other releases, against git and GNU patch (``make bump``).

What is compared and what counts as right stands in ``docs/rebase.md``, whose table this program writes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import platform
import shlex
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import table
from baselines import require_tools
from neaptide import jsonfile
from neaptide.bench.results import between_markers
from neaptide.disk import write_bytes
from neaptide.errors import NeaptideError
from neaptide.fetch import sdist_path
from neaptide.output import Progress
from neaptide.pins import DEFAULT_PIN, TargetPin, load_pin
from neaptide.rebase import releases
from rows import Row, rows_of

ROOT = Path(__file__).resolve().parents[3]
RELEASES = (
    "vllm==0.33.0", "vllm==0.32.0", "vllm==0.31.0", "vllm==0.30.0", "vllm==0.29.0", "vllm==0.28.0", "vllm==0.27.1",
    "b12x==1.5.1", "b12x==1.5.0", "b12x==1.3.0", "b12x==1.2.8", "b12x==1.2.6", "b12x==1.1.0",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="bump", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("releases", nargs="*", default=RELEASES, metavar="TARGET==VERSION")
    parser.add_argument("--frozen", action="store_true", help="no network: releases from the cache alone")
    parser.add_argument("--output", type=Path, default=ROOT / "tests/bench/results/bump.json")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs/rebase.md", help="the table goes between its markers")
    parser.add_argument("--dry-run", action="store_true", help="print the table, write nothing")
    args = parser.parse_args()
    try:
        require_tools()
        wanted = artefacts(args.releases, frozen=args.frozen)
    except NeaptideError as error:
        print(f"error: {error}", file=sys.stderr)
        return int(error.code)
    begun = time.monotonic()
    rows = run(wanted)
    text = table.markdown(rows)
    print(text)
    print(f"{len(args.releases)} releases in {time.monotonic() - begun:.0f} s, after the downloads", file=sys.stderr)
    if not args.dry_run:
        write_bytes(args.output, jsonfile.encode(result(rows)))
        between_markers(args.docs, "bump", text)
    return 0 if table.sound(rows) else 1


def artefacts(asked: list[str], *, frozen: bool) -> dict[str, list[TargetPin]]:
    """The sdist of each release, in the user's cache, by target."""
    pins, out = load_pin(ROOT, DEFAULT_PIN).targets, dict[str, list[TargetPin]]()
    for one in map(releases.parse, asked):
        artefact = releases.release(one, pins[one.target], frozen=frozen)
        sdist_path(artefact, frozen=frozen, progress=Progress())
        out.setdefault(one.target, []).append(artefact)
    return out


def run(wanted: dict[str, list[TargetPin]]) -> list[Row]:
    """A process a target; rows in the order of the releases."""
    with ProcessPoolExecutor(len(wanted), mp_context=multiprocessing.get_context("spawn")) as pool:
        parts = pool.map(rows_of, [ROOT] * len(wanted), wanted.keys(), wanted.values())
        return [row for part in parts for row in part]


def result(rows: list[Row]) -> dict[str, object]:
    versions = {
        "ast-grep-py": version("ast-grep-py"), "git": said("git", "--version"), "neaptide": version("neaptide"),
        "patch": said("patch", "--version"), "python": platform.python_version(),
    }  # fmt: skip
    return {
        "command": shlex.join(["python", "tests/bench/bump", *sys.argv[1:]]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"), "device": f"CPU ({platform.machine()})", "rows": rows,
        "schema_version": 1, "versions": versions,
    }  # fmt: skip


def said(*command: str) -> str:
    """The version in the first line that a tool prints."""
    line = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[0]
    return line.split()[-1]


if __name__ == "__main__":
    sys.exit(main())
