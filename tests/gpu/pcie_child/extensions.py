"""b12x 1.1 compiles CUDA sources when a pool is made; this makes trees with equal sources share what is built."""

from __future__ import annotations

import hashlib
import importlib
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

MODULES = ("pcie_dcp_a2a", "pcie_oneshot", "pcie_dma")


def _home() -> Path:
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR", Path(tempfile.gettempdir()) / "pcie-child-extensions"))


def _load_shared(load: Callable[..., Any], *, name: str, sources: list[str], **flags: Any) -> Any:
    """torch's ``load`` on a copy of the source, in a folder named after its text: ninja compares paths."""
    source = Path(sources[0])
    files = [source, *sorted(source.parent.glob("*.h"))]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    folder = _home() / f"{name}-{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        copy = folder / file.name
        if not copy.exists():
            draft = folder / f"{file.name}.{os.getpid()}"
            draft.write_bytes(file.read_bytes())
            draft.replace(copy)
    return load(name=name, sources=[str(folder / source.name)], build_directory=str(folder), **flags)


def share() -> list[Any]:
    """Make the modules that compile something do it in shared folders, for this GPU only. Those modules."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", f"{major}.{minor}")
    found = [importlib.import_module(f"b12x.comm.pcie.{name}") for name in MODULES]
    compiling = [module for module in found if hasattr(module, "load")]
    for module in compiling:
        vars(module)["load"] = partial(_load_shared, vars(module)["load"])
    return compiling


def build() -> int:
    modules = share()
    with ThreadPoolExecutor(len(MODULES)) as pool:
        for module, made in zip(modules, pool.map(lambda m: m._load_extension(), modules), strict=True):
            print(f"{module.__name__}: {made.__file__}", flush=True)
    if not modules:
        print("this b12x compiles no CUDA sources")
    return 0
