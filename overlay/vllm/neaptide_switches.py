# SPDX-License-Identifier: Apache-2.0
"""The switches of neaptide's vLLM patches: the one place that reads their environment variables.

``vllm.envs`` takes the names into its table and reads their values here, so they are known to vLLM, validated
when its cache is filled, left out of the compile hash and carried to Ray workers. It imports this module on use only:
vLLM's ``setup.py`` loads ``envs.py`` by its path where no vLLM can be imported. The rest of the overlay reads the
values from ``vllm.envs``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

INDEXER_LOGITS_POLICY = "VLLM_NEAPTIDE_INDEXER_LOGITS_POLICY"
# The name that vllm-project/vllm#58068 gives to its fixed width: 1 and 0 are understood.
FIXED_LOGITS_WIDTH = "VLLM_SPARSE_INDEXER_FIXED_LOGITS_WIDTH"
LOGITS_BUDGET_MB = "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB"

# Raised when the bytes that profiling reserves change for the same settings.
ACCOUNTING = "2"
WRONG = "error: "

CONSTANT_BYTES = "constant_bytes"
FIXED_WIDTH = "fixed_width"
UPSTREAM = "upstream"
INDEXER_LOGITS_POLICIES = (CONSTANT_BYTES, FIXED_WIDTH, UPSTREAM)

WORKSPACE_OVERFLOW = "VLLM_NEAPTIDE_WORKSPACE_OVERFLOW"
WORKSPACE_OVERFLOW_MB = "VLLM_NEAPTIDE_WORKSPACE_OVERFLOW_MB"
MLA_SPLITS_MB = "VLLM_NEAPTIDE_MLA_SPLITS_MB"
PROFILE_WARMUP = "VLLM_NEAPTIDE_PROFILE_WARMUP"

PCIE = "VLLM_NEAPTIDE_PCIE_COLLECTIVES"
PCIE_ARCHITECTURES = "VLLM_NEAPTIDE_PCIE_ARCHITECTURES"
PCIE_ONESHOT_KB = "VLLM_NEAPTIDE_PCIE_ONESHOT_KB"
PCIE_RING_KB = "VLLM_NEAPTIDE_PCIE_RING_KB"
PCIE_RING_MB = "VLLM_NEAPTIDE_PCIE_RING_MB"
PCIE_DCP_ROWS = "VLLM_NEAPTIDE_PCIE_DCP_ROWS"

LEDGER_FILE = "VLLM_NEAPTIDE_LEDGER_FILE"

TRANSIENT = "transient"
ERROR = "error"
WORKSPACE_OVERFLOWS = (TRANSIENT, ERROR)


def indexer_logits_policy(environment: Mapping[str, str] = os.environ) -> str:
    """How the sparse indexer allocates its logits: one of :data:`INDEXER_LOGITS_POLICIES`.

    ``constant_bytes`` (default): prefill launches of one canonical size, decode in row tiles.
    ``fixed_width``: prefill launches as wide as the longest context, decode as upstream.
    ``upstream``: both as upstream.

    Raises:
        ValueError: another value, or two variables that contradict each other.
    """
    named = one_of(environment, INDEXER_LOGITS_POLICY, INDEXER_LOGITS_POLICIES)
    fixed = fixed_logits_width(environment)
    if fixed is None:
        return named or CONSTANT_BYTES
    meant = FIXED_WIDTH if fixed else UPSTREAM
    if named is not None and named != meant:
        raise ValueError(
            f"{INDEXER_LOGITS_POLICY} is {named!r} and {FIXED_LOGITS_WIDTH} means {meant!r}, wanted them to "
            "agree; unset one of them."
        )
    return meant


def fixed_logits_width(environment: Mapping[str, str] = os.environ) -> bool | None:
    """vllm-project/vllm#58068's switch: True for ``1``, False for ``0``, None if unset.

    Raises:
        ValueError: another value.
    """
    value = environment.get(FIXED_LOGITS_WIDTH)
    if value not in (None, "0", "1"):
        raise ValueError(
            f"{FIXED_LOGITS_WIDTH} is {value!r}, wanted 1 ({FIXED_WIDTH}) or 0 ({UPSTREAM}); "
            f"unset it, or set {INDEXER_LOGITS_POLICY}."
        )
    return None if value is None else value == "1"


def one_of(environment: Mapping[str, str], name: str, allowed: Sequence[str]) -> str | None:
    """The value of a switch with few values, None if it is unset.

    Raises:
        ValueError: a value that is not allowed.
    """
    value = environment.get(name)
    if value is not None and value not in allowed:
        raise ValueError(f"{name} is {value!r}, wanted one of {', '.join(allowed)}; unset it for the default.")
    return value


def whole_number(environment: Mapping[str, str], name: str, unit: str, least: int = 0) -> int | None:
    """A number of ``unit``, ``least`` or more; None if it is unset.

    Raises:
        ValueError: not a whole number, or a smaller one.
    """
    value = environment.get(name)
    if value is not None and not (value.isascii() and value.isdigit() and int(value) >= least):
        raise ValueError(
            f"{name} is {value!r}, wanted a whole number of {unit}, {least} or more; unset it for the default."
        )
    return None if value is None else int(value)


def megabytes(environment: Mapping[str, str], name: str) -> int | None:
    """A budget in MiB, 0 or more; None if it is unset."""
    return whole_number(environment, name, "MiB")


def workspace_overflow(environment: Mapping[str, str] = os.environ) -> str:
    """What a request over a locked workspace slot gets: one of :data:`WORKSPACE_OVERFLOWS`.

    ``transient`` (default): an allocation of its own, within :func:`workspace_overflow_mb`.
    ``error``: upstream's assertion.

    Raises:
        ValueError: another value.
    """
    return one_of(environment, WORKSPACE_OVERFLOW, WORKSPACE_OVERFLOWS) or TRANSIENT


def workspace_overflow_mb(environment: Mapping[str, str] = os.environ) -> int:
    """MiB that requests over locked workspace slots may hold at once (default 1,024)."""
    found = megabytes(environment, WORKSPACE_OVERFLOW_MB)
    return 1024 if found is None else found


def mla_splits_mb(environment: Mapping[str, str] = os.environ) -> int | None:
    """MiB that the split accumulators of sparse MLA attention may take in one call; 0: no bound.

    None (default): as few as change no bit of an eager call, and no bound in a captured graph.
    """
    return megabytes(environment, MLA_SPLITS_MB)


def profile_warmup(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether kernels are warmed up before the KV cache is sized, too: ``1`` (default) or ``0``.

    Raises:
        ValueError: another value.
    """
    return one_of(environment, PROFILE_WARMUP, ("0", "1")) != "0"


