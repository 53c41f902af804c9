"""Whether the tree has the patch at all."""

import importlib


def test_there_is_a_phase_for_all_that_a_worker_does() -> None:
    module = importlib.import_module("vllm.v1.worker.memory_ledger")
    assert list(module.PHASES) == ["process", "communicators", "weights", "profile", "kv cache", "end"]
