"""Modules of the overlay that need nothing else: run here, so that names, defaults and rules stand in one place."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SWITCHES = "neaptide_switches.py"
CHOICE = "distributed/device_communicators/pcie_choice.py"
PREFIX = "VLLM_NEAPTIDE_"


@dataclass(frozen=True)
class Switch:
    """One variable: what is set, what holds, and what it decides.

    Attributes:
        set_to: the text in the environment, None if it is not set.
        value: what holds; None for no value and for a wrong one.
        error: why the engine would refuse it, "" if it would not.
    """

    name: str
    set_to: str | None
    value: Any
    default: Any
    error: str
    effect: str


def run_module(path: Path) -> Any:
    """The module of a file, without leaving bytecode beside it; None where there is no such file."""
    if not path.is_file():
        return None
    module = types.ModuleType(f"neaptide_doctor_{path.stem}")
    # Dataclasses look their module up.
    sys.modules[module.__name__] = module
    exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), module.__dict__)
    return module


def read_switches(module: Any, environment: Mapping[str, str]) -> dict[str, Switch]:
    """Every variable that the module of the switches declares, in its order."""
    return {name: _switch(name, reader, environment) for name, reader in module.VARIABLES.items()} if module else {}


def _switch(name: str, reader: Any, environment: Mapping[str, str]) -> Switch:
    value, error = None, ""
    try:
        value = reader(environment)
    except ValueError as found:
        error = str(found)
    effect = " ".join((inspect.getdoc(reader) or "").split("\n\nRaises:")[0].split())
    return Switch(name, environment.get(name), value, reader({}), error, effect)


def undeclared(switches: Mapping[str, Switch], environment: Mapping[str, str]) -> list[str]:
    """Variables of our form that nothing reads."""
    return sorted(name for name in environment if name.startswith(PREFIX) and name not in switches)