def pcie_collectives(environment: Mapping[str, str] = os.environ) -> str:
    """Whether b12x's PCIe collectives serve tensor and decode context parallelism: ``0`` (default), ``auto`` or ``1``.

    ``auto``: on more than two GPUs without NVLink. Where something that they need is missing, vLLM's own serve in any
    case. Off by default until they have been seen to run on the cards that ``auto`` is for.

    Raises:
        ValueError: another value.
    """
    return one_of(environment, PCIE, ("auto", "0", "1")) or "0"


def pcie_architectures(environment: Mapping[str, str] = os.environ) -> str:
    """``listed`` (default): the architectures that they are made for. ``any``, for tests: every one.

    Raises:
        ValueError: another value.
    """
    return one_of(environment, PCIE_ARCHITECTURES, ("listed", "any")) or "listed"


def pcie_oneshot_kb(environment: Mapping[str, str] = os.environ) -> int:
    """KiB of the largest payload of the oneshot all-reduce (default 84)."""
    return whole_number(environment, PCIE_ONESHOT_KB, "KiB", 1) or 84


def pcie_ring_kb(environment: Mapping[str, str] = os.environ) -> int:
    """KiB of the smallest payload of the DMA ring; 0 (default): no ring, and none of its memory."""
    return whole_number(environment, PCIE_RING_KB, "KiB") or 0


def pcie_ring_mb(environment: Mapping[str, str] = os.environ) -> int:
    """MiB of the largest payload of the DMA ring (default 36): its slab is 2 (W - 1) / W of that."""
    return whole_number(environment, PCIE_RING_MB, "MiB", 1) or 36


def pcie_dcp_rows(environment: Mapping[str, str] = os.environ) -> int:
    """Most rows of a step in the exchanges of decode context parallelism (default 64); 0: NCCL for all."""
    found = whole_number(environment, PCIE_DCP_ROWS, "rows")
    return 64 if found is None else found


