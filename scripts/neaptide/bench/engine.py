"""``neaptide bench engine``: the real engine in a child process, once for each variant and scenario."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from neaptide.bench.models import MODELS, write_model
from neaptide.bench.scenarios import SCENARIOS, Scenario
from neaptide.bench.view import make_view
from neaptide.errors import ExitCode, NeaptideError
from neaptide.output import Progress

CHILD = Path(__file__).with_name("child.py")
UPSTREAM = "upstream"
STEP = 0.005
Keep = Callable[[Sequence[dict[str, Any]]], object]
_PROBE = """
import importlib, json
out = {"gpu": "", "missing": []}
try:
    import torch
    out["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    for name in ("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch", "vllm.third_party.deep_gemm"):
        try:
            importlib.import_module(name)
        except Exception as error:
            out["missing"].append(f"{name} ({type(error).__name__}: {error})")
except Exception as error:
    out["missing"].append(f"torch ({type(error).__name__}: {error})")
print("\\nNEAPTIDE" + json.dumps(out))
"""


@dataclass(frozen=True)
class Variant:
    """A vLLM to run: the installed package with ``files`` in place of its own; none for it as it is."""

    name: str
    files: Mapping[str, bytes]


@dataclass(frozen=True)
class Bench:
    """Where the engine is and how its child processes are started.

    Attributes:
        python: the interpreter that has vLLM.
        package: the installed package's folder.
        scratch: a folder for views, models and results.
        timeout_seconds: for one child.
        history: keep the allocator's history, which names the largest allocations and costs time in every step.
    """

    python: Path
    package: Path
    scratch: Path
    progress: Progress
    model: str | None = None
    timeout_seconds: int = 900
    history: bool = True

    def probe(self) -> str:
        """The device's name; refuses a machine without a GPU or a vLLM whose extensions do not load."""
        done = self._run(["-c", _PROBE], [])
        marked = [line for line in done.stdout.splitlines() if line.startswith("NEAPTIDE")]
        found = (
            json.loads(marked[-1].removeprefix("NEAPTIDE")) if marked else {"gpu": "", "missing": [done.stderr[-300:]]}
        )
        if found["missing"]:
            raise _refuse(
                f"does not load: {'; '.join(found['missing'])}",
                "vLLM's extensions",
                "Install a vLLM that fits this torch.",
            )
        if not found["gpu"]:
            raise _refuse("torch sees no CUDA device", "a GPU", "Run on a machine with one.")
        return str(found["gpu"])

    def _run(
        self, arguments: Sequence[str], first: Sequence[Path], unset: Sequence[str] = (),
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        path = [*map(str, first), *filter(None, [os.environ.get("PYTHONPATH", "")])]
        env = {k: v for k, v in os.environ.items() if k not in unset} | {
            "PYTHONPATH": os.pathsep.join(path),
            **environment,
        }
        return subprocess.run(
            [str(self.python), *arguments], env=env, capture_output=True, text=True, check=False,
            cwd=self.scratch, timeout=self.timeout_seconds,
        )  # fmt: skip

    def run(self, scenario: Scenario, variant: Variant) -> dict[str, Any]:
        """Result of one engine; an engine that runs out of memory is a result, too."""
        with tempfile.TemporaryDirectory(dir=self.scratch) as name:
            spec = {**scenario.as_dict(), **self._model(scenario, Path(name)), "history": self.history}
            result, said = self.child(CHILD, spec, variant)
        return {"outcome": "failed", "error": said} if result is None else result

    def child(
        self, script: Path, spec: Mapping[str, Any], variant: Variant, unset: Sequence[str] = (),
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> tuple[dict[str, Any] | None, str]:  # fmt: skip
        """Run ``script SPEC RESULT`` with a variant's vLLM; its result if it wrote one, and how it ended.

        Args:
            unset: environment variables that the child does not inherit.
            environment: variables that it gets besides.
        """
        with tempfile.TemporaryDirectory(dir=self.scratch) as name:
            folder = Path(name)
            first = [make_view(self.package, variant.files, folder / "view").parent] if variant.files else []
            given, result = folder / "spec.json", folder / "result.json"
            given.write_text(json.dumps(spec))
            try:
                done = self._run([str(script), str(given), str(result)], first, unset, environment)
                said = f"exit {done.returncode}: {done.stderr[-1500:]}"
            except subprocess.TimeoutExpired as ended:
                last = (ended.stderr or b"").decode(errors="replace")[-1500:]
                said = f"no end after {self.timeout_seconds} s: {last}"
            return (dict(json.loads(result.read_text())) if result.is_file() else None), said

    def _model(self, scenario: Scenario, folder: Path) -> dict[str, Any]:
        if self.model is not None:
            return {"dummy_weights": False, "model_path": self.model}
        return {"dummy_weights": True, "model_path": str(write_model(scenario.model, folder))}

    def matrix(
        self, scenarios: Sequence[Scenario], variants: Sequence[Variant], repeat: int, keep: Keep
    ) -> list[dict[str, Any]]:
        """Rows of every scenario: all variants, ``repeat`` times over; ``keep`` gets them after each engine.

        The variants take turns, so that what only the first engine pays (kernels compiled on first use) falls in
        turn 0.
        """
        rows: list[dict[str, Any]] = []
        for scenario in scenarios:
            for turn in range(repeat):
                for variant in variants:
                    rows.append({**self._row(scenario, variant), "repeat": turn})
                    keep(rows)
        return rows

    def _row(self, scenario: Scenario, variant: Variant, case: str | None = None) -> dict[str, Any]:
        found = self.run(scenario, variant)
        said = f": {found['error'][:300]}" if "error" in found else ""
        self.progress.note(f"{case or scenario.name} {variant.name}: {found['outcome']}{said}")
        return {"case": case or scenario.name, "scenario": scenario.as_dict(), "variant": variant.name, **found}

    def highest_utilisations(
        self, scenarios: Sequence[Scenario], variants: Sequence[Variant], low: float, high: float, keep: Keep
    ) -> list[dict[str, Any]]:
        """For each scenario and variant the highest utilisation that survives; every engine tried is a row."""
        rows: list[dict[str, Any]] = []
        for scenario in scenarios:
            for variant in variants:

                def survives(step: int, scenario: Scenario = scenario, variant: Variant = variant) -> bool:
                    tried = replace(scenario, utilisation=round(step * STEP, 3))
                    rows.append(self._row(tried, variant, f"{scenario.name} at {tried.utilisation}"))
                    keep(rows)
                    return bool(rows[-1]["outcome"] == "done")

                best = highest(survives, round(low / STEP), round(high / STEP))
                text = "none of the range" if best is None else f"{best * STEP:.3f}"
                self.progress.note(f"{scenario.name} {variant.name}: highest utilisation {text}")
        return rows


def highest(survives: Callable[[int], bool], first: int, last: int) -> int | None:
    """The largest step in ``[first, last]`` that survives, by bisection; None if even the first does not."""
    best = None
    while first <= last:
        middle = (first + last + 1) // 2
        if survives(middle):
            best, first = middle, middle + 1
        else:
            last = middle - 1
    return best


def _refuse(found: str, wanted: str, todo: str) -> NeaptideError:
    return NeaptideError(found, wanted=wanted, todo=todo, where="bench engine")


def choose_scenarios(names: Sequence[str]) -> list[Scenario]:
    """Scenarios by name; all of them for none."""
    unknown = [n for n in names if n not in SCENARIOS]
    if unknown:
        raise _refuse(f"no scenario {unknown[0]!r}", f"one of {', '.join(SCENARIOS)}", "Check the spelling.")
    return [SCENARIOS[n] for n in names] or list(SCENARIOS.values())


def check_model(model: str | None) -> str | None:
    """A folder with a configuration, or a model's name on a hub; a built-in name is the scenario's business."""
    if model is None:
        return None
    path = Path(model)
    if model in MODELS:
        raise _refuse(f"{model!r} is a built-in model", "a scenario that uses it", "Choose it with --scenario.")
    looks_local = path.exists() or path.is_absolute() or model.startswith(".")
    if looks_local and not (path / "config.json").is_file():
        raise _refuse(f"no config.json in {model}", "a model's folder", "Check the path.")
    return str(path.resolve()) if looks_local else model


def outcome_code(rows: Sequence[Mapping[str, Any]]) -> ExitCode:
    return ExitCode.FINDINGS if any(r["outcome"] == "failed" for r in rows) else ExitCode.DONE


def interpreter(given: Path | None) -> Path:
    return given if given is not None else Path(sys.executable)
