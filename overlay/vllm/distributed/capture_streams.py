# SPDX-License-Identifier: Apache-2.0
"""The streams of graph captures, the same ones in a throwaway capture and in the real one.

cuBLAS keeps a workspace for every stream that it was called on (32 MiB on Hopper). ``graph_capture`` makes a
new stream each time, so that the workspaces of the throwaway capture stay unused and those of the real one are
in no estimate. In a pass the n-th ``graph_capture`` has the n-th stream, which keeps the captures of one pass
as far apart as upstream has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_streams: list[torch.cuda.Stream] = []
_next_in_pass: int | None = None


@contextmanager
def capture_pass() -> Iterator[None]:
    """Within it ``graph_capture`` takes up the streams of the last pass, in order; the worker has one device.

    Raises:
        RuntimeError: within another pass.
    """
    global _next_in_pass
    if _next_in_pass is not None:
        raise RuntimeError("A pass of graph captures began within another one; captures of a worker come one by one.")
    _next_in_pass = 0
    try:
        yield
    finally:
        _next_in_pass = None


def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream for the next ``graph_capture``; a new one outside a pass, as upstream has it."""
    global _next_in_pass
    if _next_in_pass is None:
        return torch.cuda.Stream(device=device)
    if _next_in_pass == len(_streams):
        _streams.append(torch.cuda.Stream(device=device))
    _next_in_pass += 1
    return _streams[_next_in_pass - 1]
