"""The host of a GPU run: its devices, what lies between them, and what its tests need beside the repository."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from neaptide import archive
from neaptide.bench.view import make_view
from neaptide.doctor.machine import Machine, look_at_machine
from neaptide.doctor.probe import Probe, probe
from neaptide.errors import ExitCode, NeaptideError
from neaptide.fetch import sdist_path
from neaptide.installed import InstalledPlace
from neaptide.output import Progress
from neaptide.pins import Pin
from neaptide.series import applies_to, load_series
from neaptide.session import Options, Session, Work

MODULES = ("torch", "vllm", "cutlass", "triton", "pytest")
WORLDS = (2, 4)
# The tests of each file are of this patch, and run at the pins that it applies to; a file that is not here runs at all.
TESTS = {
    "test_disposable_captures.py": "vllm/disposable-captures",
    "test_graph_memory.py": "vllm/graph-estimate",
    "test_indexer_logits.py": "vllm/indexer-logits",
    "test_indexer_sm120.py": "b12x/indexer-plan-budget",
    "test_indexer_topk.py": "b12x/indexer-regions",
    "test_mla_splits.py": "vllm/mla-split-budget",
    "test_pcie_pools.py": "b12x/channel-pool",
    "test_vllm_pcie.py": "vllm/pcie-collectives",
    "test_workspace.py": "vllm/workspace-manager",
}
ENGINE, KERNELS = "vllm", "b12x"


def look(python: Path, environment: Mapping[str, str] = os.environ) -> tuple[Machine, Probe]:
    seen = probe(python, modules=MODULES, environment=environment)
    return look_at_machine(seen, environment), seen


def chosen_world(machine: Machine, asked: int | None) -> int:
    """How many devices the run has: what was asked for, else the largest of :data:`WORLDS` that is there, or one.

    Raises:
        NeaptideError: no device, or fewer than asked for.
    """
    count = len(machine.devices)
    if not count:
        raise NeaptideError(
            f"no CUDA device is seen (torch: {machine.why_not or 'none'})", wanted="a host with CUDA",
            todo="Run it where nvidia-smi lists a device, with --python or --image for torch.", where="gpu-ci",
        )  # fmt: skip
    if asked is not None and count < asked:
        raise NeaptideError(
            f"{count} CUDA devices", wanted=f"{asked}, as --world says", todo="Choose a smaller world.", where="gpu-ci"
        )
    return asked or max((world for world in WORLDS if world <= count), default=1)


def visible(world: int, environment: Mapping[str, str]) -> str:
    """``CUDA_VISIBLE_DEVICES`` for the first ``world`` of the devices that are visible now."""
    given = environment.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given else [str(index) for index in range(world)]
    return ",".join(names[:world])


def topology_problems(machine: Machine) -> list[str]:
    """Why these are not devices of Blackwell that reach each other over PCIe; empty if they are."""
    others = sorted({"{}.{}".format(*one.capability) for one in machine.devices if one.capability[0] != 12})
    problems = [f"compute capability {', '.join(others)}, wanted 12.x"] if others else []
    if any(one.mig for one in machine.devices):
        problems.append("MIG devices, which have no peers")
    if len(machine.devices) > 1 and machine.peers is not True:
        problems.append("peer access not known, for want of torch" if machine.peers is None else "no peer access")
    if machine.some_nvlink:
        problems.append("NVLink between them, wanted PCIe alone")
    return problems


def patches_at(root: Path, pin: Pin) -> set[str]:
    """Ids of the patches that have something to do at a pin."""
    versions = {target: artefact.version for target, artefact in pin.targets.items()}
    return {p.id for target, version in versions.items() for p in load_series(root, target) if applies_to(p, version)}


def files_for(root: Path, there: Collection[str]) -> list[str]:
    """Test files of tests/gpu that are for a pin with these patches, in order."""
    names = sorted(path.name for path in (root / "tests" / "gpu").glob("test_*.py"))
    return [name for name in names if TESTS.get(name, "") in {"", *there}]


def needs_engine(files: Sequence[str]) -> bool:
    return any(TESTS.get(name, "").startswith(f"{ENGINE}/") for name in files)


class Trees:
    """The trees that tests are given: pristine and patched, of b12x from sdists, of vLLM as views of what is installed.

    vLLM needs its compiled extensions, which no sdist has.

    Args:
        options: of the pin, with the folder of built trees.
        folder: where they are made.
        engine: the installed vLLM; None without one, or where no test of the pin needs it.
    """

    def __init__(self, options: Options, progress: Progress, folder: Path, engine: Work | None) -> None:
        self.options, self.progress, self.folder, self.engine = options, progress, folder, engine

    def environment(self) -> dict[str, str]:
        """The variables that tests/gpu read, and a PYTHONPATH with the patched b12x and the tool."""
        own = {f"NEAPTIDE_TEST_B12X_{kind.upper()}": str(self._at(KERNELS, kind)) for kind in ("patched", "upstream")}
        if self.engine is not None:
            own |= {
                f"NEAPTIDE_TEST_VLLM_{kind.upper()}": str(self._at(ENGINE, kind)) for kind in ("patched", "upstream")
            }
        parts = [
            str(self._at(KERNELS, "patched")),
            str(self.options.root / "scripts"),
            os.environ.get("PYTHONPATH", ""),
        ]
        return {**own, "PYTHONPATH": os.pathsep.join(part for part in parts if part)}

    def _at(self, target: str, kind: str) -> Path:
        return self.folder / f"{target}-{kind}"

    def make(self) -> None:
        """Make them, when `neaptide apply` has built its trees."""
        session = Session(replace(self.options, targets=(KERNELS,)), self.progress)
        artefact = session.pin.targets[KERNELS]
        patched = self._at(KERNELS, "patched") / artefact.package
        patched.parent.mkdir(parents=True)
        # A link: beside the package lies an egg-info, which would hide the metadata of what is installed.
        patched.symlink_to(session.tree_folder(KERNELS) / artefact.package, target_is_directory=True)
        source = sdist_path(artefact, frozen=False, progress=self.progress)
        archive.unpack(source, source.name.removesuffix(".tar.gz"), self._at(KERNELS, "upstream"))
        if self.engine is not None:
            self._make_views(self.engine)

    def _make_views(self, work: Work) -> None:
        session = Session(replace(self.options, targets=(ENGINE,), installed=True), self.progress)
        plan = session.plan(work, session.series(ENGINE))
        if plan.exit_code() is not ExitCode.DONE:
            raise NeaptideError(
                "the series does not plan clean on the installed vLLM", wanted="a series that `neaptide apply` takes",
                todo="Run `neaptide apply --installed --dry-run`.", where=work.place.label, code=plan.exit_code(),
            )  # fmt: skip
        assert isinstance(work.place, InstalledPlace)
        record = work.place.record()
        own = {path: work.place.read(path) for path in record.files} if record is not None else {}
        pristine = {path: data for path, data in own.items() if data is not None}
        make_view(work.place.package, pristine, self._at(ENGINE, "upstream"))
        make_view(work.place.package, plan.files, self._at(ENGINE, "patched"))


def installed_engine(options: Options, progress: Progress) -> Work:
    """The installed vLLM of the pin.

    Raises:
        NeaptideError: another version, or an editable installation.
    """
    return Session(replace(options, targets=(ENGINE,), installed=True), progress).places(create=False)[0]
