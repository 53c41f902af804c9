# SPDX-License-Identifier: Apache-2.0
"""The profiling run in two passes: one plans the workspace, the other is measured with the workspace that stays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger
from vllm.v1.worker.workspace import commit_workspace, workspace_report

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker

logger = init_logger(__name__)


def planning_profile_run(worker: Worker, **kwargs: Any) -> None:
    """``profile_run`` of the worker's runner, then the commit of the workspace; nothing is measured."""
    worker.model_runner.profile_run(**kwargs)
    commit_workspace()


def committed_profile_run(worker: Worker, **kwargs: Any) -> None:
    """``profile_run`` twice: the first pass plans, the second meets the committed workspace.

    The peak is reset in between. So the measured peak is that of activations beside the whole workspace, as it is in
    service; in one pass, what was allocated before a slot had grown was measured beside less, and outgrown
    storage could be counted. Scratch of the first call of a kernel (compilation, autotuning), which no later step asks
    for again, is left out. Every rank runs both passes, whatever its own plan is: the forward has collectives.
    """
    planning_profile_run(worker, **kwargs)
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats(worker.device)
    worker.model_runner.profile_run(**kwargs)


def log_workspace() -> None:
    """One line beside the KV-cache summary: what the slots hold, and for whom."""
    report = workspace_report()
    if report is not None:
        logger.info_once("%s", report.line())
