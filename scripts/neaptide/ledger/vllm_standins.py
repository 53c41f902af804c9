"""A few real modules of a vLLM tree, with stand-ins for everything else that they import: torch is enough.

A module on the list is read from the tree and run as it is. Every other module of vLLM, and every other package that is
not installed, is a stand-in whose names can be called, subclassed, indexed and used as decorators, and do nothing.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Collection, Sequence
from typing import Any


class _Nothing(type):
    """A class of which every attribute, item, sum and call is again one; called with a function, it gives that back."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return nothing(name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls.__dict__.get("stand_in"):
            return args[0] if len(args) == 1 and not kwargs and callable(args[0]) else nothing("called")
        return super().__call__(*args, **kwargs)

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return cls

    def __ror__(cls, other: Any) -> Any:
        return cls

    def __iter__(cls) -> Any:
        return iter(())

    def __contains__(cls, item: Any) -> bool:
        return False

    def __bool__(cls) -> bool:
        return False


def nothing(name: str) -> Any:
    """A stand-in."""
    return _Nothing(name, (), {"stand_in": True})


class StandIn(types.ModuleType):
    """A module of stand-ins, and a package of such modules."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = nothing(name)
        setattr(self, name, made)
        return made


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stand-ins for what is not real.

    Args:
        package: whose modules are stand-ins but for ``real`` ones.
    """

    def __init__(self, package: str, real: Collection[str]) -> None:
        self.package, self.real = package, frozenset(real)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name in self.real or name.split(".")[0] != self.package:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


def stand_in(package: str, real: Collection[str], folders: Sequence[str]) -> None:
    """Make ``package`` importable: the ``real`` modules from ``folders``, in their order, and stand-ins.

    The packages around real modules have no code of their own.
    """
    packages = {".".join(module.split(".")[:depth]) for module in real for depth in range(1, module.count(".") + 1)}
    for name in sorted(packages):
        made = StandIn(name)
        made.__path__ = ["/".join([folder, *name.split(".")]) for folder in folders]
        sys.modules[name] = made
        parent, _, own = name.rpartition(".")
        if parent in sys.modules:
            setattr(sys.modules[parent], own, made)
    sys.meta_path.insert(0, Finder(package, real))
