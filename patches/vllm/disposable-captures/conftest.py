"""A process group of one rank, and participants that write down what happens to them."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

# On a pristine tree test_captures_applied.py alone fails; the others could not be set up.
if importlib.util.find_spec("vllm.distributed.capture_scopes") is None:
    collect_ignore_glob = ["test_[!c]*.py"]


class Recorder:
    """A participant; ``events`` is shared by all that write into it."""

    def __init__(self, name: str, events: list[str], *, fails: str = "") -> None:
        self.name, self.events, self.fails = name, events, fails

    def _say(self, what: str) -> None:
        self.events.append(f"{what} {self.name}")
        if what == self.fails:
            raise OSError(f"{self.name} cannot {what}")

    @contextmanager
    def capture(self, stream: Any) -> Iterator[None]:
        self._say("enter")
        try:
            yield
        finally:
            self._say("leave")

    def checkpoint(self) -> None:
        self._say("checkpoint")

    def rollback(self) -> None:
        self._say("rollback")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happened, the device's synchronisation included."""
    found: list[str] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *args: found.append("synchronize"))
    return found


@pytest.fixture
def registered(scopes: Any, group: Any, events: list[str]) -> Callable[..., Recorder]:
    """Makes a participant and registers it; the caller keeps it."""

    def make(name: str, **options: str) -> Recorder:
        participant = Recorder(name, events, **options)
        scopes.register_capture_participant(participant, group)
        return participant

    return make
