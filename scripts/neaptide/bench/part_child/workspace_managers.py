"""What the cases do with a manager, whichever vLLM made it."""

from __future__ import annotations

from typing import Any

import torch


def new_manager(**lanes: Any) -> Any:
    """A fresh manager on the first GPU, made as the engine's worker makes it."""
    from vllm.v1.worker import workspace

    workspace.reset_workspace_manager()
    torch.cuda.empty_cache()
    workspace.init_workspace_manager(torch.device("cuda", 0), **lanes)
    return workspace.current_workspace_manager()


def request(manager: Any, size_bytes: int) -> torch.Tensor:
    """One uint8 view of ``size_bytes``."""
    view: torch.Tensor = manager.get_simultaneous(((size_bytes,), torch.uint8))[0]
    return view


def commit(manager: Any) -> None:
    """End the planning where the manager has one."""
    if hasattr(manager, "commit"):
        manager.commit()


def held_bytes() -> int:
    """Bytes that the allocator holds of the device, its cache emptied."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_reserved())


class Graph:
    """A captured graph that writes to a view of the workspace and copies a sum out of it."""

    def __init__(self, manager: Any, size_bytes: int):
        self.out = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.graph = torch.cuda.CUDAGraph()
        self._step(request(manager, size_bytes))
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            view = request(manager, size_bytes)
            self.address, self.size = view.data_ptr(), view.numel()
            self._step(view)
        del view

    def _step(self, view: torch.Tensor) -> None:
        view.fill_(3)
        self.out.copy_(view[:: 1 << 12].sum(dtype=torch.int64))

    def replayed(self) -> int:
        self.out.zero_()
        self.graph.replay()
        torch.cuda.synchronize()
        return int(self.out)

    def dangles(self, manager: Any) -> bool:
        """Whether the captured bytes are no longer inside any storage of the manager."""
        return not any(
            storage is not None
            and storage.data_ptr() <= self.address
            and self.address + self.size <= storage.data_ptr() + storage.numel()
            for storage in manager._current_workspaces
        )
