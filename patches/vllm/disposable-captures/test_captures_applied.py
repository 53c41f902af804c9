"""Whether the tree has the patch at all."""

from __future__ import annotations

import importlib


def test_a_scope_without_participants_opens_and_closes() -> None:
    scopes = importlib.import_module("vllm.distributed.capture_scopes")
    assert not scopes.in_disposable_capture()
    with scopes.disposable_captures():
        assert scopes.in_disposable_capture()
    assert not scopes.in_disposable_capture()
