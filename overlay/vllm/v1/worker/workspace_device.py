# SPDX-License-Identifier: Apache-2.0
"""The device that workspace lies on, as far as the manager needs it; tests put another object in its place."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch


class DeviceMemory:
    """Allocation, the allocator's cache and the capture state of one device.

    Args:
        device: a CUDA device, or one without an accelerator's allocator (CPU), where nothing is cached.
        alloc_context: makes the context that lasting storage is allocated in.
    """

    def __init__(self, device: torch.device, alloc_context: Callable[[], AbstractContextManager]):
        self._device = device
        self._alloc_context = alloc_context
        self._cuda = torch.device(device).type == "cuda"

    def allocate(self, size: int) -> torch.Tensor:
        """``size`` bytes that last (uint8, uninitialised), in the pool of the alloc context."""
        with self._alloc_context():
            return torch.empty((size,), dtype=torch.uint8, device=self._device)

    def allocate_transient(self, size: int) -> torch.Tensor:
        """``size`` bytes that die with their last view, from the allocator's own pools."""
        return torch.empty((size,), dtype=torch.uint8, device=self._device)

    def release_cached(self) -> None:
        """Give cached blocks back to the device, so that storage just dropped can be part of what comes next."""
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()

    def free_bytes(self) -> int | None:
        """Free bytes of the device; None where it has none to ask for."""
        return torch.accelerator.get_memory_info(self._device)[0] if self._cuda else None

    def capturing(self) -> bool:
        """Whether the current stream is being captured."""
        return self._cuda and torch.cuda.is_current_stream_capturing()
