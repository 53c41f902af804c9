"""What surrounds a process: the container that it is in, and its allocator's settings."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Of the first IPC and PID namespaces of a machine (Linux, include/linux/proc_ns.h).
_FIRST = {"ipc": 0xEFFFFFFF, "pid": 0xEFFFFFFC}
_MARKS = ("/.dockerenv", "/run/.containerenv")
# torch reads the first that is set; the second is the older name.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
# Docker's default is 64 MiB, in which NCCL's rings between processes of one machine do not fit.
LEAST_SHM_BYTES = 1 << 30


def container() -> dict[str, Any]:
    """Shared memory, namespaces and the memlock limit. ``None`` where the machine does not say."""
    try:
        shm = os.statvfs("/dev/shm")
        shm_bytes: int | None = shm.f_blocks * shm.f_frsize
    except OSError:
        shm_bytes = None
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return {
        "in_container": any(Path(mark).exists() for mark in _MARKS),
        "ipc_namespace": _namespace("ipc"),
        "memlock_bytes": None if limit == resource.RLIM_INFINITY else limit,
        "pid_namespace": _namespace("pid"),
        "shm_bytes": shm_bytes,
    }


def _namespace(kind: str) -> str:
    """``host`` or ``own``; "" where it cannot be told."""
    try:
        number = os.readlink(f"/proc/self/ns/{kind}").split("[")[-1].rstrip("]")
    except OSError:
        return ""
    return "host" if number == str(_FIRST[kind]) else "own"


def allocator(environment: Mapping[str, str]) -> dict[str, Any]:
    """The settings of torch's caching allocator, as it reads them, and what is wrong with them."""
    named = {name: environment[name] for name in ALLOCATOR if name in environment}
    settings, wrong = _parsed(next(iter(named.values()), ""))
    if len(set(named.values())) > 1:
        wrong.append(f"{' and '.join(named)} differ, and torch reads {next(iter(named))}; unset one")
    return {
        "expandable_segments": settings.get("expandable_segments", "").lower() == "true",
        "settings": settings,
        "variable": next(iter(named), ""),
        "wrong": wrong,
    }


def _parsed(text: str) -> tuple[dict[str, str], list[str]]:
    """``name:value`` parts between commas; a value in brackets has commas of its own."""
    parts, depth = [""], 0
    for letter in text:
        depth += {"[": 1, "]": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    pairs = [part.partition(":") for part in parts if part.strip()]
    wrong = [f"{name.strip()!r} is no name:value" for name, colon, _ in pairs if not colon]
    return {name.strip(): value.strip() for name, colon, value in pairs if colon}, wrong
