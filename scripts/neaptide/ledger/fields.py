"""What each field of a profile means, and where a dump of vLLM's configuration has it."""

from __future__ import annotations

from dataclasses import dataclass

TEXT = "model_config.hf_text_config"


@dataclass(frozen=True)
class Field:
    """A field of :class:`~neaptide.ledger.profiles.Profile`.

    Attributes:
        meaning: as the template and docs/ledger.md have it.
        example: a value, as TOML has it.
        dumped: its path in a dump; "" where a dump has none and the example or the default stays.
        optional: whether a dump may leave the path out.
    """

    meaning: str
    example: str
    dumped: str = ""
    optional: bool = False


FIELDS: dict[str, Field] = {
    "description": Field("one line about the deployment", '""'),
    "engine": Field(
        '"mainline": the pin\'s own vLLM; "fork": one with callers of b12x\'s pools and indexer', '"mainline"'
    ),
    "runner": Field('model runner: "v1" or "v2"', '"v2"', "use_v2_model_runner"),
    "model": Field(
        'whose attention and indexer: "deepseek_v32" (GLM-5 too), "glm5next" or "deepseek_v41"',
        '"deepseek_v32"',
        "model_config.architecture",
    ),
    "tensor_parallel": Field("ranks of tensor parallelism", "4", "parallel_config.tensor_parallel_size"),
    "decode_context_parallel": Field(
        "ranks of decode context parallelism; divides tensor_parallel",
        "1",
        "parallel_config.decode_context_parallel_size",
    ),
    "dcp_interleave": Field(
        "tokens that go to a DCP rank in turn", "1", "parallel_config.cp_kv_cache_interleave_size", True
    ),
    "dcp_comm_backend": Field('combine of DCP: "a2a" or "ag_rs"', '"ag_rs"', "parallel_config.dcp_comm_backend", True),
    "replicated_queries": Field(
        "whether every DCP rank has all heads' queries (dcp_q_replicate)",
        "false",
        "parallel_config.dcp_q_replicate",
        True,
    ),
    "max_num_seqs": Field("most sequences of a step", "8", "scheduler_config.max_num_seqs"),
    "max_num_batched_tokens": Field("most tokens of a step", "8192", "scheduler_config.max_num_batched_tokens"),
    "max_model_len": Field("longest context, in tokens", "131072", "model_config.max_model_len"),
    "prefill_chunk_tokens": Field(
        "tokens of a prefill chunk, where the scheduler's is smaller than a batch; 0: a batch", "0"
    ),
    "speculative_tokens": Field(
        "tokens drafted for a step; 0: none", "0", "speculative_config.num_speculative_tokens", True
    ),
    "speculative_method": Field("vLLM's name of the method", '"mtp"', "speculative_config.method", True),
    "full_graphs": Field(
        "whether decode steps are captured whole (FULL graphs)", "true", "compilation_config.cudagraph_mode"
    ),
    "largest_capture_rows": Field(
        "rows of the largest CUDA graph; 0: none", "512", "compilation_config.max_cudagraph_capture_size"
    ),
    "hidden_size": Field("width of the hidden states", "6144", f"{TEXT}.hidden_size"),
    "attention_heads": Field(
        "query heads of all ranks; a multiple of tensor_parallel", "64", f"{TEXT}.num_attention_heads"
    ),
    "kv_lora_rank": Field("width of the compressed KV", "512", f"{TEXT}.kv_lora_rank"),
    "qk_rope_head_dim": Field("width of the rotary part of a query", "64", f"{TEXT}.qk_rope_head_dim"),
    "element_bytes": Field("bytes of an activation", "2"),
    "query_bytes": Field("bytes of a query element as the attention kernel reads it; 1 if quantised", "2"),
    "index_heads": Field("heads of the sparse indexer", "32", f"{TEXT}.index_n_heads"),
    "index_head_dim": Field("width of one of them", "128", f"{TEXT}.index_head_dim"),
    "index_topk": Field("keys that a row keeps", "2048", f"{TEXT}.index_topk"),
    "index_layers": Field("layers with an indexer", "61", f"{TEXT}.num_hidden_layers"),
    "index_compress_ratio": Field(
        "tokens of one key of the indexer (GLM-5.3's index_kpool); divides max_model_len",
        "1",
        f"{TEXT}.index_kpool",
        True,
    ),
    "kv_bytes_per_token": Field(
        "KV-cache bytes of a token on one GPU: available bytes / tokens of vLLM's start-up lines", "14352", "kv_cache"
    ),
    "kv_cache_dtype": Field("vLLM's name of the KV-cache format", '"fp8_ds_mla"', "cache_config.cache_dtype"),
    "page_size": Field("tokens of a page of b12x's index cache", "64"),
    "attention_backend": Field(
        "vLLM's name of the sparse MLA backend", '"FLASHMLA_SPARSE"', "attention_config.backend"
    ),
    "topk_backend": Field(
        "vLLM's sparse_indexer_topk_backend", '"auto"', "kernel_config.sparse_indexer_topk_backend", True
    ),
    "prefill_workspace_factor": Field(
        "sparse_mla_prefill_workspace_factor; vLLM's own: 5 up to 262,144 tokens, 2 above",
        "5",
        "attention_config.sparse_mla_prefill_workspace_factor",
    ),
    "logits_budget_mib": Field("VLLM_SPARSE_INDEXER_MAX_LOGITS_MB; 0: vLLM's default", "0"),
    "margin_mib": Field(
        "MiB that the allocator can still take while the engine serves, beside what the profile reserved; 0: no bound",
        "0",
    ),
    "architecture": Field('which of DeepGEMM\'s layouts: "sm90", "sm100" or "sm120"', '"sm120"', "device.capability"),
    "multiprocessors": Field("of the device", "188", "device.multiprocessors"),
    "pcie_collectives": Field('VLLM_NEAPTIDE_PCIE_COLLECTIVES: "0", "auto" or "1"; here "auto" is on', '"0"'),
    "exchange_rows": Field("most rows of a DCP exchange over b12x; 0: none", "64"),
    "oneshot_kib": Field("KiB of the widest oneshot payload", "84"),
    "ring": Field(
        "whether pcie_collectives makes a DMA ring (VLLM_NEAPTIDE_PCIE_RING_KB); a fork does in any case", "false"
    ),
    "ring_bytes": Field("its widest tensor; 0: hidden states of a whole batch", "0"),
    "ring_wire_mode": Field('its wire mode; "0": bf16', '"0"'),
    "indexer_plan_budget_mib": Field("plan_budget that a caller gives b12x's indexer; 0: none", "0"),
}
SECTIONS = {
    "engine": "The engine",
    "hidden_size": "The model",
    "kv_bytes_per_token": "KV cache and backends",
    "margin_mib": "The device",
    "pcie_collectives": "b12x",
}
