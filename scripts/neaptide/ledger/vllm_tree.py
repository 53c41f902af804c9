"""For ``vllm_child``: the vLLM on the path with the configuration of a profile. Imports nothing of neaptide."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm_modules import KPOOL_OP, LAYERS, MLA, MODULES, SHARED_OP  # type: ignore[import-not-found]


class Tree:
    """The vLLM on the path, and what a profile makes of its configuration.

    Attributes:
        op: the indexer's op of the profile's model.
        sizes: the overlay's arithmetic of logits.
    """

    def __init__(self, folder: str, profile: dict[str, Any]) -> None:
        self.folder, self.profile = Path(folder), SimpleNamespace(**profile)
        self.op = importlib.import_module(KPOOL_OP if self.profile.model == "glm5next" else SHARED_OP)
        self.indexer = importlib.import_module(f"{MLA}.indexer")
        self.sizes = importlib.import_module(f"{LAYERS}.sparse_indexer_logits")
        self.envs = importlib.import_module("vllm.envs")
        p = self.profile
        speculation = SimpleNamespace(
            num_speculative_tokens=p.speculative_tokens, method=p.speculative_method,
            use_dspark=lambda: p.speculative_method == "dspark",
        )  # fmt: skip
        self.config = SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=p.max_model_len),
            scheduler_config=SimpleNamespace(
                max_num_seqs=p.max_num_seqs, max_num_batched_tokens=p.max_num_batched_tokens
            ),
            speculative_config=speculation if p.speculative_tokens else None,
            attention_config=SimpleNamespace(sparse_mla_prefill_workspace_factor=p.prefill_workspace_factor),
            cache_config=SimpleNamespace(kv_cache_memory_bytes=None),
        )

    def has(self, module: str) -> bool:
        """Whether the tree itself has a module of :data:`MODULES`; the overlay is behind it on the path."""
        return self.folder.joinpath("vllm", MODULES[module]).is_file()

    @property
    def patched(self) -> bool:
        return self.has("vllm.neaptide_switches")

    @property
    def takes_width(self) -> bool:
        """Whether the wrapper of DeepGEMM's prefill kernel is told how wide its rows are (vLLM 0.33)."""
        wrapper = importlib.import_module("vllm.utils.deep_gemm").fp8_fp4_mqa_logits
        return "max_seqlen_k" in inspect.signature(wrapper).parameters

    @property
    def columns(self) -> int:
        return int(self.profile.max_model_len // self.profile.index_compress_ratio)

    @property
    def interleave(self) -> int:
        return max(1, int(self.profile.dcp_interleave) // int(self.profile.index_compress_ratio))

    @property
    def budget(self) -> int:
        return int(self.sizes.budget_bytes(self.envs.VLLM_SPARSE_INDEXER_MAX_LOGITS_MB))

    @property
    def sm100(self) -> bool:
        return bool(self.profile.architecture == "sm100")

    @property
    def workspace_rows(self) -> int:
        """Keys that the gather workspace holds."""
        return int(self.indexer.get_max_prefill_buffer_size(self.config) // self.profile.index_compress_ratio)

    def prefill_layout(self) -> Any:
        if not self.takes_width:
            return importlib.import_module(f"{LAYERS}.sparse_indexer_layout").gathered_keys_layout()
        return self.sizes.logits_layout(sm100=self.sm100, fp32_copy=True)

    def decode_layout(self) -> Any:
        fp32 = self.sizes.reads_fp32_logits(self.profile.topk_backend, self.profile.decode_context_parallel)
        return self.sizes.logits_layout(sm100=self.sm100, fp32_copy=fp32)
