"""``python vllm_child.py SPEC RESULT``: what the vLLM on the path allocates and reserves for a profile.

Its own functions compute every size, without a device; the profile branch of the indexer's op runs as it is, with
recorders in place of the workspace manager and of ``torch.empty``. How DeepGEMM and FlashAttention 3 round and split is
in no Python of vLLM: for both trees the overlay's pure modules say it. torch is enough; imports nothing of neaptide.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from vllm_modules import LAYERS, MLA, PURE, REAL, WORKER  # type: ignore[import-not-found]
from vllm_standins import stand_in  # type: ignore[import-not-found]
from vllm_tree import Tree  # type: ignore[import-not-found]

# This folder's modules are no modules of anybody else.
sys.path.remove(str(Path(__file__).parent))

import torch

# Nothing is compiled here: its compiler takes two seconds to load.
torch.compile = lambda *given, **options: lambda function: function


@contextmanager
def recorded(op: Any, tree: Tree) -> Iterator[tuple[list[Any], list[int]]]:
    """What an op asks of the workspace, and the bytes of each ``torch.empty`` it makes beside it."""
    asked: list[Any] = []
    made: list[int] = []
    real = torch.empty

    def empty(*size: Any, dtype: Any = None, **rest: Any) -> torch.Tensor:
        found = real(*size, dtype=dtype, device="meta")
        made.append(found.numel() * found.element_size())
        return found

    stand_ins: dict[str, Any] = {
        "current_workspace_manager": lambda: SimpleNamespace(get_simultaneous=lambda *specs: asked.extend(specs)),
        "current_platform": SimpleNamespace(fp8_dtype=lambda: torch.float8_e4m3fn, is_cuda=lambda: True),
        "get_current_vllm_config_or_none": lambda: tree.config,
        "mqa_logits_use_mx_scales": lambda: tree.sm100,
        "covered_policy": lambda: importlib.import_module("vllm.neaptide_switches").indexer_logits_policy(),
        # From 65,536 rows of a step on, and without DCP.
        "_reserve_row_shard_exchange_transient": lambda *given: None,
    }
    prefill_keys = importlib.import_module(f"{LAYERS}.sparse_indexer_prefill_keys")
    with (
        patch.multiple(op, create=True, **stand_ins),
        patch.object(prefill_keys, "covered_policy", stand_ins["covered_policy"]),
        patch.object(torch, "empty", empty),
    ):
        yield asked, made


def profile_run(tree: Tree) -> dict[str, Any]:
    """What the op reserves in the profile run: its workspace, slot by slot, and room for logits."""
    p = tree.profile
    function = getattr(tree.op, "sparse_attn_indexer_kpool" if p.model == "glm5next" else "sparse_attn_indexer")
    given = {
        "hidden_states": torch.empty(1, device="meta"), "weights": torch.empty(1, p.index_heads, device="meta"),
        "topk_indices_buffer": torch.empty(1, p.index_topk, device="meta"), "topk_tokens": p.index_topk,
        "head_dim": p.index_head_dim, "max_model_len": tree.columns, "max_pool_len": tree.columns,
        "total_seq_lens": tree.workspace_rows, "use_pcp": False, "dcp_world_size": p.decode_context_parallel,
        "cp_kv_cache_interleave_size": p.dcp_interleave, "index_kpool": p.index_compress_ratio,
        "topk_backend": p.topk_backend, "use_fp4_cache": False,
    }  # fmt: skip
    parameters = inspect.signature(function).parameters
    missing = {name: None for name, one in parameters.items() if one.default is inspect.Parameter.empty}
    with recorded(tree.op, tree) as (asked, made):
        function(**(missing | {name: value for name, value in given.items() if name in parameters}))
    radix = ((tree.op.RADIX_TOPK_WORKSPACE_SIZE,), torch.uint8)
    lanes, whole = lanes_of(tree)
    return {
        "workspace_bytes": slot_bytes(*asked),
        "draft_lane_bytes": 0 if lanes == 1 else slot_bytes(*asked) if whole else slot_bytes(radix),
        "lanes": lanes,
        "reserved_bytes": made[0],
    }


def slot_bytes(*specs: Any) -> int:
    """Bytes of a slot of the tree's own workspace manager after one request."""
    workspace = importlib.import_module(f"{WORKER}.workspace")
    ubatch = patch.object(workspace, "dbo_current_ubatch_id", lambda: 0)
    with ubatch, patch.object(torch.accelerator, "empty_cache", lambda: None):
        manager = workspace.WorkspaceManager(torch.device("meta"))
        manager.get_simultaneous(*specs)
        return int(manager._current_workspaces[0].numel())


