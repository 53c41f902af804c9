"""Scenarios of the engine bench, each a small declared object."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Request:
    """``count`` prompts of ``prompt_tokens`` token ids that are given together; ``output_tokens`` are generated."""

    prompt_tokens: int
    output_tokens: int = 4
    count: int = 1


@dataclass(frozen=True)
class Scenario:
    """What an engine is started with, and the requests it gets one after another.

    Attributes:
        batched_tokens: ``max_num_batched_tokens``, the prefill chunk.
        graphs: ``eager``, ``piecewise`` or ``full`` (with PIECEWISE for mixed steps).
        runner: vLLM's model runner, 1 or 2.
        kv_cache_bytes: size of the KV cache instead of a utilisation.
        capture_sizes: how many graphs, of 1, 2 and every fourth token count; none for vLLM's own choice.
        sleep_after: put the engine to sleep and wake it after this many requests.
        ranks: ``tensor_parallel_size``; memory is then rank 0's, and what each rank holds for PCIe stands beside it.
        kv_cache_dtype: vLLM's name of it.
        context_ranks: ``decode_context_parallel_size``, of these ranks.
        switches: environment variables of the engine, which only the patched one reads.
    """

    name: str
    requests: tuple[Request, ...]
    model: str = "deepseek-v32-tiny"
    max_model_len: int = 131072
    batched_tokens: int = 3072
    max_num_seqs: int = 64
    utilisation: float = 0.4
    graphs: str = "full"
    runner: int = 2
    attention_backend: str | None = None
    speculative_tokens: int = 0
    kv_cache_bytes: int | None = None
    expandable_segments: bool = False
    capture_sizes: int | None = None
    sleep_after: int | None = None
    kv_cache_dtype: str = "auto"
    ranks: int = 1
    context_ranks: int = 1
    switches: tuple[tuple[str, str], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _prompts(*lengths: int) -> tuple[Request, ...]:
    return tuple(Request(n) for n in lengths)


LADDER = Scenario("prefill-ladder", _prompts(1000, 30000, 100000, 120000, 90000))
_FLASHMLA = replace(LADDER, attention_backend="FLASHMLA_SPARSE")
_SHORT = _prompts(1000, 30000, 90000)

_LONG = _prompts(1000, 30000, 100000, 120000, 90000, 70000, 131000)
_DECODE = (Request(60000, 64, count=32),)
_NEAR_LIMIT = (*_prompts(30000, 100000, 120000), Request(60000, 32, count=16))
# Short sequences, so many that their rows at full width are gigabytes.
_DECODE_WIDE = replace(
    _FLASHMLA, name="decode-wide", max_model_len=1 << 20, max_num_seqs=1536, utilisation=0.975, graphs="eager",
    requests=(Request(64, 64, count=1536),),
)  # fmt: skip
_MIXED = (Request(1000, 256, count=16), Request(90000, 8, count=2))
_GRAPHS = replace(_FLASHMLA, requests=_prompts(1000, 30000))
# Estimate against actual graph memory: both runners, every way to capture, with and without a draft.
_ESTIMATES = tuple(
    replace(
        _GRAPHS, name=f"graphs-v{runner}-{graphs}{'-mtp' if draft else ''}", runner=runner, graphs=graphs,
        speculative_tokens=draft, model="deepseek-v32-tiny-mtp" if draft else _GRAPHS.model,
    )
    for runner in (1, 2) for graphs in ("eager", "piecewise", "full") for draft in (0, 1)
)  # fmt: skip
_PCIE_ON = (("VLLM_NEAPTIDE_PCIE_COLLECTIVES", "1"), ("VLLM_NEAPTIDE_PCIE_ARCHITECTURES", "any"))
_PCIE_OFF = (("VLLM_NEAPTIDE_PCIE_COLLECTIVES", "0"),)
_TWO_RANKS = replace(_GRAPHS, ranks=2, requests=(Request(1000, 64, count=4), Request(30000)))
_TWO_CONTEXT_RANKS = replace(
    _TWO_RANKS, context_ranks=2, model="deepseek-v32-tiny-32-heads", kv_cache_dtype="fp8_ds_mla"
)
_DECLARED = (
    LADDER,
    replace(_FLASHMLA, name="prefill-ladder-flashmla", requests=_LONG),
    replace(_FLASHMLA, name="decode-long", requests=_DECODE),
    _DECODE_WIDE,
    replace(_FLASHMLA, name="mixed", requests=_MIXED),
    replace(_FLASHMLA, name="near-limit", requests=_NEAR_LIMIT),
    replace(_FLASHMLA, name="speculative", model="deepseek-v32-tiny-mtp", speculative_tokens=1, requests=_SHORT),
    replace(_FLASHMLA, name="glm-dsa", model="glm-dsa-tiny", requests=_SHORT),
    replace(_FLASHMLA, name="eager", graphs="eager", requests=_SHORT),
    replace(_FLASHMLA, name="piecewise", graphs="piecewise", requests=_SHORT),
    replace(_FLASHMLA, name="runner-v1", runner=1, requests=_SHORT),
    replace(_FLASHMLA, name="expandable-segments", expandable_segments=True, requests=_SHORT),
    replace(_FLASHMLA, name="kv-cache-bytes", kv_cache_bytes=8 << 30, requests=_SHORT),
    *_ESTIMATES,
    replace(_GRAPHS, name="graphs-64-sizes", capture_sizes=64),
    replace(_GRAPHS, name="graphs-64-sizes-v1", capture_sizes=64, runner=1),
    # Its split accumulators are a large transient of the first capture.
    replace(_GRAPHS, name="graphs-transient", attention_backend="FLASH_ATTN_MLA_SPARSE"),
    replace(_GRAPHS, name="graphs-transient-v1", attention_backend="FLASH_ATTN_MLA_SPARSE", runner=1),
    replace(_FLASHMLA, name="sleep", sleep_after=1, requests=_SHORT),
    replace(_TWO_RANKS, name="two-ranks-pcie", switches=_PCIE_ON),
    replace(_TWO_RANKS, name="two-ranks-nccl", switches=_PCIE_OFF),
    replace(_TWO_CONTEXT_RANKS, name="two-context-ranks-pcie", switches=_PCIE_ON),
    replace(_TWO_CONTEXT_RANKS, name="two-context-ranks-nccl", switches=_PCIE_OFF),
)
SCENARIOS: dict[str, Scenario] = {s.name: s for s in _DECLARED}
