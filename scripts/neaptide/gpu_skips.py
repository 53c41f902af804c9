"""Tests that a GPU run skipped, by its JUnit file, against what its host has: a skip that need not be is a failure.

The reasons are those that tests/gpu give. Each kind has a predicate: whether this host could have run the test all the
same. A reason of no known kind counts as if it could.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from neaptide.errors import ExitCode, NeaptideError

NSA_INDEXER, DSA_INDEXER = "b12x/attention/nsa_indexer", "b12x/attention/dsa_indexer"
B12X_PATCHED = "NEAPTIDE_TEST_B12X_PATCHED"
_NUMBERS = {"two": 2}


@dataclass(frozen=True)
class Host:
    """What the tests of a run had.

    Attributes:
        devices: how many they could see.
        capability: the lowest of them; (0, 0) without a device.
        modules: whether each could be found.
        environment: of the run.
    """

    devices: int
    capability: tuple[int, int]
    modules: Mapping[str, bool]
    environment: Mapping[str, str]

    def has_modules(self, *names: str) -> bool:
        return all(self.modules.get(name, False) for name in names)

    def has_folder(self, inside: str) -> bool:
        """Whether the patched b12x of the run has this folder."""
        tree = self.environment.get(B12X_PATCHED, "")
        return bool(tree) and (Path(tree) / inside).is_dir()


@dataclass(frozen=True)
class Kind:
    """A reason, as a pattern of its whole text, and whether a host could have run the test all the same."""

    pattern: re.Pattern[str]
    could_run: Callable[[re.Match[str], Host], bool]


def _names(text: str) -> list[str]:
    return re.split(r", | and ", text)


def _kind(pattern: str, could_run: Callable[[re.Match[str], Host], bool]) -> Kind:
    return Kind(re.compile(pattern, re.DOTALL), could_run)


def _fa3(found: re.Match[str], host: Host) -> bool:
    """vLLM's wheels have it for 9.0: its absence is a fault of the installation."""
    return host.capability == (9, 0) and host.has_modules("torch", "vllm")


KINDS = (
    _kind(r"torch is not installed beside this Python", lambda _, h: h.has_modules("torch")),
    _kind(r"(torch and )?vLLM (is|are) not installed beside this Python", lambda _, h: h.has_modules("torch", "vllm")),
    _kind(r"not installed beside this Python: (?P<names>.+)", lambda m, h: h.has_modules(*_names(m["names"]))),
    _kind(r"torch sees no CUDA device", lambda _, h: h.devices > 0),
    # A runner's cards are its own: who holds their memory is to be found.
    _kind(r"\S+ GiB are free on the device, the workloads want \S+", lambda _, h: h.devices > 0),
    _kind(
        r"(?P<wanted>two|\d+) CUDA devices are needed, and torch sees \d+",
        lambda m, h: h.devices >= (_NUMBERS.get(m["wanted"]) or int(m["wanted"])),
    ),
    _kind(
        r"(?P<names>NEAPTIDE_\w+( and NEAPTIDE_\w+)*) must name trees( of b12x)?",
        lambda m, h: all(h.environment.get(name) for name in _names(m["names"])),
    ),
    _kind(r"(?P<name>NEAPTIDE_\w+) names no tree", lambda m, h: bool(h.environment.get(m["name"]))),
    _kind(r"the scorers need compute capability 12\.x, and this device has [\d.]+", lambda _, h: h.capability[0] == 12),
    _kind(r"needs a CUDA device of compute capability 9\.0", lambda _, h: h.capability == (9, 0)),
    _kind(r"no patched b12x on PYTHONPATH", lambda _, h: bool(h.environment.get(B12X_PATCHED))),
    _kind(r"no tree with b12x\.attention\.nsa_indexer: set \w+", lambda _, h: h.has_folder(NSA_INDEXER)),
    _kind(r"this b12x prepares no plans", lambda _, h: h.has_folder(DSA_INDEXER)),
    _kind(r"FlashAttention( 3)? is not there: .*", _fa3),
)


@dataclass(frozen=True)
class Skip:
    """A skipped test and its reason; ``fault`` is why it should have run, "" if it could not."""

    test: str
    reason: str
    fault: str


@dataclass(frozen=True)
class Outcome:
    """A JUnit file: how many tests there were, the names of those that failed, and all skips."""

    tests: int
    failed: tuple[str, ...]
    skips: tuple[Skip, ...]

    @property
    def faults(self) -> list[Skip]:
        return [skip for skip in self.skips if skip.fault]


def read_outcome(path: Path, host: Host) -> Outcome:
    """The tests of a JUnit file that pytest wrote.

    Raises:
        NeaptideError: no such file, or no XML.
    """
    try:
        cases = list(ElementTree.parse(path).getroot().iter("testcase"))
    except (OSError, ElementTree.ParseError) as error:
        raise NeaptideError(
            f"no JUnit file ({error})", wanted="pytest's own, of a run that ended", todo="Read pytest's output.",
            where=str(path), code=ExitCode.FINDINGS,
        ) from error  # fmt: skip
    skips = [_skip(case, mark, host) for case in cases if (mark := case.find("skipped")) is not None]
    failed = [_name(case) for case in cases if case.find("failure") is not None or case.find("error") is not None]
    return Outcome(len(cases), tuple(failed), tuple(skips))


def _name(case: ElementTree.Element) -> str:
    return f"{case.get('classname', '')}::{case.get('name', '')}"


def _skip(case: ElementTree.Element, mark: ElementTree.Element, host: Host) -> Skip:
    reason = mark.get("message", "").strip()
    return Skip(_name(case), reason, fault_of(reason, host))


def fault_of(reason: str, host: Host) -> str:
    """Why a test with this reason should have run on ``host``; "" if it could not."""
    for kind in KINDS:
        if (found := kind.pattern.fullmatch(reason)) is not None:
            return "this host could have run it" if kind.could_run(found, host) else ""
    return "a reason of no known kind; add it to scripts/neaptide/gpu_skips.py"
