#!/usr/bin/env python3
"""What a pin says to an image build: ``requirements`` for pip, or ``labels``.

With the standard library alone, for it runs before anything is installed.

    pinned.py requirements PIN     package==version of every target, one a line
    pinned.py labels PIN           io.neaptide.* labels of the pin and its lock, NAME=VALUE, one a line

Exit codes: 0 done; 2 no such pin, no lock, or a lock that was made for other artefacts.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PINS = ROOT / "patches" / "pins"


def load_pin(name: str) -> dict[str, Any]:
    path = PINS / f"{name}.toml"
    if not re.fullmatch(r"[\w.-]+", name) or not path.is_file():
        names = ", ".join(sorted(p.stem for p in PINS.glob("*.toml")))
        sys.exit(refusal(f"no pin {name!r}", f"one of {names}", "Check the spelling."))
    return tomllib.loads(path.read_text(encoding="utf-8"))["targets"]


def refusal(found: str, wanted: str, todo: str) -> int:
    print(f"error: {found}; wanted {wanted}. {todo}", file=sys.stderr)
    return 2


def requirements(name: str) -> list[str]:
    targets = load_pin(name)
    for target, entry in targets.items():
        if "sdist" not in entry:
            sys.exit(refusal(f"{target} of {name} is a git commit", "a release", "Choose another pin."))
    return [f"{entry['package']}=={entry['version']}" for _, entry in sorted(targets.items())]


def series(target: str) -> list[str]:
    lines = (ROOT / "patches" / target / "series").read_text(encoding="utf-8").splitlines()
    return [name for line in lines if (name := line.partition("#")[0].strip())]


def labels(name: str) -> dict[str, str]:
    """Labels of a pin; ``neaptide verify --image`` expects the same from its own reading of both files."""
    targets = load_pin(name)
    path = PINS / f"{name}.lock"
    if not path.is_file():
        sys.exit(refusal(f"no {path.name}", "the pin's lock", f"Run `neaptide pins --lock {name}`."))
    data = path.read_bytes()
    locked = json.loads(data)["targets"]
    found = {"io.neaptide.pin": name, "io.neaptide.lock.sha256": hashlib.sha256(data).hexdigest()}
    patches = []
    for target, entry in sorted(targets.items()):
        lock = locked.get(target)
        if lock is None or any(lock["artefact"].get(key) != entry.get(key) for key in ("sha256", "commit")):
            sys.exit(refusal(f"{path.name} is not of this {target}", "a lock of the pin", "Run `make locks`."))
        found[f"io.neaptide.tree.{target}"] = lock["tree_after"]
        patches += [f"{target}/{patch}" for patch in series(target) if patch in lock["patches"]]
    return {**found, "io.neaptide.patches": ",".join(patches)}


def main(arguments: list[str]) -> int:
    if len(arguments) != 2 or arguments[0] not in ("requirements", "labels"):
        return refusal(f"the arguments {arguments}", "requirements PIN, or labels PIN", "See the head of this file.")
    what, name = arguments
    if what == "requirements":
        print("\n".join(requirements(name)))
    else:
        print("\n".join(f"{key}={value}" for key, value in sorted(labels(name).items())))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
