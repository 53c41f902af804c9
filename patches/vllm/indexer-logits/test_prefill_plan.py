"""The plan of prefill launches: which rows each scores, and how many there are.

Runs the planner and the real metadata builder's methods of the vLLM on the path, on a CPU.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

MIB = 1 << 20
Chunk = tuple[slice, slice]


def sizes() -> Any:
    return importlib.import_module("vllm.model_executor.layers.sparse_indexer_logits")


def prefill() -> Any:
    return importlib.import_module("vllm.model_executor.layers.sparse_indexer_prefill")


def indexer() -> Any:
    return importlib.import_module("vllm.v1.attention.backends.mla.indexer")


def launch_of(
    rows: int, columns: int, budget: int = 512 * MIB, *, policy: str = "constant_bytes", sm100: bool = False
) -> Any:
    return sizes().prefill_launch(
        policy, budget, rows, columns, 32, sizes().logits_layout(sm100=sm100, fp32_copy=True)
    )  # fmt: skip


def allocated(launch: Any, rows: int, width: int) -> int:
    """Elements that DeepGEMM allocates for a launch of 32 heads."""
    step = 1024 // launch.layout.element_bytes
    return -(-rows // 4) * 4 * (-(-width // step) * step)


def check(chunks: list[Chunk], rows: Sequence[int], keys: Sequence[int], workspace: int, launch: Any) -> None:
    """Every row once and in order; the bounds; no request is left out of a launch that had room for it."""
    first = [sum(rows[:n]) for n in range(len(rows) + 1)]
    scored = [first[requests.start] + row for requests, where in chunks for row in range(where.start, where.stop)]
    assert scored == list(range(sum(rows)))
    for requests, where in chunks:
        packed, widest = sum(rows[requests]), max(keys[requests])
        alone = requests.stop - requests.start == 1
        assert alone or sum(keys[requests]) <= workspace
        assert alone or where == slice(0, packed)
        assert launch.fits(where.stop - where.start, widest)
        if widest:
            assert allocated(launch, where.stop - where.start, launch.width(where.stop - where.start, widest)) <= (
                launch.elements
            )
        if where.stop == packed and where.start == 0 and requests.stop < len(rows):
            more = slice(requests.start, requests.stop + 1)
            assert sum(keys[more]) > workspace or not launch.fits(sum(rows[more]), max(keys[more]))


@pytest.mark.parametrize("policy", ["constant_bytes", "fixed_width"])
@pytest.mark.parametrize("sm100", [False, True], ids=["sm90", "sm100"])
def test_random_requests(policy: str, sm100: bool) -> None:
    rng = random.Random(3)
    split = packed = 0
    for _ in range(300):
        columns, batched = rng.randint(1, 20_000), rng.randint(1, 600)
        # A budget of whole full chunks, and one row step at full width besides.
        budget = rng.choice([1, 2, 8]) * batched * 2048 * 4 + 4 * 20_480 * 4
        launch = launch_of(batched, columns, budget, policy=policy, sm100=sm100)
        if not launch.fits(4, columns):
            continue
        count = rng.randint(1, 12)
        rows = [rng.randint(1, max(1, batched // rng.randint(1, count))) for _ in range(count)]
        keys = [rng.choice([0, rng.randint(1, columns), rng.randint(1, 300)]) for _ in rows]
        keys = [min(n, columns) for n in keys]
        if policy == "fixed_width":
            keys = [max(n, 1) for n in keys]
        workspace = rng.choice([columns, 2 * columns, 40 * columns])
        chunks = prefill().plan_chunks(rows, keys, keys, workspace, launch)
        check(chunks, rows, keys, workspace, launch)
        split += any(where.start for _, where in chunks)
        packed += any(requests.stop - requests.start > 1 for requests, _ in chunks)
    assert split > 20
    assert packed > 100


LADDERS = [(8192, 98_304), (4608, 184_320), (3072, 196_608), (3072, 522_240), (4608, 225_792, 4)]


@pytest.mark.parametrize("ladder", LADDERS, ids=lambda ladder: "-".join(map(str, ladder)))
@pytest.mark.parametrize("sm100", [False, True], ids=["sm90", "sm100"])
def test_a_long_prefill_takes_no_more_launches_than_upstream(ladder: tuple[int, ...], sm100: bool) -> None:
    """A single request grows by full chunks; at most 1 % more launches over all of them.

    One more on SM100: upstream scores 4,608 rows of 28,800 pools in one launch, which allocates 29,184 columns and so
    262,144 elements more than the budget has.
    """
    chunk, total, compress = (*ladder, 1)[:3]
    launch = launch_of(chunk, total // compress, sm100=sm100)
    workspace, splitter = 40 * total, indexer().DeepseekV32IndexerMetadataBuilder._split_indexer_prefill_chunks
    planned = upstream = 0
    for context in range(chunk, total + 1, chunk):
        keys = context // compress
        chunks = prefill().plan_chunks([chunk], [keys], [keys], workspace, launch)
        check(chunks, [chunk], [keys], workspace, launch)
        planned += len(chunks)
        upstream += len(splitter(torch.tensor([keys]), torch.tensor([chunk]), workspace, 512 * MIB))
    assert upstream > 10
    assert planned <= upstream * 1.01 + (sm100 and compress > 1)


def test_packed_requests_are_planned_by_the_widest() -> None:
    """8,000 rows of 4,000 keys are 131 MB; by the sum of their keys they would be 1 GB."""
    rows, keys = [1000] * 8, [4000] * 8
    chunks = prefill().plan_chunks(rows, keys, keys, 10**6, launch_of(8192, 131_072))
    assert chunks == [(slice(0, 8), slice(0, 8000))]


def test_the_workspace_bounds_a_pack() -> None:
    rows, keys = [10] * 5, [4000] * 5
    chunks = prefill().plan_chunks(rows, keys, keys, 9000, launch_of(8192, 131_072))
    assert [requests for requests, _ in chunks] == [slice(0, 2), slice(2, 4), slice(4, 5)]


def test_a_request_larger_than_the_workspace_stands_alone() -> None:
    chunks = prefill().plan_chunks([10, 10], [9001, 10], [9001, 10], 9000, launch_of(8192, 131_072))
    assert chunks == [(slice(0, 1), slice(0, 10)), (slice(1, 2), slice(0, 10))]


@pytest.mark.parametrize(("rows", "keys"), [([5, 3], [0, 0]), ([5, 3], [0, 40]), ([5, 3], [40, 0])])
def test_requests_without_keys(rows: list[int], keys: list[int]) -> None:
    chunks = prefill().plan_chunks(rows, keys, keys, 1000, launch_of(8192, 131_072))
    assert chunks == [(slice(0, 2), slice(0, 8))]


def test_nothing_to_plan() -> None:
    assert prefill().plan_chunks([], [], [], 1000, launch_of(8192, 131_072)) == []


def test_fixed_width_launches_have_one_width() -> None:
    launch = launch_of(8192, 131_072, policy="fixed_width")
    seen = set()
    for keys in [8192, 50_000, 131_072]:
        for requests, where in prefill().plan_chunks([8192], [keys], [keys], 10**7, launch):
            assert requests == slice(0, 1)
            seen.add((launch.width(where.stop - where.start, keys), where.stop - where.start))
    assert seen == {(131_072, 1024)}


# The builder.


def builder(monkeypatch: pytest.MonkeyPatch, base: type | None = None, *, cuda: bool = True, **changes: Any) -> Any:
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
    monkeypatch.setattr(module, "current_platform", SimpleNamespace(is_cuda=lambda: cuda))
    monkeypatch.setattr(module, "mqa_logits_use_mx_scales", lambda: False)
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
    found: list[Chunk] = prefill().plan_builder_chunks(
        made, torch.tensor(keys), torch.tensor(rows), 10**7, 512 * MIB, offset
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


def test_a_subclass_that_only_widens_lengths_is_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    policy(monkeypatch, "constant_bytes")
    base = indexer().DeepseekV32IndexerMetadataBuilder
    assert builder(monkeypatch, type("Wide", (base,), {})).prefill_launch is not None
