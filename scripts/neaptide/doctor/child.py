"""``child.py SPEC``: what this interpreter sees of devices and packages, as one marked JSON line.

SPEC is JSON: ``modules`` to look for, ``packages`` to find and to name by version, ``imports`` to really import, and
``symbols`` that the NCCL library is asked for. Runs under any Python that an engine has.
"""

import ctypes
import importlib
import importlib.metadata
import importlib.util
import json
import os
import sys
from typing import Any

sys.path.pop(0)


def said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def spec_of(name: str) -> Any:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None


def package(name: str) -> "dict[str, str]":
    """Where the interpreter would import a package from, and its version; empty where there is none."""
    found = spec_of(name)
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        version = ""
    return {"folder": os.path.dirname(found.origin) if found and found.origin else "", "version": version}


def imported(name: str) -> str:
    """Why a module cannot be imported; empty if it can."""
    try:
        importlib.import_module(name)
    except BaseException as error:
        return said(error)
    return ""


def devices(torch: Any) -> "dict[str, Any]":
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    rows = []
    for index in range(count):
        one = torch.cuda.get_device_properties(index)
        rows.append({
            "index": index, "name": one.name, "capability": [one.major, one.minor], "total_bytes": one.total_memory,
            "mig": " MIG " in f" {one.name} ",
        })  # fmt: skip
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    refused = [[a, b] for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    return {"devices": rows, "peers_refused": refused}


def with_torch() -> "dict[str, Any]":
    try:
        import torch
    except BaseException as error:
        return {"error": said(error) if spec_of("torch") else "not installed"}
    out = {"error": "", "version": torch.__version__, "cuda": torch.version.cuda or ""}
    try:
        return {**out, **devices(torch)}
    except BaseException as error:
        return {**out, "error": said(error)}


def cuda_driver() -> str:
    """The newest CUDA that the driver serves; empty without a driver."""
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return ""
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def nccl(symbols: "list[str]") -> "dict[str, Any]":
    """The library that vLLM would load: by its variable, else by the name, which torch has loaded already."""
    path = os.environ.get("VLLM_NCCL_SO_PATH") or "libnccl.so.2"
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        return {"library": path, "error": str(error), "version": "", "missing": []}
    number = ctypes.c_int()
    if hasattr(library, "ncclGetVersion"):
        library.ncclGetVersion(ctypes.byref(number))
    value = number.value
    version = f"{value // 10000}.{value % 10000 // 100}.{value % 100}" if value else ""
    missing = [name for name in symbols if not hasattr(library, name)]
    return {"library": path, "error": "", "version": version, "missing": missing}


def main() -> None:
    spec = json.loads(sys.argv[1])
    out = {
        "torch": with_torch(),
        "cuda_driver": cuda_driver(),
        "modules": {name: spec_of(name) is not None for name in spec["modules"]},
        "packages": {name: package(name) for name in spec["packages"]},
        "imports": {name: imported(name) for name in spec["imports"]},
        "nccl": nccl(spec["symbols"]),
    }
    print("\nNEAPTIDE" + json.dumps(out))


main()
