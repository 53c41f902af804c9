"""Tiny sparse-attention models by configuration alone, for dummy weights: nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# The shapes that size memory (index heads, top-k, latent and rotary widths) are those of the real models; depth, width
# and vocabulary are small.
_DEEPSEEK_V32: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "dtype": "bfloat16",
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk": 2048,
    "intermediate_size": 4096,
    "kv_lora_rank": 512,
    "max_position_embeddings": 1048576,
    "moe_intermediate_size": 1024,
    "n_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 64,
    "q_lora_rank": 1024,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 8192,
}

MODELS: dict[str, dict[str, Any]] = {
    "deepseek-v32-tiny": _DEEPSEEK_V32,
    "deepseek-v32-tiny-mtp": {**_DEEPSEEK_V32, "num_nextn_predict_layers": 1},
    # FlashMLA's sparse backend takes decode context parallelism with under 32 heads on a rank.
    "deepseek-v32-tiny-32-heads": {**_DEEPSEEK_V32, "num_attention_heads": 32, "num_key_value_heads": 32},
    "glm-dsa-tiny": {
        **_DEEPSEEK_V32,
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
    },
}


def write_model(name: str, folder: Path) -> Path:
    """The folder of a built-in model, ready to be given to the engine with ``load_format=dummy``."""
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(MODELS[name], indent=2, sort_keys=True))
    return path