def lanes_of(tree: Tree) -> tuple[int, bool]:
    """Lanes of a ubatch, and whether the draft's eager scratch comes from its own."""
    worker, v2 = importlib.import_module(f"{WORKER}.gpu_worker"), tree.profile.runner == "v2"
    if not hasattr(worker, "_num_workspace_lanes"):
        return 1, False
    lanes = worker._num_workspace_lanes(tree.config, v2)
    if not tree.has(f"{WORKER}.workspace_lanes"):
        return lanes, True
    return lanes, not importlib.import_module(f"{WORKER}.workspace_lanes").lane_plan(tree.config, v2).eager_in_lane_0


def prefill(tree: Tree) -> dict[str, Any]:
    """The launches of one prompt that fills the context: logits and FP32 copy of each, chunk by chunk."""
    p, layout = tree.profile, tree.prefill_layout()
    local = tree.sizes.local_columns(tree.columns, p.decode_context_parallel, tree.interleave)
    launch = None
    if tree.patched:
        switches = importlib.import_module("vllm.neaptide_switches")
        launch = tree.sizes.prefill_launch(
            switches.indexer_logits_policy(), tree.budget, p.max_num_batched_tokens, local, p.index_heads, layout
        )
    step = tree.sizes.prefill_row_step(p.index_heads)
    chunks = []
    for begin in range(0, p.max_model_len, p.prefill_chunk_tokens):
        rows = min(p.prefill_chunk_tokens, p.max_model_len - begin)
        keys = max(1, (begin + rows) // p.index_compress_ratio)
        found = []
        for taken, width in launches(tree, launch, rows, keys):
            elements = tree.sizes.round_up(taken, step) * layout.prefill_stride(width)
            found.append([elements * layout.element_bytes, elements * layout.copy_bytes])
        chunks.append(found)
    # One launch holds the one before it, unless the loop lets go of it.
    return {
        "chunks": chunks,
        "holds_previous": not tree.patched,
        # ``keep_blocks_cached`` takes and returns them before each launch.
        "blocks": [] if launch is None else list(launch.allocations),
        "columns": tree.columns,
    }


def launches(tree: Tree, launch: Any, rows: int, keys: int) -> Iterator[tuple[int, int]]:
    """Rows and width of each launch of a chunk, by the tree's own plan."""
    p = tree.profile
    local = tree.sizes.local_columns(keys, p.decode_context_parallel, tree.interleave)
    if launch is None:
        # A function of the module in r12's time, the builder's since.
        split = getattr(tree.indexer, "split_indexer_prefill_chunks", None)
        split = split or tree.indexer.DeepseekV32IndexerMetadataBuilder._split_indexer_prefill_chunks
        planned = split(torch.tensor([keys]), torch.tensor([rows]), tree.workspace_rows, tree.budget)
        width = keys if tree.takes_width else local
    else:
        plan = importlib.import_module(f"{LAYERS}.sparse_indexer_plan")
        planned = plan.plan_chunks([rows], [keys], [local], tree.workspace_rows, launch)
        width = local
    for _, taken in planned:
        count = taken.stop - taken.start
        yield count, width if launch is None else launch.width(count, width)


def decode(tree: Tree) -> dict[str, Any]:
    """The widest decode step: rows, and what is alive of their logits at once."""
    p, layout, sizes = tree.profile, tree.decode_layout(), tree.sizes
    rows = sizes.max_decode_rows(p.max_num_seqs, p.max_num_batched_tokens, p.speculative_tokens)
    at_once = rows
    if tree.patched and tree.takes_width:
        tiles = importlib.import_module(f"{LAYERS}.sparse_indexer_decode").decode_tiles
        policy = importlib.import_module("vllm.neaptide_switches").indexer_logits_policy()
        # Single rows are the units of the flattened form and of SM100's, and those with the largest tiles.
        found = tiles(policy, tree.budget, rows, 1, tree.columns, tree.sm100, layout)
        at_once = max(stop - start for start, stop in found)
    logits = at_once * layout.decode_stride(tree.columns) * layout.element_bytes
    alive = sizes.decode_logits_bytes(at_once, tree.columns, layout)
    return {"rows": rows, "rows_at_once": at_once, "logits_bytes": logits, "copy_bytes": alive - logits}


def splits(tree: Tree) -> dict[str, Any]:
    """Split accumulators of FLASH_ATTN_MLA_SPARSE at its worst number of rows, as the tree calls it."""
    p, module = tree.profile, importlib.import_module(f"{MLA}.fa3_splits")
    case = module.SplitCase(
        p.attention_heads // p.tensor_parallel, p.kv_lora_rank, p.index_topk, p.multiprocessors
    )  # fmt: skip
    budget = 0
    if tree.has(f"{MLA}.fa3_splits"):
        switches = importlib.import_module("vllm.neaptide_switches")
        budget = module.call_budget(case, switches.megabytes({}, switches.MLA_SPLITS_MB), capturing=False)
    return {"bytes": module.most_bytes(case, p.max_num_batched_tokens, budget), "profiled": bool(budget)}


def transients(tree: Tree) -> dict[str, Any]:
    """The fullest moment of sparse MLA over a whole batch, and whether the profile run allocates it."""
    p = tree.profile
    steps = importlib.import_module(f"{LAYERS}.attention.mla_transients")
    kernels = importlib.import_module(f"{LAYERS}.attention.mla_kernel_memory")
    call = steps.MqaCall(
        rows=p.max_num_batched_tokens, heads=p.attention_heads // p.tensor_parallel, latent=p.kv_lora_rank,
        rope=p.qk_rope_head_dim, element_bytes=p.element_bytes, query_bytes=p.query_bytes,
        world=p.decode_context_parallel, absorbed=p.model == "deepseek_v32",
        replicated=p.replicated_queries and p.model != "deepseek_v32",
    )  # fmt: skip
    # A whole batch has more rows than the direct workspaces, which are made for decode steps.
    gather = steps.NO_GATHER if call.replicated else steps.NCCL
    route = steps.Route(gather, steps.A2A if p.dcp_comm_backend == "a2a" else steps.AG_RS)
    backend = kernels.Backend(p.attention_backend, p.index_topk, p.kv_cache_dtype)
    moment = steps.largest(call, route, kernels.kernel_memory(call, backend))
    profiled = tree.has(f"{LAYERS}.attention.mla_transients")
    return {"bytes": moment.total, "moment": moment.name, "tensors": moment.tensors, "profiled": profiled}


def answer(tree: Tree) -> dict[str, Any]:
    return {
        "profile_run": profile_run(tree),
        "prefill": prefill(tree),
        "decode": decode(tree),
        "splits": splits(tree),
        "transients": transients(tree),
    }


def answer_to(folder: str, profile: dict[str, Any]) -> dict[str, Any]:
    """The answer to one profile. The switches change sizes: none is inherited, but what the profile says."""
    for name in [name for name in os.environ if name.startswith("VLLM_")]:
        del os.environ[name]
    if profile["logits_budget_mib"]:
        os.environ["VLLM_SPARSE_INDEXER_MAX_LOGITS_MB"] = str(profile["logits_budget_mib"])
    return answer(Tree(folder, profile))


def main(spec_path: str, result_path: str) -> int:
    with open(spec_path) as handle:
        spec = json.load(handle)
    folder = os.environ["PYTHONPATH"].split(os.pathsep)[0]
    stand_in("vllm", REAL + PURE, [folder, spec["overlay"]])
    found = [answer_to(folder, profile) for profile in spec["profiles"]]
    with open(result_path, "w") as handle:
        json.dump(found, handle)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
