"""Exit codes and the one error type whose text reaches a person."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from functools import partial
from typing import Any


class ExitCode(IntEnum):
    """What a command's exit status means; the same for every command."""

    DONE = 0
    FINDINGS = 1
    BAD_INPUT = 2
    CONFLICT = 3
    DRIFT = 4
    UNVERIFIED = 5


def worst(codes: Iterable[ExitCode]) -> ExitCode:
    """Of several outcomes the one that is furthest from done, last what could not be looked at; done for none."""
    order = (
        ExitCode.DONE, ExitCode.FINDINGS, ExitCode.DRIFT, ExitCode.UNVERIFIED, ExitCode.CONFLICT, ExitCode.BAD_INPUT
    )  # fmt: skip
    return max(codes, key=order.index, default=ExitCode.DONE)


class NeaptideError(Exception):
    """A refusal: what was found, what was wanted, what to do next.

    Args:
        found: the observation, as a clause.
        wanted: what would have been right.
        todo: the next step for the reader.
        where: file, symbol, patch or command line argument concerned.
        code: the exit status.
    """

    def __init__(
        self,
        found: str,
        *,
        wanted: str,
        todo: str,
        where: str = "",
        code: ExitCode = ExitCode.BAD_INPUT,
    ) -> None:
        self.found = found
        self.wanted = wanted
        self.todo = todo
        self.where = where
        self.code = code
        place = f"{where}: " if where else ""
        super().__init__(f"{place}{found}; wanted {wanted}. {todo}")

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(NeaptideError, wanted=self.wanted, todo=self.todo, where=self.where, code=self.code), (
            self.found,
        )

    def as_dict(self) -> dict[str, object]:
        return {
            "code": int(self.code),
            "found": self.found,
            "todo": self.todo,
            "wanted": self.wanted,
            "where": self.where,
        }
