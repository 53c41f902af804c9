"""Everything that the verdicts on the savings follow from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from neaptide.doctor.applied import Applied
from neaptide.doctor.machine import Machine
from neaptide.doctor.overlay_code import Switch
from neaptide.doctor.probe import Probe


@dataclass(frozen=True)
class Facts:
    """What was found.

    Attributes:
        pin: its name.
        applied: by target.
        switches: every declared variable, by name.
        declared: the module that declares them; None for a repository without.
        choice: the overlay's rules of who is served over PCIe; None for a repository without.
        environment: of this process.
    """

    pin: str
    applied: Mapping[str, Applied]
    switches: Mapping[str, Switch]
    declared: Any
    choice: Any
    environment: Mapping[str, str]
    machine: Machine
    probe: Probe
    container: Mapping[str, Any] = field(default_factory=dict)
    allocator: Mapping[str, Any] = field(default_factory=dict)

    def switch(self, constant: str) -> Switch:
        """A switch by the constant that names it in its module."""
        return self.switches[getattr(self.declared, constant)]

    def has(self, patch: str) -> bool:
        """Whether a patch, by its id, is applied."""
        target = self.applied.get(patch.split("/")[0])
        return target is not None and patch in target.patches

    def on(self, variable: str) -> bool:
        """Whether a variable of upstream's, which is off by default, is on."""
        return self.environment.get(variable, "0") not in ("", "0")
