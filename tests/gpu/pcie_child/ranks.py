"""Ranks as processes: started together, watched, and killed together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

CASES = (
    "exchange-bytes", "exchange-numerics", "exchange-groups", "oneshot-bytes", "oneshot-numerics", "oneshot-groups",
    "ring-numerics", "disagree",
)  # fmt: skip
DEFAULTS: dict[str, Any] = {
    "cases": list(CASES),
    "variant": "patched",
    "sizes": "full",
    "replays": 100_000,
    "world_size": 2,
    "timeout_s": 300,
    "case_timeout_s": 150,
    "dry": False,
    # For compute-sanitizer, which sums up when a process ends by itself.
    "clean_exit": False,
}
GRACE_SECONDS = 8
POLL_SECONDS = 0.1
OUTPUT_CHARACTERS = 3000
# One host without a name server; multicast would need a fabric manager.
ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}


class Journal:
    """What a rank wrote so far, a JSON object a line."""

    def __init__(self, path: Path) -> None:
        self.path, self._read = path, 0

    def new(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        whole, _, _ = self.path.read_bytes()[self._read :].rpartition(b"\n")
        self._read += len(whole) + 1 if whole else 0
        return [json.loads(line) for line in whole.splitlines()]


class Attempt:
    """One set of processes, working through cases until they are done or one fails."""

    def __init__(self, spec: dict[str, Any], cases: list[str], folder: Path) -> None:
        folder.mkdir()
        self.spec, self.cases, self.folder = spec, cases, folder
        world = int(spec["world_size"])
        spec_path = folder / "spec.json"
        spec_path.write_text(json.dumps({**spec, "cases": cases, "rendezvous": str(folder / "rendezvous")}))
        self.journals = [Journal(folder / f"rank{rank}.jsonl") for rank in range(world)]
        self.rows: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}
        self.ended: list[set[str]] = [set() for _ in range(world)]
        self.since = time.monotonic()
        self.processes = []
        for rank in range(world):
            command = [sys.executable, str(Path(__file__).parent), str(spec_path), str(self.journals[rank].path)]
            with open(folder / f"rank{rank}.log", "wb") as log:
                self.processes.append(
                    subprocess.Popen(
                        [*command, "--rank", str(rank)], stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                        env={**ENVIRONMENT, **os.environ},
                    )
                )  # fmt: skip

    def take(self) -> bool:
        """Read the journals; whether there is a new row."""
        before = len(self.rows)
        for rank, journal in enumerate(self.journals):
            for entry in journal.new():
                self.rows += [entry["row"]] if entry["event"] == "row" else []
                self.facts |= entry["facts"] if entry["event"] == "facts" else {}
                if entry["event"] in ("end", "facts"):
                    self.since = time.monotonic()
                if entry["event"] == "end":
                    self.ended[rank].add(entry["case"])
        return len(self.rows) > before

    def in_progress(self) -> str | None:
        return next((case for case in self.cases if not all(case in ended for ended in self.ended)), None)

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()

    def blame(self, why: str) -> None:
        """A failed row of the case in progress for each rank that did not write one itself."""
        case = self.in_progress()
        for rank, process in enumerate(self.processes):
            if any(r["case"] == case and r["rank"] == rank and r["outcome"] == "failed" for r in self.rows):
                continue
            output = (self.folder / f"rank{rank}.log").read_text(errors="replace")[-OUTPUT_CHARACTERS:]
            message = f"{why}; its status is {process.returncode}"
            self.rows.append(_failed(self.spec, case, rank, message, output=output))


def watch(attempt: Attempt, end: float, keep: Callable[[], None]) -> str:
    """Wait for the ranks. Why they failed; empty if they did not."""
    broken_at, why = 0.0, ""
    while True:
        if attempt.take():
            keep()
        states, now = [process.poll() for process in attempt.processes], time.monotonic()
        if all(state is not None for state in states):
            attempt.take()
            bad = [f"rank {rank} ended with {state}" for rank, state in enumerate(states) if state]
            return why or ", ".join(bad) or ("ranks ended early" if attempt.in_progress() else "")
        if any(states) and not broken_at:
            broken_at, why = now, "a rank failed"
        # Ranks meet between cases, so the one that began last says how long the case has taken.
        limit = float(attempt.spec["case_timeout_s"])
        if now > end or now - attempt.since > limit or (broken_at and now - broken_at > GRACE_SECONDS):
            why = why or (f"killed after {limit} s in one case" if now <= end else "killed when the time was over")
            attempt.kill()
            attempt.take()
            return why
        time.sleep(POLL_SECONDS)


def supervise(given: dict[str, Any], result: Path) -> int:
    """Run the cases of a spec; new processes after a case that failed. 0 if no row failed."""
    spec = {**DEFAULTS, **given}
    cases = list(spec["cases"])
    rows: list[dict[str, Any]] = []
    facts: dict[str, Any] = {}
    end = time.monotonic() + float(spec["timeout_s"])
    with tempfile.TemporaryDirectory() as home:
        while cases:
            attempt = Attempt(spec, cases, Path(home) / f"attempt{len(spec['cases']) - len(cases)}")
            try:
                why = watch(attempt, end, partial(_keep, attempt, result, dict(facts), list(rows)))
            finally:
                attempt.kill()
            failed = attempt.in_progress()
            if failed:
                attempt.blame(why)
            cases = cases[cases.index(failed) + 1 :] if failed else []
            if time.monotonic() > end or not attempt.facts:
                attempt.rows += [_failed(spec, case, 0, f"not run: {why}") for case in cases]
                cases = []
            _keep(attempt, result, facts, rows)
            rows, facts = [*rows, *attempt.rows], {**facts, **attempt.facts}
    bad = [row for row in rows if row["outcome"] == "failed"]
    for row in bad:
        print("failed:", json.dumps(row)[:2000], file=sys.stderr)
    print(f"{len(rows)} rows, {len(bad)} failed", file=sys.stderr)
    return 1 if bad else 0


def _failed(spec: dict[str, Any], case: str | None, rank: int, message: str, **more: object) -> dict[str, Any]:
    head = {"case": case, "variant": spec["variant"], "name": "process", "rank": rank}
    return {**head, "outcome": "failed", "message": message, **more}


def _keep(attempt: Attempt, path: Path, facts: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Write all results so far, in one step."""
    found = {**facts, **attempt.facts}
    whole = {
        "versions": found.get("versions", {}),
        "device": found.get("device", ""),
        "rows": [*rows, *attempt.rows],
    }
    draft = path.with_name(path.name + ".part")
    draft.write_text(json.dumps(whole, indent=1, sort_keys=True) + "\n")
    draft.replace(path)