def ledger_file(environment: Mapping[str, str] = os.environ) -> str:
    """Where each worker writes its memory ledger, as ``FILE.rankN.json``; empty (default): nowhere.

    Raises:
        ValueError: a folder that is not there.
    """
    value = environment.get(LEDGER_FILE, "")
    folder = os.path.dirname(value) or "."
    if value and not os.path.isdir(folder):
        raise ValueError(f"{LEDGER_FILE} is {value!r}, wanted a file in a folder that exists; make {folder}.")
    return value


VARIABLES: dict[str, Callable[[], Any]] = {
    INDEXER_LOGITS_POLICY: indexer_logits_policy,
    FIXED_LOGITS_WIDTH: fixed_logits_width,
    WORKSPACE_OVERFLOW: workspace_overflow,
    WORKSPACE_OVERFLOW_MB: workspace_overflow_mb,
    MLA_SPLITS_MB: mla_splits_mb,
    PROFILE_WARMUP: profile_warmup,
    PCIE: pcie_collectives,
    PCIE_ARCHITECTURES: pcie_architectures,
    PCIE_ONESHOT_KB: pcie_oneshot_kb,
    PCIE_RING_KB: pcie_ring_kb,
    PCIE_RING_MB: pcie_ring_mb,
    PCIE_DCP_ROWS: pcie_dcp_rows,
    LEDGER_FILE: ledger_file,
}
NAMES = frozenset(VARIABLES)
# Upstream's, which lets a rank leave the profile early.
STARTUP_PLAN = "VLLM_ENABLE_STARTUP_PLAN"
# What decides whether ranks enter collectives of the whole world: also alike across data-parallel replicas.
TOGETHER = (PROFILE_WARMUP, STARTUP_PLAN)


def current_values() -> dict[str, str]:
    """Every switch as this process sees it, and those of upstream that decide what ranks do together.

    A value that cannot be read is the text of its error: it has to reach the other ranks, too.
    """
    from vllm import envs

    values = {"accounting": ACCOUNTING}
    for name in (*sorted(NAMES), LOGITS_BUDGET_MB, STARTUP_PLAN):
        try:
            values[name] = repr(getattr(envs, name))
        except ValueError as error:
            text = str(error)
            values[name] = WRONG + (text if name in text else f"{name}: {text}")
    return values


def wrong_value(values: Sequence[Mapping[str, str]]) -> str | None:
    """The error of the first value, on any rank, that could not be read."""
    wrong = (v[name].removeprefix(WRONG) for v in values for name in sorted(v) if v[name].startswith(WRONG))
    return next(wrong, None)


def disagreement(values: Sequence[Mapping[str, str]]) -> str | None:
    """The first name whose values differ between ranks, by their order; None if none does."""
    for name in sorted(set().union(*values)):
        seen = [v.get(name, "absent") for v in values]
        if len(set(seen)) > 1:
            found = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(seen))
            return f"{name} differs across ranks: {found}; wanted one value. Set it alike in every rank's environment."
    return None


def check_ranks_agree(parallel_config: Any) -> None:
    """Compare the switches of all ranks once, when the process groups stand.

    Collective over the world group, on the CPU. Every rank takes part whatever its own values are, so
    that a wrong value is an error on all of them and not a hang on the others. Ranks of different
    data-parallel replicas follow no plan together and may differ, but for :data:`TOGETHER`. Workers that join a running
    engine are not compared: the running ones do not take part.

    Raises:
        ValueError: a wrong value, or values that differ within a replica or, of :data:`TOGETHER`, in the world.
    """
    import torch
    from vllm import envs
    from vllm.distributed import get_world_group

    if getattr(envs, "VLLM_ELASTIC_EP_SCALE_UP_LAUNCH", False):
        return
    world, replica = get_world_group(), parallel_config.data_parallel_rank
    everyone: list[Any] = [(replica, current_values())]
    if world.world_size > 1:
        everyone = [None] * world.world_size
        torch.distributed.all_gather_object(everyone, (replica, current_values()), group=world.cpu_group)
    all_ranks = [values for _, values in everyone]
    mine = [values for of, values in everyone if of == replica]
    together = [{name: v[name] for name in TOGETHER if name in v} for v in all_ranks]
    wrong = wrong_value(all_ranks) or disagreement(together) or disagreement(mine)
    if wrong is not None:
        raise ValueError(wrong)
