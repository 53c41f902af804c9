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
ACCOUNTING = "1"
WRONG = "error: "

CONSTANT_BYTES = "constant_bytes"
FIXED_WIDTH = "fixed_width"
UPSTREAM = "upstream"
INDEXER_LOGITS_POLICIES = (CONSTANT_BYTES, FIXED_WIDTH, UPSTREAM)


def indexer_logits_policy(environment: Mapping[str, str] = os.environ) -> str:
    """How the sparse indexer allocates its logits: one of :data:`INDEXER_LOGITS_POLICIES`.

    ``constant_bytes`` (default): prefill launches of one canonical size, decode in row tiles.
    ``fixed_width``: prefill launches as wide as the longest context, decode as upstream.
    ``upstream``: both as upstream.

    Raises:
        ValueError: another value, or two variables that contradict each other.
    """
    named = environment.get(INDEXER_LOGITS_POLICY)
    if named is not None and named not in INDEXER_LOGITS_POLICIES:
        raise ValueError(
            f"{INDEXER_LOGITS_POLICY} is {named!r}, wanted one of {', '.join(INDEXER_LOGITS_POLICIES)}; "
            "unset it for the default."
        )
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


VARIABLES: dict[str, Callable[[], Any]] = {
    INDEXER_LOGITS_POLICY: indexer_logits_policy,
    FIXED_LOGITS_WIDTH: fixed_logits_width,
}
NAMES = frozenset(VARIABLES)


def current_values() -> dict[str, str]:
    """Every switch as this process sees it, and upstream's budget, which decides how work is split.

    A value that cannot be read is the text of its error: it has to reach the other ranks, too.
    """
    from vllm import envs

    values = {"accounting": ACCOUNTING}
    for name in (*sorted(NAMES), LOGITS_BUDGET_MB):
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
    data-parallel replicas follow no plan together and may differ. Workers that join a running engine are not
    compared: the running ones do not take part.

    Raises:
        ValueError: a wrong value, or values that differ within a replica.
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
    mine = [values for of, values in everyone if of == replica]
    wrong = wrong_value([values for _, values in everyone]) or disagreement(mine)
    if wrong is not None:
        raise ValueError(wrong)
