"""The host of a GPU run, by stand-ins for its devices: the world, the topology, and the trees that tests are given."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import gpu_standins
import installing
import pytest
from gpu_standins import CARD, GOOD, GPU, ROOT, Stand
from installing import Environment
from neaptide import gpu_host
from neaptide.doctor.machine import Machine
from neaptide.gpu_ci import main
from neaptide.output import Progress
from neaptide.session import Options
from toy import ToyRepository

stand = gpu_standins.stand
installed_once, env, repository = installing.installed_once, installing.env, installing.repository

Shown = pytest.CaptureFixture[str]


def test_a_host_without_cuda_is_one_clear_error(stand: Stand, capsys: Shown) -> None:
    stand.without_torch()
    assert main(["--root", str(ROOT)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: gpu-ci: no CUDA device is seen (torch: not installed); wanted a host with CUDA")


def test_devices_without_torch_are_one_clear_error(stand: Stand, capsys: Shown) -> None:
    stand.without_torch()
    query = "0, GPU-aa, RTX PRO 6000, 12.0, 97887, Disabled, 580.65.06\n"
    stand.monkeypatch.setattr("neaptide.doctor.machine._smi", lambda *a: query if a[0] != "topo" else "")
    assert main(["--root", str(ROOT)]) == 2
    assert "torch not installed; wanted an interpreter that can run tests/gpu" in capsys.readouterr().err


def test_a_world_that_is_not_there_is_refused(stand: Stand, capsys: Shown) -> None:
    stand.torch(3)
    assert main(["--root", str(ROOT), "--world", "4"]) == 2
    assert "3 CUDA devices; wanted 4, as --world says" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("count", "asked", "world"), [(1, None, 1), (2, None, 2), (3, None, 2), (8, None, 4), (4, 2, 2)]
)
def test_the_world_is_what_is_asked_for_or_there(count: int, asked: int | None, world: int) -> None:
    assert gpu_host.chosen_world(Machine((CARD,) * count), asked) == world


def test_the_first_visible_devices_are_those_of_the_run() -> None:
    assert gpu_host.visible(2, {}) == "0,1"
    assert gpu_host.visible(2, {"CUDA_VISIBLE_DEVICES": "3,1,0"}) == "3,1"


@pytest.mark.parametrize(
    ("machine", "says"),
    [
        (GOOD, ""),
        (replace(GOOD, links=(("X", "NV4"), ("NV4", "X"))), "NVLink"),
        (replace(GOOD, peers=False), "no peer access"),
        (replace(GOOD, peers=None), "for want of torch"),
        (replace(GOOD, devices=(CARD, replace(CARD, capability=(9, 0)))), "compute capability 9.0"),
        (replace(GOOD, devices=(CARD, replace(CARD, mig=True))), "MIG"),
    ],
)
def test_the_topology_that_it_is_made_for(machine: Machine, says: str) -> None:
    assert says in "; ".join(gpu_host.topology_problems(machine))
    assert bool(gpu_host.topology_problems(machine)) == bool(says)


NO_PEERS = "PCIe, not all reach each other; no peer access"


@pytest.mark.parametrize(
    ("count", "world", "strangers", "links", "says"),
    [
        (4, 4, [], {}, "PCIe, all reach each other; as it is made for"),
        (4, 4, [(1, 2)], {}, NO_PEERS),
        (8, 4, [(6, 7)], {}, "PCIe, all reach each other; as it is made for"),
        (8, 4, [(3, 7)], {}, "PCIe, all reach each other; as it is made for"),
        (8, 4, [(0, 3)], {}, NO_PEERS),
        (4, 4, [], {(0, 1): "NV4", (2, 3): "NV4"}, "NVLink between some, all reach each other; NVLink between them"),
        (4, 2, [], {(0, 2): "NV4", (1, 3): "NV4"}, "PCIe, all reach each other; as it is made for"),
    ],
)
def test_topology_of_the_devices_of_the_run(
    stand: Stand, capsys: Shown, count: int, world: int, strangers: list[tuple[int, int]],
    links: dict[tuple[int, int], str], says: str,
) -> None:  # fmt: skip
    """Neither a bridge nor a refused peer of a device that is left out counts; one that is in does, alone, too."""
    stand.torch(count, strangers=strangers)
    stand.links = links
    code = main(["--root", str(ROOT), "--topology", "--world", str(world)])
    assert f"{world} x stand-in: {says}" in capsys.readouterr().err
    assert code == (0 if "made for" in says else 1)


def test_hopper_with_nvlink_is_another_topology(stand: Stand, capsys: Shown) -> None:
    stand.torch(4, 9)
    stand.link = "NV18"
    assert main(["--root", str(ROOT), "--topology", "--world", "4"]) == 1
    said = capsys.readouterr().err
    assert "compute capability 9.0, wanted 12.x; NVLink between them, wanted PCIe alone" in said


def test_some_pairs_with_nvlink_are_not_every_pair(stand: Stand) -> None:
    """As vLLM asks: two bridges among four cards leave pairs that PCIe alone joins."""
    stand.torch(4)
    for links, every, some in [
        ({}, False, False),
        ({(0, 1): "NV4", (2, 3): "NV4"}, False, True),
        ({(a, b): "NV18" for a in range(4) for b in range(a + 1, 4)}, True, True),
    ]:
        stand.links = links
        machine = gpu_host.look(Path(sys.executable))[0]
        assert (machine.nvlink, machine.some_nvlink) == (every, some)


# Files and trees


def test_every_file_of_the_table_is_there_and_its_patch_too() -> None:
    assert {name for name in gpu_host.TESTS if not (GPU / name).is_file()} == set()
    assert {patch for patch in gpu_host.TESTS.values() if not (ROOT / "patches" / patch).is_dir()} == set()


def test_every_variable_that_tests_read_is_set_or_known(tmp_path: Path) -> None:
    read = {
        name for path in GPU.rglob("*.py") for name in re.findall(r"NEAPTIDE_TEST_[A-Z0-9_]*[A-Z0-9]", path.read_text())
    }
    options = Options(root=ROOT, build=tmp_path)
    trees = gpu_host.Trees(options, Progress(), tmp_path, engine=object())  # type: ignore[arg-type]
    read -= {"NEAPTIDE_TEST_B12X"}  # a prefix, which a test adds the variant to
    assert read == {*trees.environment(), "NEAPTIDE_TEST_RESULTS"} - {"PYTHONPATH"}
    documented = (ROOT / "docs" / "gpu-ci.md").read_text()
    assert [name for name in read if name not in documented] == []


def test_trees_of_the_kernels_are_the_built_one_and_the_sdists(
    repository: ToyRepository,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    assert repository.run("apply") == 0
    monkeypatch.setattr(gpu_host, "KERNELS", "toy")
    monkeypatch.setattr(gpu_host, "sdist_path", lambda *args, **kwargs: repository.sdist)
    trees = gpu_host.Trees(Options(root=repository.root, build=repository.build), Progress(), tmp_path / "trees", None)
    trees.make()
    patched = tmp_path / "trees/toy-patched"
    assert [path.name for path in patched.iterdir()] == ["toy"]
    assert "return list(sorted(out))" in (patched / "toy/core.py").read_text()
    assert "return sorted(out)" in (tmp_path / "trees/toy-upstream/toy/core.py").read_text()
    monkeypatch.setenv("PYTHONPATH", "/given")
    given = trees.environment()
    assert given["PYTHONPATH"].endswith(f"{os.pathsep}/given")


def test_views_of_the_installed_engine(
    repository: ToyRepository,
    env: Environment,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Pristine, and with the whole series, whatever is applied to the installed one; extensions are linked."""
    (env.site / "toy/_C.so").write_bytes(b"compiled")
    assert repository.run("apply", "--patch", "first", "--installed", "--python", str(env.python)) == 0
    monkeypatch.setattr(gpu_host, "ENGINE", "toy")
    options = Options(root=repository.root, build=repository.build, python=env.python)
    engine = gpu_host.installed_engine(options, Progress())
    trees = gpu_host.Trees(options, Progress(), tmp_path, engine)
    trees._make_views(engine)
    upstream, patched = tmp_path / "toy-upstream/toy", tmp_path / "toy-patched/toy"
    assert (upstream / "core.py").read_text() != (patched / "core.py").read_text()
    assert (patched / "extra/deep.py").is_file()
    assert not (upstream / "extra").exists()
    assert "return sorted(out)" in (upstream / "core.py").read_text()
    assert (upstream / "_C.so").is_symlink()
    assert (patched / "_C.so").is_symlink()
