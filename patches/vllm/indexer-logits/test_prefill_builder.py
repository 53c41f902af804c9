"""The launch size of the real metadata builder of the vLLM on the path, and which platforms and builders have one."""

from __future__ import annotations

import importlib
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

MIB = 1 << 20
Chunk = tuple[slice, slice]

LAUNCH = "vllm.model_executor.layers.sparse_indexer_launch"


def prefill() -> Any:
    return importlib.import_module("vllm.model_executor.layers.sparse_indexer_prefill")


def indexer() -> Any:
    return importlib.import_module("vllm.v1.attention.backends.mla.indexer")


def builder(
    monkeypatch: pytest.MonkeyPatch, base: type | None = None, *, cuda: bool = True, sm100: bool = False, **changes: Any
) -> Any:
    """A builder with the attributes that the plan reads, without a device, and its launch."""
    module = prefill()
    made = object.__new__(base or indexer().DeepseekV32IndexerMetadataBuilder)
    made.vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(
            max_model_len=changes.pop("max_model_len", 131_072), hf_text_config=SimpleNamespace(index_n_heads=32)
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8192),
    )
    settings = {"dcp_world_size": 1, "use_pcp": False, "compress_ratio": 1, "compressed_cp_interleave_size": 16}
    for name, value in (settings | changes).items():
        setattr(made, name, value)
    monkeypatch.setattr(importlib.import_module("vllm.platforms").current_platform, "is_cuda", lambda: cuda)
    monkeypatch.setattr(module, "mqa_logits_use_mx_scales", lambda: sm100)
    made.prefill_launch = module.builder_launch(made)
    return made


def policy(monkeypatch: pytest.MonkeyPatch, name: str, budget_mb: int = 512) -> None:
    envs = importlib.import_module("vllm.envs")
    for variable, value in {
        "VLLM_NEAPTIDE_INDEXER_LOGITS_POLICY": name, "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB": str(budget_mb)
    }.items():  # fmt: skip
        monkeypatch.delitem(vars(envs), variable, raising=False)
        monkeypatch.setenv(variable, value)


def plan(made: Any, keys: list[int], rows: list[int], offset: int = 0) -> list[Chunk]:
    found: list[Chunk] = importlib.import_module(LAUNCH).plan_builder_chunks(
        made, made._split_indexer_prefill_chunks, torch.tensor(keys), torch.tensor(rows), 10**7, 512 * MIB, offset
    )
    return found


