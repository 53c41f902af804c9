"""Which symbols vLLM's PyNccl wants of an NCCL library, by its own source: without one of them it is silently off."""

from __future__ import annotations

import ast
from pathlib import Path

WRAPPER = "distributed/device_communicators/pynccl_wrapper.py"
_ABSENCE = "AttributeError"


def wanted_symbols(package: Path) -> list[str]:
    """What ``NCCLLibrary`` cannot do without; empty where the package has no wrapper."""
    path = package / WRAPPER
    if not path.is_file():
        return []
    tree = ast.parse(path.read_text(encoding="utf-8"))
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    names = [
        call.args[0].value
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id == "Function" and call.args
        and isinstance(call.args[0], ast.Constant) and isinstance(call.args[0].value, str)
    ]  # fmt: skip
    spared = _spared(tree)
    return [name for name in dict.fromkeys(names) if name not in spared]


def _spared(tree: ast.AST) -> set[str]:
    """Symbols for whose absence the loop goes on, on every platform."""
    handlers = (
        node for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler) and isinstance(node.type, ast.Name) and node.type.id == _ABSENCE
    )  # fmt: skip
    branches = (node for handler in handlers for node in ast.walk(handler) if isinstance(node, ast.If))
    return {
        constant.value
        for branch in branches
        if any(isinstance(step, ast.Continue) for step in branch.body)
        for constant in ast.walk(branch.test)
        if isinstance(constant, ast.Constant) and isinstance(constant.value, str)
    }
