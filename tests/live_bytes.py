"""Bytes of torch tensors alive at once, on the meta device: what code allocates, without memory to hold it."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts storages that operators make while it is active; ``peak`` is the most alive at once.

    Storages that exist before (arguments) do not count: pass their tensors to ``but``.
    """

    def __init__(self, *but: torch.Tensor) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.known = {id(t.untyped_storage()): t.untyped_storage() for t in but}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                self.see(tensor.untyped_storage())
        return found

    def see(self, storage: Any) -> None:
        key = id(storage)
        if key in self.alive or key in self.known:
            return
        self.alive[key] = storage.nbytes()
        weakref.finalize(storage, self.alive.pop, key, None)
        self.peak = max(self.peak, sum(self.alive.values()))
