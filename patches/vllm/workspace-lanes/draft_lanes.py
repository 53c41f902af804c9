"""Configurations with a draft, and managers with its lane."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, get_args
from unittest.mock import MagicMock

import pytest
from workspace_device import Rig


class Stop(Exception):
    """Ends a constructor behind the statement under test."""


def lanes() -> Any:
    return importlib.import_module("vllm.v1.worker.workspace_lanes")


def context() -> Any:
    return importlib.import_module("vllm.v1.worker.workspace_context")


def methods() -> list[str]:
    """Every name of ``SpeculativeMethod``, whose literals are nested."""

    def names(literal: Any) -> Iterator[str]:
        for value in get_args(literal):
            yield from [value] if isinstance(value, str) else names(value)

    return sorted(set(names(importlib.import_module("vllm.config.speculative").SpeculativeMethod)))


def speculation(method: str, draft: str = "AnyModel") -> Any:
    """vLLM's own configuration of a method, without its checks of files."""
    kind = importlib.import_module("vllm.config.speculative").SpeculativeConfig
    config = object.__new__(kind)
    hf_config = SimpleNamespace(model_type=draft, num_nextn_predict_layers=3 if draft == "many_layers" else 1)
    fields = {
        "method": method,
        "num_speculative_tokens": 3,
        "draft_model_config": SimpleNamespace(architectures=[draft], hf_config=hf_config),
    }
    for name, value in fields.items():
        object.__setattr__(config, name, value)
    return config


def configuration(method: str | None, draft: str = "AnyModel", kv_cache_memory_bytes: int | None = None) -> Any:
    config = MagicMock()
    config.speculative_config = None if method is None else speculation(method, draft)
    config.cache_config.kv_cache_memory_bytes = kv_cache_memory_bytes
    return config


def shared_lanes(monkeypatch: pytest.MonkeyPatch, ubatches: int = 1) -> Rig:
    return Rig(monkeypatch, num_lanes=2, num_ubatches=ubatches, eager_in_lane_0=True)
