# SPDX-License-Identifier: Apache-2.0
"""The configuration of a running engine as plain values, from which ``neaptide profile init`` makes a profile.

Beside the memory ledger of rank 0, under ``VLLM_NEAPTIDE_LEDGER_FILE``, stands ``FILE.config.json``: attributes of
vLLM's configuration under their own names, what the KV cache holds, and the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch

TEXT = "model_config.hf_text_config"
# Attributes of ``VllmConfig``. Those that a model's configuration lacks are left out.
PATHS = (
    "use_v2_model_runner",
    "model_config.architecture",
    "model_config.max_model_len",
    f"{TEXT}.hidden_size",
    f"{TEXT}.num_attention_heads",
    f"{TEXT}.kv_lora_rank",
    f"{TEXT}.qk_rope_head_dim",
    f"{TEXT}.index_n_heads",
    f"{TEXT}.index_head_dim",
    f"{TEXT}.index_topk",
    f"{TEXT}.index_kpool",
    f"{TEXT}.num_hidden_layers",
    "parallel_config.tensor_parallel_size",
    "parallel_config.decode_context_parallel_size",
    "parallel_config.cp_kv_cache_interleave_size",
    "parallel_config.dcp_comm_backend",
    "parallel_config.dcp_q_replicate",
    "scheduler_config.max_num_seqs",
    "scheduler_config.max_num_batched_tokens",
    "speculative_config.num_speculative_tokens",
    "speculative_config.method",
    "compilation_config.cudagraph_mode",
    "compilation_config.max_cudagraph_capture_size",
    "cache_config.cache_dtype",
    "attention_config.backend",
    "kernel_config.sparse_indexer_topk_backend",
    "attention_config.sparse_mla_prefill_workspace_factor",
)
ABSENT = object()


def configuration(worker: Any, kv_bytes: int) -> dict[str, Any]:
    """What :data:`PATHS` name, ``kv_cache`` (bytes of this rank, tokens of the engine) and ``device``.

    The backend is the one that the first layer of MLA has, also where the configuration left the choice to vLLM.

    Args:
        kv_bytes: of this rank's KV cache.
    """
    config = worker.vllm_config
    out: dict[str, Any] = {}
    for path in PATHS:
        value = _at(config, path)
        if value is not ABSENT:
            _put(out, path, _plain(value))
    if backend := _mla_backend(config.compilation_config.static_forward_context):
        _put(out, "attention_config.backend", backend)
    out["kv_cache"] = {"bytes": kv_bytes, "tokens": kv_tokens(config, worker.model_runner.kv_cache_config)}
    properties = torch.cuda.get_device_properties(worker.device)
    capability = [properties.major, properties.minor]
    out["device"] = {"capability": capability, "multiprocessors": properties.multi_processor_count}
    return out


def kv_tokens(config: Any, of_runner: Any) -> int:
    """Tokens that the KV cache holds, as vLLM's line "GPU KV cache size" has them."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity

    return int(get_kv_cache_capacity(config, of_runner)[0])


def _at(root: Any, path: str) -> Any:
    for name in path.split("."):
        root = getattr(root, name, ABSENT)
        if root is ABSENT or root is None:
            return root
    return root


def _put(out: dict[str, Any], path: str, value: Any) -> None:
    *parts, last = path.split(".")
    for part in parts:
        out = out.setdefault(part, {})
    out[last] = value


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.name
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _mla_backend(layers: Mapping[str, Any]) -> str:
    """The name of the backend of the first layer of MLA; "" without one."""
    names = (layer.get_attn_backend().get_name() for layer in layers.values() if hasattr(layer, "kv_lora_rank"))
    return next(names, "")
