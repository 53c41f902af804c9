"""Verification: compile, post-conditions, drop-in contract, and an import smoke where it can run."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from neaptide.anchor import find, rule_text
from neaptide.contract import broken_promises, dotted_name
from neaptide.edits import expectation_span
from neaptide.errors import ExitCode, NeaptideError
from neaptide.model import expand_edit
from neaptide.outcomes import IN_FORCE, Plan
from neaptide.places import Place
from neaptide.series import edits_for, overlays_for
from neaptide.text import Source

_SMOKE = """
import importlib, json, sys
out, touched = [], json.loads(sys.argv[1])
for name in touched:
    try:
        importlib.import_module(name)
        out.append([name, "imported", ""])
    except ModuleNotFoundError as error:
        out.append([name, "missing", error.name or str(error)])
    except ImportError as error:
        # Raised by a module that no patch touches, and not for a name: that module does not load on this machine.
        at = error.__traceback__
        while at.tb_next is not None:
            at = at.tb_next
        own = error.name or at.tb_frame.f_globals.get("__name__") in touched
        out.append([name, "failed" if own else "refused", f"{type(error).__name__}: {error}"])
    except BaseException as error:
        out.append([name, "failed", f"{type(error).__name__}: {error}"])
print("\\nNEAPTIDE" + json.dumps(out))
"""


@dataclass(frozen=True)
class Smoke:
    """Outcome of importing the touched modules: ``imported``, ``partly``, ``skipped`` or ``failed``; and of each."""

    result: str
    detail: str


def check_plan(plan: Plan, place: Place) -> None:
    """Checks on the planned bytes alone, before anything is written.

    Raises:
        NeaptideError: with exit code 5, naming every problem.
    """
    problems = _uncompilable(plan) or [*_unmet(plan), *_broken_contracts(plan, place)]
    if problems:
        raise NeaptideError(
            "; ".join(problems), wanted="every check of the planned tree to hold", todo="Mend the patch.",
            where=place.label, code=ExitCode.UNVERIFIED,
        )  # fmt: skip


def _uncompilable(plan: Plan) -> list[str]:
    problems = []
    for path, data in plan.files.items():
        if path.endswith(".py"):
            try:
                compile(data, path, "exec", dont_inherit=True)
            except SyntaxError as error:
                problems.append(f"{path} does not compile (line {error.lineno}: {error.msg})")
    return problems


def _unmet(plan: Plan) -> list[str]:
    """Post-conditions, asked again of the whole series' result."""
    problems = []
    subject, files = plan.subject, plan.files
    sources: dict[str, Source] = {}
    for patch in plan.patches:
        if patch.status not in IN_FORCE:
            continue
        for raw in edits_for(patch.patch, subject.version):
            edit = expand_edit(raw, dict(subject.names))
            where = f"{patch.patch.id}: {edit.file} {edit.symbol}"
            if edit.file not in sources:
                sources[edit.file] = Source(files[edit.file].decode("utf-8"))
            source = sources[edit.file]
            span = expectation_span(source, edit)
            if span is None:
                problems.append(f"{where} is gone")
                continue
            problems += [
                f"{where}: {rule_text(rule)} does not hold after the series"
                for rule in edit.expectations
                if not find(source, rule, span)
            ]
    return problems


def _broken_contracts(plan: Plan, place: Place) -> list[str]:
    replaced = [
        (patch, overlay.dest)
        for patch in plan.patches
        if patch.status in IN_FORCE
        for overlay in overlays_for(patch.patch, plan.subject.version)
        if overlay.mode == "replace"
    ]
    if not replaced:
        return []
    modules = {**place.modules(), **plan.files}
    problems = []
    for patch, dest in replaced:
        old = plan.subject.read(dest) or b""
        package = plan.subject.names["pkg"]
        found = broken_promises(package, dest, old, plan.files[dest], modules)
        problems += [f"{patch.patch.id}: drop-in {dest}: {problem}" for problem in found]
    return problems


def import_smoke(plan: Plan, place: Place, python: Path | None = None) -> Smoke:
    """Import every touched module in a subprocess; skipped, and said so, where a dependency is missing."""
    package = plan.subject.names["pkg"]
    modules = sorted(dotted_name(package, p) for p in plan.files if p.endswith(".py"))
    if not modules:
        return Smoke("skipped", "no module is touched")
    env = {**os.environ, "PYTHONPATH": str(place.package_parent()), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [str(python or sys.executable), "-W", "ignore", "-c", _SMOKE, json.dumps(modules)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False, cwd=os.path.sep)
    marked = [line for line in done.stdout.splitlines() if line.startswith("NEAPTIDE")]
    if not marked:
        return Smoke("failed", f"the interpreter ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    rows = json.loads(marked[-1].removeprefix("NEAPTIDE"))
    own = _own_imports(plan)
    failed = [f"{n}: {why}" for n, how, why in rows if how == "failed"]
    failed += [
        f"{n}: no module {why}"
        for n, how, why in rows
        if how == "missing" and (why.split(".")[0] == package or why.split(".")[0] in own)
    ]
    if failed:
        return Smoke("failed", "; ".join(failed))
    missing = [f"{n} (not installed here: {why})" for n, how, why in rows if how == "missing"]
    missing += [f"{n} (does not load on this machine: {why})" for n, how, why in rows if how == "refused"]
    imported = [n for n, how, _ in rows if how == "imported"]
    said = [f"imported {', '.join(imported)}"] if imported else []
    said += [f"skipped {', '.join(missing)}"] if missing else []
    return Smoke("skipped" if not imported else "partly" if missing else "imported", "; ".join(said))


def _own_imports(plan: Plan) -> set[str]:
    """Top-level packages that only our overlay and inserted code import, not the pristine files."""
    after: set[str] = set()
    before: set[str] = set()
    for path, data in plan.files.items():
        if path.endswith(".py"):
            after |= _roots(data)
            before |= _roots(plan.subject.read(path) or b"")
    return after - before - set(sys.stdlib_module_names)


def _roots(data: bytes) -> set[str]:
    roots: set[str] = set()
    for node in ast.walk(ast.parse(data)):
        if isinstance(node, ast.Import):
            roots |= {a.name.split(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            roots.add(node.module.split(".")[0])
    return roots
