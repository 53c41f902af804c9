"""Importing modules of a vLLM tree where not every dependency is installed."""

from __future__ import annotations

import importlib
import sys
import types
from importlib.util import find_spec
from pathlib import Path

_NEEDS_TORCHVISION = ("vllm.models", "vllm.models.glm5next", "vllm.models.glm5next.nvidia")


def load(name: str) -> types.ModuleType:
    """Import a module of vLLM, past the package init of ``vllm.models.glm5next`` without torchvision.

    That init imports the whole model; the indexer module itself does not need it.
    """
    if name.startswith("vllm.models.glm5next.") and find_spec("torchvision") is None:
        spec = find_spec("vllm")
        assert spec is not None
        assert spec.origin is not None
        for package in _NEEDS_TORCHVISION:
            if package not in sys.modules:
                module = types.ModuleType(package)
                module.__path__ = [str(Path(spec.origin).parent.joinpath(*package.split(".")[1:]))]
                sys.modules[package] = module
    return importlib.import_module(name)
