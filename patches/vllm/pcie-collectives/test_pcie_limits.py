"""Which sizes go where, and the switches that say so."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from typing import Any

import pytest
from vllm.distributed.device_communicators.pcie_limits import KIB, MIB, ONESHOT, RING, UPSTREAM, Limits

PREFIX = "VLLM_NEAPTIDE_PCIE_"
# Default, least, and the unit of its error.
NUMBERS = {"ONESHOT_KB": (84, 1, "KiB"), "RING_KB": (0, 0, "KiB"), "RING_MB": (36, 1, "MiB"), "DCP_ROWS": (64, 0, "")}
CHOICES = {"COLLECTIVES": ("0", ("auto", "0", "1")), "ARCHITECTURES": ("listed", ("listed", "any"))}


@pytest.mark.parametrize(
    ("nbytes", "route"),
    [(0, UPSTREAM), (1, ONESHOT), (99, ONESHOT), (100, ONESHOT), (101, UPSTREAM), (1 << 40, UPSTREAM)],
)
def test_without_a_ring(nbytes: int, route: str) -> None:
    assert Limits(100).route(nbytes) == route


@pytest.mark.parametrize(
    ("nbytes", "route"),
    [
        (0, UPSTREAM),
        (1, ONESHOT),
        (100, ONESHOT),
        (101, UPSTREAM),
        (199, UPSTREAM),
        (200, RING),
        (300, RING),
        (301, UPSTREAM),
    ],
)
def test_with_a_ring(nbytes: int, route: str) -> None:
    assert Limits(100, 200, 300).route(nbytes) == route


def test_limits_may_touch() -> None:
    touching = Limits(100, 101, 101)
    assert [touching.route(nbytes) for nbytes in (100, 101, 102)] == [ONESHOT, RING, UPSTREAM]


@pytest.mark.parametrize("ring", [(100, 300), (99, 300), (1, 300), (301, 300), (200, 0)])
def test_a_ring_that_is_not_above_the_oneshot_is_refused(ring: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="wanted them in order") as caught:
        Limits(100, *ring)
    assert f"{PREFIX}RING_KB" in str(caught.value)


def test_what_they_say() -> None:
    assert str(Limits(84 * KIB)) == "oneshot up to 84 KiB, vLLM's own for the rest"
    said = str(Limits(84 * KIB, 2048 * KIB, 36 * MIB))
    assert re.search(r"84 KiB.*ring from 2,048 KiB to 36 MiB.*vLLM's own", said)


@pytest.fixture
def envs(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = importlib.import_module("vllm.envs")
    for name in (*NUMBERS, *CHOICES):
        monkeypatch.delitem(vars(module), PREFIX + name, raising=False)
        monkeypatch.delenv(PREFIX + name, raising=False)
    return module


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, Limits(84 * KIB)),
        ({"ONESHOT_KB": "16"}, Limits(16 * KIB)),
        ({"RING_KB": "512"}, Limits(84 * KIB, 512 * KIB, 36 * MIB)),
        ({"RING_KB": "512", "RING_MB": "1"}, Limits(84 * KIB, 512 * KIB, MIB)),
        ({"RING_KB": "0", "RING_MB": "8"}, Limits(84 * KIB)),
    ],
)
def test_limits_are_the_switches(
    environment: Mapping[str, str], wanted: Limits, envs: Any, collectives: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(PREFIX + name, value)
    assert collectives.limits() == wanted


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number(name: str, envs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    default, least, unit = NUMBERS[name]
    assert getattr(envs, PREFIX + name) == default
    for value in (str(least), "7", "007"):
        monkeypatch.setenv(PREFIX + name, value)
        assert getattr(envs, PREFIX + name) == int(value)
    for value in ("", "-1", "1.5", "1e3", "many", "1_0", " 1", "0x10", "²", *(["0"] if least else [])):
        monkeypatch.setenv(PREFIX + name, value)
        with pytest.raises(ValueError, match=re.escape(f"{PREFIX}{name} is {value!r}")) as caught:
            getattr(envs, PREFIX + name)
        assert unit in str(caught.value)
        assert f"{least} or more" in str(caught.value)


@pytest.mark.parametrize("name", CHOICES)
def test_a_choice(name: str, envs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    default, allowed = CHOICES[name]
    assert getattr(envs, PREFIX + name) == default
    for value in allowed:
        monkeypatch.setenv(PREFIX + name, value)
        assert getattr(envs, PREFIX + name) == value
    for value in ("", "on", "true", "2", allowed[0].upper(), f"{default} "):
        monkeypatch.setenv(PREFIX + name, value)
        with pytest.raises(ValueError, match=f"{PREFIX}{name} is {value!r}") as caught:
            getattr(envs, PREFIX + name)
        assert all(word in str(caught.value) for word in allowed)


def test_ranks_compare_all_of_them(envs: Any) -> None:
    switches = importlib.import_module("vllm.neaptide_switches")
    names = {PREFIX + name for name in (*NUMBERS, *CHOICES)}
    assert names <= set(switches.current_values())
    assert names <= set(envs.environment_variables)
    assert not names & set(envs.compile_factors())
