"""``neaptide slabs``: rows from sizes, and what it says where sizes cannot be computed."""

from __future__ import annotations

import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from neaptide.both_trees import Question
from neaptide.errors import NeaptideError
from neaptide.output import Progress
from neaptide.session import Options
from neaptide.slabs import command
from neaptide.slabs.cases import DEPLOYMENTS, RINGS, as_spec


def sizes(slab: int, more: int) -> command.Sizes:
    """The same sizes for every shape."""
    shapes = [shape for kind in as_spec().values() for shape in kind]
    return {command._key(shape): {"slab_bytes": slab, "rank_data_bytes": more, "stage_bytes": more} for shape in shapes}


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda d: d.name)
def test_a_deployment_counts_its_channels(deployment: command.Deployment) -> None:
    rows = command.deployment_rows("current", deployment, sizes(100, 10), sizes(70, 1))
    assert [row["variant"] for row in rows] == [choice.variant for choice in deployment.choices]
    for row, choice in zip(rows, deployment.choices, strict=True):
        each = 110 if choice.variant == "upstream" else 71
        assert row["total_bytes"] == each * choice.channels
        assert row["condition"]
    assert rows[0]["variant"] == "upstream"


@pytest.mark.parametrize(
    ("slab", "slabs", "mib"), [(6_582_272, 4, 32), (666_624, 4, 4), (322_816, 4, 2), (2 << 20, 3, 6), (1, 1, 2)]
)
def test_granules_of_the_driver(slab: int, slabs: int, mib: int) -> None:
    """The first three as an H200's free memory dropped by."""
    assert command.driver_bytes(slab, slabs) == mib << 20


def test_a_ring_counts_slab_and_stage() -> None:
    rows = command.ring_rows("current", sizes(100, 10), sizes(70, 1))
    assert len(rows) == 2 * len(RINGS) == 60
    assert {(row["variant"], row["total_bytes"]) for row in rows} == {("upstream", 110), ("patched", 71)}
    assert {row["case"] for row in rows} >= {"DMA TP2 bf16", "DMA TP8 mx_a2a"}


def test_every_shape_is_in_the_spec() -> None:
    asked = {command._key(shape) for kind in as_spec().values() for shape in kind}
    assert asked == {command._key(asdict(d.shape)) for d in DEPLOYMENTS} | {command._key(asdict(r)) for r in RINGS}


def test_a_python_without_what_it_takes_is_an_error(tmp_path: Path) -> None:
    """There is no b12x on the path."""
    question = Question(command.CHILD, as_spec(), "slabs")
    with pytest.raises(NeaptideError, match=r"sizes could not be computed.*wanted a Python with torch"):
        question.answer(tmp_path, Path(sys.executable))


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"pin": "sparkinfer-de04"}, "pin 'sparkinfer-de04'; wanted one of current, r12"),
        ({"targets": ("vllm",)}, "target vllm; wanted b12x"),
        ({"python": Path("/nowhere/python")}, "no program /nowhere/python; wanted a Python with torch"),
    ],
)
def test_a_bad_call_is_refused_before_anything_is_fetched(
    options: dict[str, Any], found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Question, "asked_at", lambda *given: pytest.fail("went on"))
    with pytest.raises(NeaptideError, match=re.escape(found)):
        command.run(Options(root=tmp_path, build=tmp_path, **options), Progress())
