"""What b12x's kernels need beside a tree."""

from __future__ import annotations

import importlib.util


def without_kernels() -> str:
    """Why this machine cannot run b12x's kernels, whatever its architecture; empty if it can."""
    absent = [name for name in ("torch", "cutlass", "triton") if importlib.util.find_spec(name) is None]
    if absent:
        return f"not installed beside this Python: {', '.join(absent)}"
    import torch

    return "" if torch.cuda.is_available() else "torch sees no CUDA device"
