"""The reservation holds whatever is allocated: every prefill launch and every decode tile of random settings."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

MIB, HEADS = 1 << 20, 32


def sizes() -> Any:
    return importlib.import_module("vllm.model_executor.layers.sparse_indexer_logits")


def config(seqs: int, batched: int, speculative: int | None) -> Any:
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=seqs, max_num_batched_tokens=batched),
        speculative_config=None if speculative is None else SimpleNamespace(num_speculative_tokens=speculative),
    )


@dataclass(frozen=True)
class Setting:
    """A setting that is allowed, and the bytes that are reserved for it."""

    policy: str
    budget: int
    columns: int
    sm100: bool
    planned: bool
    vllm_config: Any
    found: int

    @property
    def layout(self) -> Any:
        return sizes().logits_layout(sm100=self.sm100, fp32_copy=True)

    @property
    def batched(self) -> int:
        return int(self.vllm_config.scheduler_config.max_num_batched_tokens)


def settings(count: int) -> Iterator[Setting]:
    rng, made = random.Random(4), 0
    while made < count:
        policy = "constant_bytes"
        budget, columns, sm100 = rng.choice([4, 7, 64, 512]) * MIB, int(2 ** rng.uniform(4, 20)), rng.random() < 0.5
        vllm_config = config(int(2 ** rng.uniform(0, 9)), int(2 ** rng.uniform(0, 14)), rng.choice([None, 1, 3, 5]))
        planned = rng.random() < 0.7
        try:
            found = sizes().reserved_logits_bytes(
                policy, budget, budget, columns, HEADS, vllm_config, sm100=sm100, planned=planned
            )
        except ValueError:
            continue
        made += 1
        yield Setting(policy, budget, columns, sm100, planned, vllm_config, found)


def plan(setting: Setting, rows: list[int], keys: list[int]) -> Iterator[tuple[int, int]]:
    """(rows, columns to ask for) of each launch, by the policy's plan or by upstream's."""
    planner = importlib.import_module("vllm.model_executor.layers.sparse_indexer_plan")
    indexer = importlib.import_module("vllm.v1.attention.backends.mla.indexer")
    launch = sizes().prefill_launch(
        setting.policy if setting.planned else "upstream", setting.budget, setting.batched, setting.columns, HEADS,
        setting.layout,
    )  # fmt: skip
    workspace = 40 * setting.columns
    if launch is None:
        splitter = indexer.DeepseekV32IndexerMetadataBuilder._split_indexer_prefill_chunks
        chunks = splitter(torch.tensor(keys), torch.tensor(rows), workspace, setting.budget)
    else:
        chunks = planner.plan_chunks(rows, keys, keys, workspace, launch)
    for requests, where in chunks:
        count, widest = where.stop - where.start, max(keys[requests])
        yield count, widest if launch is None else launch.width(count, widest)


def test_reservation_holds_every_prefill_launch() -> None:
    """Of requests that together are one batch."""
    rng, nearest = random.Random(5), dict.fromkeys((True, False), 0.0)
    for setting in settings(600):
        count, step = min(setting.batched, rng.choice([1, 1, 2, 4])), 512 if setting.sm100 else 256
        keys = [rng.choice([setting.columns, rng.randint(1, setting.columns), 1]) for _ in range(count)]
        for rows, columns in plan(setting, [setting.batched // count] * count, keys):
            taken = -(-rows // 4) * 4 * (-(-columns // step) * step) * (6 if setting.sm100 else 4)
            assert taken <= setting.found, setting
            nearest[setting.planned] = max(nearest[setting.planned], taken / setting.found)
    assert min(nearest.values()) > 0.9, nearest


def test_reservation_holds_every_decode_tile() -> None:
    """Native and padded steps (whole requests), flattened ones and the varlen form of SM100."""
    tiler, tiled = importlib.import_module("vllm.model_executor.layers.sparse_indexer_decode"), 0
    for setting in settings(600):
        speculative, scheduler = setting.vllm_config.speculative_config, setting.vllm_config.scheduler_config
        next_n = 1 if speculative is None else 1 + speculative.num_speculative_tokens
        seqs, layout = min(scheduler.max_num_seqs, setting.batched), setting.layout
        for units, rows in [(seqs * next_n, 1)] if setting.sm100 else [(seqs * next_n, 1), (seqs, next_n)]:
            arguments = setting.policy, setting.budget, units, rows, setting.columns, setting.sm100, layout
            tiles = tiler.decode_tiles(*arguments)
            tiled += len(tiles) > 1
            for start, stop in tiles:
                taken = sizes().decode_logits_bytes((stop - start) * rows, setting.columns, layout)
                assert taken <= setting.found, setting
    assert tiled > 20


def test_a_planned_reservation_is_within_the_budget() -> None:
    """On SM100, too, with the FP32 copy; upstream's plan exceeds it."""
    exceeded = 0
    for setting in settings(600):
        assert setting.found <= setting.budget or not setting.planned, setting
        exceeded += setting.found > setting.budget
    assert exceeded > 100
