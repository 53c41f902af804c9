# SPDX-License-Identifier: Apache-2.0
"""Upstream's ``kernel_warmup`` while the profile's minimal KV cache stands, so that what it leaves is measured.

What it compiles and tunes is kept by the process, and upstream's own call after the KV cache is sized is short.
Its parts, by what they touch of a KV cache with as few as one block (0.33.0):

- Compile or call kernels on tensors of their own: the JIT registry, mamba, Qwen-VL, watermark, router GEMMs,
  GEMM-RS/AR, CuTe DSL, DeepGEMM (its own and the MoE workspace), b12x, Step5's scoring. Safe.
- Read or write block 0 only: Qwen GDN (null block), Kimi-K3 (first state), Qwen4 QSA (block tables of zeros). Safe.
- Dummy runs of the runner (FlashInfer autotune; Step5; FlashInfer sparse MLA and DeepSeek V4 with a mixed batch,
  where no mixed step runs): block tables of zeros and padding slots, as before a capture. ReplaySSM tunes as many
  state slots as there are blocks, with one block none. No KV connector takes part in a dummy run. Safe.
- The PCIe IPC all-reduce allocates and tunes its workspace once, and keeps it. Safe, and the reason for all this.
- Mixed steps of the V2 runner through the scheduler's interface (FlashInfer sparse MLA, DeepSeek V4, Step5), and mixed
  batches of attention (MiniMax-M3, FlashInfer), take real block ids and go through connectors and samplers. Left to
  upstream's own call: :func:`in_profile_warm_up`.
- HiSparse tunes on as many slots as top-k has entries, whatever its hot cache holds. With HiSparse only the
  process-local part runs.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from vllm.logger import init_logger

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.v1.worker.gpu_worker import Worker

logger = init_logger(__name__)

_running = False


def in_profile_warm_up() -> bool:
    """Whether kernels are being warmed up on a profile's KV cache."""
    return _running


@contextmanager
def _profile_warm_up() -> Iterator[None]:
    global _running
    _running = True
    try:
        yield
    finally:
        _running = False


def warm_up_for_profile(worker: Worker) -> None:
    """Run what is safe of ``kernel_warmup``. Collective where upstream's is: every rank calls it, or none.

    It stays in the profile's inference mode: its dummy runs write to a KV cache that was made there.
    """
    from vllm.model_executor.warmup.kernel_warmup import kernel_warmup

    hisparse = worker.vllm_config.attention_config.hisparse_config is not None
    logger.info("Warming up kernels before the KV cache is sized, to measure what they leave.")
    with _profile_warm_up():
        kernel_warmup(worker, process_local_only=hisparse)