@pytest.mark.parametrize(
    ("world_size", "use_pcp", "rows"), [(1, False, 1024), (2, False, 2048), (4, False, 4096), (1, True, 1024)]
)
def test_a_builder_plans_by_local_columns(
    world_size: int, use_pcp: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """128 Mi elements are 1,024 rows of 131,072 columns, and as many more as there are ranks to share them."""
    policy(monkeypatch, "constant_bytes")
    made = builder(monkeypatch, dcp_world_size=world_size, use_pcp=use_pcp)
    assert made.prefill_launch.elements == 1 << 27
    assert plan(made, [131_072], [8192]) == [(slice(0, 1), slice(at, at + rows)) for at in range(0, 8192, rows)]


def test_a_builder_counts_the_copy_of_sm100(monkeypatch: pytest.MonkeyPatch) -> None:
    """512 MiB of 6 bytes are 21 steps of 8,192 rows x 512 columns: 672 rows of 131,072 columns."""
    policy(monkeypatch, "constant_bytes")
    made = builder(monkeypatch, sm100=True)
    assert made.prefill_launch.elements == 21 * 8192 * 512
    assert made.prefill_launch.live_bytes == 21 * 8192 * 512 * 6 <= 512 * MIB
    starts = range(0, 8192, 672)
    assert plan(made, [131_072], [8192]) == [(slice(0, 1), slice(at, min(at + 672, 8192))) for at in starts]


@pytest.mark.parametrize(("max_model_len", "columns"), [(8192, 2048), (8195, 2048), (8196, 2304), (1023, 256)])
def test_a_builder_has_the_whole_pools_of_the_longest_sequence(
    max_model_len: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens of an unfinished pool are no column; 2,049 pools take the next 256."""
    policy(monkeypatch, "constant_bytes")
    made = builder(monkeypatch, max_model_len=max_model_len, compress_ratio=4)
    assert made.prefill_launch.elements == 8192 * columns


def test_a_builder_plans_by_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    policy(monkeypatch, "constant_bytes", 16)
    made = builder(monkeypatch, max_model_len=8192, compress_ratio=4)
    assert made.prefill_launch.elements == 1 << 22
    assert plan(made, [2048], [8192]) == [(slice(0, 1), slice(at, at + 2048)) for at in range(0, 8192, 2048)]


def test_requests_are_numbered_within_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    policy(monkeypatch, "constant_bytes")
    assert plan(builder(monkeypatch), [100, 100], [10, 20], 7) == [(slice(7, 9), slice(0, 30))]


@pytest.mark.parametrize("budget_mb", [0, -1])
def test_a_builder_refuses_a_budget(budget_mb: int, monkeypatch: pytest.MonkeyPatch) -> None:
    policy(monkeypatch, "constant_bytes", budget_mb)
    with pytest.raises(ValueError, match="VLLM_SPARSE_INDEXER_MAX_LOGITS_MB is"):
        builder(monkeypatch)


def test_upstream_policy_keeps_the_builders_own_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    policy(monkeypatch, "upstream")
    made = builder(monkeypatch)
    assert made.prefill_launch is None
    # 8 requests of 4,000 keys: by the sum of their keys, five and three.
    assert plan(made, [4000] * 8, [1000] * 8, 2) == [(slice(2, 7), slice(0, 5000)), (slice(7, 10), slice(0, 3000))]


def test_fixed_width_leaves_decode_context_parallelism_at_upstreams_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vllm-project/vllm#58068 does; the width of a chunk is the global one there, too."""
    policy(monkeypatch, "fixed_width")
    assert builder(monkeypatch, dcp_world_size=2).prefill_launch is None
    assert builder(monkeypatch).prefill_launch is not None
    assert prefill().chunk_columns(4000, 2, 1) == 4000
    policy(monkeypatch, "constant_bytes")
    monkeypatch.setattr(importlib.import_module("vllm.platforms").current_platform, "is_cuda", lambda: True)
    assert prefill().chunk_columns(4000, 2, 1) == 2000
    assert prefill().chunk_columns(4000, 1, 1) == 4000


@pytest.mark.parametrize("name", ["constant_bytes", "fixed_width", "upstream"])
def test_the_policy_of_other_platforms_is_upstreams(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy(monkeypatch, name)
    for cuda, wanted in ((True, name), (False, "upstream")):
        launch = importlib.import_module(LAUNCH)
        monkeypatch.setattr(launch.current_platform, "is_cuda", lambda cuda=cuda: cuda)
        assert launch.covered_policy() == wanted


@pytest.mark.parametrize("kept", ["splitter", "platform", "pcp"])
def test_builders_that_are_not_covered_keep_their_plan(kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A subclass with its own splitter, a platform that is not CUDA, and PCP with DCP; each is logged once."""
    policy(monkeypatch, "constant_bytes")
    own = [(slice(0, 1), slice(0, 3))]
    base = indexer().DeepseekV32IndexerMetadataBuilder
    subclass = type("Own", (base,), {"_split_indexer_prefill_chunks": lambda self, *args, **kwargs: own})
    logged: list[str] = []
    monkeypatch.setattr(prefill(), "logger", SimpleNamespace(warning_once=lambda text, *args: logged.append(text)))
    changes = {"use_pcp": True, "dcp_world_size": 2} if kept == "pcp" else {}
    made = builder(monkeypatch, subclass if kept == "splitter" else base, cuda=kept != "platform", **changes)
    assert made.prefill_launch is None
    assert len(logged) == 1
    if kept == "splitter":
        assert plan(made, [100], [3]) == own


def test_a_subclass_that_widens_lengths_keeps_upstreams_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sparse logits of DeepSeek V4.1 are wider than the context; another name alone changes nothing."""
    policy(monkeypatch, "constant_bytes")
    base = indexer().DeepseekV32IndexerMetadataBuilder
    monkeypatch.setattr(prefill(), "logger", SimpleNamespace(warning_once=lambda text, *args: None))
    wide = type("Wide", (base,), {"_prefill_split_seq_lens": lambda self, lens: lens.clamp(min=4096)})
    assert builder(monkeypatch, wide).prefill_launch is None
    assert builder(monkeypatch, type("Renamed", (base,), {})).prefill_launch is not None


def test_blocks_of_the_canonical_size_are_taken_together_and_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """On SM100 the BF16 logits and their FP32 copy; nothing under ``fixed_width`` or off CUDA."""
    launch_module = importlib.import_module(LAUNCH)
    alive: list[weakref.ref[Any]] = []
    seen: list[list[int]] = []

    class Block:
        def __init__(self, size: int) -> None:
            self.size = size

    def empty(size: int, **options: Any) -> Block:
        block = Block(size)
        alive.append(weakref.ref(block))
        seen.append([held.size for held in (r() for r in alive) if held is not None])
        return block

    monkeypatch.setattr(launch_module, "torch", SimpleNamespace(empty=empty, uint8=None, device=None))
    policy(monkeypatch, "constant_bytes")
    made = builder(monkeypatch, sm100=True).prefill_launch
    launch_module.keep_blocks_cached(made, SimpleNamespace(type="cuda"))
    assert seen[-1] == list(made.allocations)
    assert len(made.allocations) == 2
    assert [r() for r in alive] == [None, None]
    launch_module.keep_blocks_cached(made, SimpleNamespace(type="cpu"))
    policy(monkeypatch, "fixed_width")
    launch_module.keep_blocks_cached(builder(monkeypatch).prefill_launch, SimpleNamespace(type="cuda"))
    assert len(seen) == 2
