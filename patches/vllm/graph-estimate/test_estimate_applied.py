"""Whether the tree has the patch at all."""

from __future__ import annotations

import importlib


def test_a_quarter_of_many_graphs_is_captured_in_the_profile() -> None:
    memory = importlib.import_module("vllm.v1.worker.graph_memory")
    chosen = memory.sampled(range(64))
    assert (len(chosen), chosen[0], chosen[-1]) == (16, 0, 63)
