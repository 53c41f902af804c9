"""QSA's prefill, which no patch changes, keeps allocating one buffer of logits however long the context is.

vLLM's ``qsa_select_paged_prefill`` takes the whole budget at once and scores every launch into a slice of it. The
series leaves it alone for that reason. These tests pass on the pristine tree, too: they say when the reason is gone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from real import Trees, run_python

MIB, ROWS, PAGE, RATIO, CONTEXTS = 1 << 20, 256, 64, 4, (3072, 12_288, 86_016, 262_144)
# argv: rows, page size, pages of a request, compression, contexts. The real selection on a CPU, without its kernels:
# the one that scores leaves its output alone, the one that ranks notes the logits that it gets. Prints JSON at the end.
PROGRAM = """
import importlib, json, sys
from types import SimpleNamespace
import torch
from torch.utils._python_dispatch import TorchDispatchMode

rows, page, pages, ratio, *contexts = map(int, sys.argv[1:])
qsa = importlib.import_module("vllm.models.qwen4_exp.nvidia.ops.qsa_indexer")

class Made(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.storages = {}
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not func.is_view:
            self.storages[out.untyped_storage().data_ptr()] = (out.untyped_storage().nbytes(), str(out.dtype), out)
        return out

class Kernel:
    def __getitem__(self, grid):
        return lambda *args, **kwargs: None

ranked = []
def rank(logits, *rest):
    ranked.append((logits.untyped_storage().data_ptr(), *logits.shape, str(logits.dtype)))
torch.ops._C = SimpleNamespace(cooperative_topk=rank, persistent_topk=rank)
qsa._qsa_mqa_paged_prefill_kernel = Kernel()
q, cache = torch.zeros(rows, 2, 8), torch.zeros(2, page, 1, 8)
table = torch.zeros(1, pages, dtype=torch.int32)
starts, visible = torch.tensor([0, rows], dtype=torch.int32), torch.ones(rows, dtype=torch.int32)
said = []
for context in contexts:
    ranked.clear()
    chosen = torch.zeros(rows, 16, dtype=torch.int32)
    with Made() as made:
        qsa.qsa_select_paged_prefill(
            q, cache, table, starts, visible, 16 * ratio, ratio, rows, chosen, context
        )
    said.append({
        "allocated": sorted((size, dtype) for size, dtype, _ in made.storages.values()),
        "logits": sorted({made.storages[where][0] for where, *_ in ranked if where in made.storages}),
        "buffers": len({where for where, *_ in ranked}),
        "launches": [shape for _, *shape in ranked],
    })
print("said" + json.dumps(said))
"""
KINDS = ("pristine", "patched")


def prefills(
    tree: Path, monkeypatch: pytest.MonkeyPatch, budget_mb: int, contexts: tuple[int, ...] = CONTEXTS
) -> list[Any]:
    """What a prefill of ``ROWS`` rows allocates and scores at each context; the page table holds the longest."""
    monkeypatch.setenv("VLLM_SPARSE_INDEXER_MAX_LOGITS_MB", str(budget_mb))
    pages = -(-max(contexts) // (PAGE * RATIO))
    numbers = map(str, (ROWS, PAGE, pages, RATIO, *contexts))
    done = run_python(["-c", PROGRAM, *numbers], tree)
    said = [line for line in done.stdout.splitlines() if line.startswith("said")]
    assert len(said) == 1, done.stdout + done.stderr
    found: list[Any] = json.loads(said[0].removeprefix("said"))
    return found


def tree_of(trees: dict[str, Trees], kind: str) -> Path:
    return {"pristine": trees["current"].pristine, "patched": trees["current"].patched}[kind] / "vllm"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget_mb", [1, 2])
def test_logits_are_one_buffer_of_the_budget(
    trees: dict[str, Trees], kind: str, budget_mb: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shorter contexts score all rows at once and longer ones by pieces, into one allocation of the same bytes."""
    found = prefills(tree_of(trees, kind), monkeypatch, budget_mb)
    for context, one in zip(CONTEXTS, found, strict=True):
        width = context // RATIO
        assert one["logits"] == [budget_mb * MIB]
        assert one["buffers"] == 1
        assert {shape[1] for shape in one["launches"]} == {width}
        assert sum(shape[0] for shape in one["launches"]) == ROWS
        assert len(one["launches"]) == -(-ROWS // (budget_mb * MIB // (width * 4)))
    assert len({len(one["launches"]) for one in found}) > 2
    # Nothing else that it allocates grows, either.
    assert len({str(one["allocated"]) for one in found}) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_longer_than_the_budget_takes_the_longest_row(
    trees: dict[str, Trees], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound is then the width of the page table, which is a constant of the deployment, too."""
    found = prefills(tree_of(trees, kind), monkeypatch, 1, (8192, 65_536, 4 * MIB))
    assert [one["logits"] for one in found] == [[4 * MIB]] * 3
    assert [one["buffers"] for one in found] == [1] * 3
