"""Modules of vLLM that ``vllm_child`` runs as they are; what else these import is a stand-in."""

from __future__ import annotations

LAYERS, MLA, WORKER = "vllm.model_executor.layers", "vllm.v1.attention.backends.mla", "vllm.v1.worker"
SHARED_OP, KPOOL_OP = f"{LAYERS}.sparse_attn_indexer", "vllm.models.glm5next.nvidia.sparse_indexer"
KPOOL_SHAPES = "vllm.models.glm5next.common.sparse_indexer"
# What the overlay adds without an edit of upstream's: arithmetic only.
PURE = (
    "vllm.neaptide_switches",
    *(f"{LAYERS}.sparse_indexer_{name}" for name in ("layout", "logits", "plan")),
    *(f"{LAYERS}.attention.{name}" for name in ("mla_transients", "mla_kernel_memory")),
    f"{MLA}.fa3_splits",
)
REAL = (
    "vllm.envs", "vllm.utils.math_utils", "vllm.utils.deep_gemm", SHARED_OP, KPOOL_OP, KPOOL_SHAPES,
    f"{LAYERS}.indexer_topk",
    f"{LAYERS}.sparse_indexer_launch", f"{LAYERS}.sparse_indexer_prefill", f"{LAYERS}.sparse_indexer_prefill_keys",
    f"{LAYERS}.sparse_indexer_decode", f"{LAYERS}.sparse_indexer_decode_ops", f"{MLA}.indexer", f"{WORKER}.gpu_worker",
    f"{WORKER}.workspace", f"{WORKER}.workspace_lanes",
    *(f"{WORKER}.workspace_{name}" for name in ("context", "layout", "overflow", "persistent", "report", "device")),
)  # fmt: skip
MODULES = {name: "/".join(name.split(".")[1:]) + ".py" for name in (*REAL, *PURE)}
