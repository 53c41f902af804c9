"""``neaptide ledger --live FILE...``: what the workers of a patched engine wrote at the end of start-up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, ValidationError, json, to_builtins

from neaptide.bench.results import MIB
from neaptide.errors import ExitCode, NeaptideError
from neaptide.output import Progress

SWITCH = "VLLM_NEAPTIDE_LEDGER_FILE"
SCHEMA_VERSION = 1
# Of what is not KV cache: more than this is to be looked into.
MOST_RESIDUE = 0.02


class LiveRegion(Struct, frozen=True, kw_only=True):
    """Memory of one kind; ``in_torch`` if torch's allocator has it."""

    name: str
    bytes: int
    in_torch: bool


class LargeBlock(Struct, frozen=True, kw_only=True):
    """A block of 64 MiB or more; ``named`` if a tensor of the model, the runner or a graphs' pool is in it."""

    name: str
    region: str
    bytes: int
    named: bool


class Live(Struct, frozen=True, kw_only=True):
    """A rank's file; see the patch ``vllm/live-ledger``."""

    schema_version: int
    rank: int
    device: str
    total_bytes: int
    free_bytes: int
    residue_bytes: int
    residue_share: float
    pcie_held_bytes: int
    regions: list[LiveRegion]
    large_blocks: list[LargeBlock]

    @property
    def findings(self) -> list[str]:
        """What somebody should look into."""
        out = []
        if abs(self.residue_share) > MOST_RESIDUE:
            out.append(
                f"rank {self.rank}: {self.residue_bytes:,} B belong to no region: {self.residue_share:.1%} of what is "
                f"not KV cache, wanted at most {MOST_RESIDUE:.0%}"
            )
        return out + [
            f"rank {self.rank}: a block of {one.bytes:,} B without a name" for one in self.large_blocks if not one.named
        ]


def read_live(path: Path) -> Live:
    """A rank's file.

    Raises:
        NeaptideError: not there, of another form, or parts that do not sum to the device.
    """
    try:
        found = json.decode(path.read_bytes(), type=Live)
    except (OSError, ValidationError, ValueError) as error:
        raise NeaptideError(
            str(error), wanted=f"a file that a patched vLLM wrote under {SWITCH}",
            todo="Start the engine with it, and name FILE.rankN.json.", where=str(path),
        ) from error  # fmt: skip
    if found.schema_version != SCHEMA_VERSION:
        raise NeaptideError(
            f"schema_version {found.schema_version}", wanted=f"{SCHEMA_VERSION}, which this neaptide reads",
            todo="Use the neaptide that the engine was patched with.", where=str(path),
        )  # fmt: skip
    parts = sum(region.bytes for region in found.regions) + found.free_bytes + found.residue_bytes
    if parts != found.total_bytes:
        raise NeaptideError(
            f"the parts sum to {parts:,} B", wanted=f"the device's {found.total_bytes:,} B", todo="Write it anew.",
            where=str(path),
        )  # fmt: skip
    return found


def run_live(paths: Sequence[Path], progress: Progress) -> tuple[ExitCode, dict[str, Any]]:
    """A table a rank; findings where a residue is large or a block has no name."""
    ranks = sorted((read_live(path) for path in paths), key=lambda one: one.rank)
    twice = sorted({one.rank for one in ranks if sum(other.rank == one.rank for other in ranks) > 1})
    if twice:
        raise NeaptideError(
            f"rank {twice[0]} twice", wanted="one file a rank, of one engine", todo="Leave one out.", where="--live"
        )
    for one in ranks:
        rows = [[r.name, f"{r.bytes / MIB:,.1f}", "torch" if r.in_torch else "outside"] for r in one.regions]
        rows += [
            ["free", f"{one.free_bytes / MIB:,.1f}", ""],
            ["in no region", f"{one.residue_bytes / MIB:,.1f}", f"{one.residue_share:.2%} of what is not KV cache"],
            ["the device", f"{one.total_bytes / MIB:,.1f}", one.device],
        ]
        progress.table(f"rank {one.rank}", ("region", "MiB", ""), rows)
    findings = [text for one in ranks for text in one.findings]
    for text in findings:
        progress.note(text)
    out = {"findings": findings, "ranks": [to_builtins(one) for one in ranks]}
    return ExitCode.FINDINGS if findings else ExitCode.DONE, out
