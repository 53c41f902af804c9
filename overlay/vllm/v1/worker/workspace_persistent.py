# SPDX-License-Identifier: Apache-2.0
"""Resources of a slot that are made once and kept as long as its manager."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar, cast

import torch

T = TypeVar("T")


class PersistentResources:
    """What one (ubatch, lane) keeps, by key."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, object] = {}

    def get(self, key: Hashable, factory: Callable[[], T], *, locked: bool) -> T:
        """The resource of ``key``, made by ``factory`` if there is none yet.

        Raises:
            AssertionError: there is none, and the workspace is locked.
        """
        if key not in self._kept:
            if locked:
                raise AssertionError(
                    f"Workspace is locked but {key!r} was not allocated during warmup for the current ubatch and lane."
                )
            self._kept[key] = factory()
        return cast(T, self._kept[key])

    @property
    def tensor_bytes(self) -> int:
        """Bytes of the resources that are tensors."""
        return sum(r.untyped_storage().nbytes() for r in self._kept.values() if isinstance(r, torch.Tensor))
