"""One engine in this process: start it, give it a scenario's requests, write what its memory did.

Run as a script with a vLLM on the path: ``child.py SPEC RESULT``. Imports nothing of neaptide, so that the
variant under test decides what is imported. Every figure is read from the engine or the allocator.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import os
import random
import re
import sys
import time
import traceback
from importlib import metadata
from typing import Any

ACTUAL_GRAPH_BYTES: list[int] = []
SCHEDULED_TOKENS: list[int] = []
LARGEST = 12
FRAMES = 8


def environment(spec: dict[str, Any]) -> None:
    """Settings that must stand before vLLM or torch is imported."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(spec["runner"] - 1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ.update(dict(spec["switches"]))
    if spec["ranks"] > 1:
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # functions of this file go to the workers
    segments = "True" if spec["expandable_segments"] else "False"
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = f"expandable_segments:{segments}"


def versions() -> dict[str, str]:
    """Versions of what the engine loads; ``absent`` where a package is not installed."""
    names = ("vllm", "torch", "triton", "nvidia-cutlass-dsl", "flashinfer-python", "transformers", "b12x")
    out = {}
    for name in names:
        try:
            out[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            out[name] = "absent"
    deep_gemm = sys.modules.get("vllm.third_party.deep_gemm") or sys.modules.get("deep_gemm")
    out["deep_gemm"] = str(getattr(deep_gemm, "__version__", "loaded" if deep_gemm else "absent"))
    return out


def engine_arguments(spec: dict[str, Any]) -> dict[str, Any]:
    """Arguments of ``vllm.LLM`` for a scenario."""
    arguments: dict[str, Any] = {
        "model": spec["model_path"],
        "skip_tokenizer_init": True,
        "max_model_len": spec["max_model_len"],
        "max_num_batched_tokens": spec["batched_tokens"],
        "max_num_seqs": spec["max_num_seqs"],
        "gpu_memory_utilization": spec["utilisation"],
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "kv_cache_dtype": spec["kv_cache_dtype"],
        "seed": 0,
        **({"load_format": "dummy"} if spec["dummy_weights"] else {}),
    }
    if spec["ranks"] > 1:
        arguments |= {"tensor_parallel_size": spec["ranks"], "distributed_executor_backend": "mp"}
        arguments["decode_context_parallel_size"] = spec["context_ranks"]
    if spec["graphs"] == "eager":
        arguments["enforce_eager"] = True
    compilation: dict[str, Any] = {"cudagraph_mode": "PIECEWISE"} if spec["graphs"] == "piecewise" else {}
    if spec["capture_sizes"]:
        compilation["cudagraph_capture_sizes"] = [1, 2, *range(4, 4 * spec["capture_sizes"] - 4, 4)]
    if compilation:
        arguments["compilation_config"] = compilation
    if spec["attention_backend"]:
        arguments["attention_backend"] = spec["attention_backend"]
    if spec["kv_cache_bytes"]:
        arguments["kv_cache_memory_bytes"] = spec["kv_cache_bytes"]
    if spec["speculative_tokens"]:
        arguments["speculative_config"] = {
            "method": "mtp", "num_speculative_tokens": spec["speculative_tokens"],
        }  # fmt: skip
    if spec["sleep_after"] is not None:
        arguments["enable_sleep_mode"] = True
    return arguments


def observe_capture() -> None:
    """Keep what ``capture_model`` of either runner returns: the bytes that its graphs took."""
    from vllm.v1.worker import gpu_model_runner as first
    from vllm.v1.worker.gpu import model_runner as second

    for module in (first, second):
        runner = module.GPUModelRunner
        original = runner.capture_model

        def capture_model(self: Any, *args: Any, _original: Any = original, **kwargs: Any) -> Any:
            taken = _original(self, *args, **kwargs)
            if isinstance(taken, int):
                ACTUAL_GRAPH_BYTES.append(taken)
            return taken

        runner.capture_model = capture_model


def observe_schedule(llm: Any) -> None:
    """Keep how many tokens each step is given."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    original = scheduler.schedule

    def schedule(*args: Any, **kwargs: Any) -> Any:
        given = original(*args, **kwargs)
        SCHEDULED_TOKENS.append(given.total_num_scheduled_tokens)
        return given

    scheduler.schedule = schedule


def memory() -> dict[str, int]:
    """The allocator and the device, now."""
    import torch

    stats = torch.cuda.memory_stats()
    return {
        "allocated_bytes": stats["allocated_bytes.all.current"],
        "cuda_mallocs": stats.get("num_device_alloc", 0),
        "free_bytes": torch.cuda.mem_get_info()[0],
        "peak_allocated_bytes": stats["allocated_bytes.all.peak"],
        "reserved_bytes": stats["reserved_bytes.all.current"],
        "segments": stats["segment.all.current"],
    }


def graph_profile(worker: Any) -> dict[str, Any] | None:
    """What the patched worker read around its throwaway captures, and the terms that follow; None upstream."""
    profile = getattr(worker, "graph_profile", None)
    if profile is None:
        return None
    terms = ("graph_bytes", "builder_bytes", "residue_bytes", "transient_bytes", "rolled_back_bytes")
    return {**dataclasses.asdict(profile), **{name: getattr(profile, name) for name in terms}}


def rank_memory(worker: Any) -> dict[str, int]:
    """:func:`memory` of a worker's process."""
    return memory()


def rank_terms(worker: Any) -> dict[str, Any]:
    """What a worker decided at start-up, and what it holds for PCIe collectives."""
    from vllm.distributed import get_tp_group
    from vllm.v1.attention.ops.dcp import MLADCPManager

    exchanges = {id(held): held for one in gc.get_objects() if isinstance(one, MLADCPManager)
                 if (held := getattr(one, "pcie", None)) is not None}.values()  # fmt: skip
    pcie = getattr(get_tp_group().device_communicator, "pcie_ar_comm", None)
    return {
        "available_kv_cache_memory_bytes": getattr(worker, "available_kv_cache_memory_bytes", None),
        "graph_bytes_estimated": getattr(worker, "cudagraph_memory_estimate", None),
        "pcie_all_reduce": None if pcie is None else str(pcie.limits),
        "pcie_calls": None if pcie is None else dict(pcie.calls),
        "pcie_held_bytes": None if pcie is None else pcie.held_bytes(),
        "pcie_exchanges": [{"rows": e.rows, "calls": e.calls, "held_bytes": e.held_bytes()} for e in exchanges],
    }


class Engine:
    """An engine's memory, in this process or in those of its workers."""

    def __init__(self, llm: Any, ranks: int) -> None:
        self.llm, self.alone = llm, ranks == 1

    def memory(self) -> dict[str, int]:
        """Of the one rank, or of rank 0."""
        return memory() if self.alone else dict(self.llm.collective_rpc(rank_memory)[0])

    def boot(self) -> dict[str, Any]:
        if self.alone:
            return boot_terms(self.llm)
        cache = self.llm.llm_engine.vllm_config.cache_config
        blocks = cache.num_gpu_blocks or 0
        ranks = self.llm.collective_rpc(rank_terms)
        return {"kv_blocks": blocks, "kv_tokens": blocks * cache.block_size, "ranks": ranks}

    def settle(self) -> None:
        """Wait for the device; a step of several ranks ends with its output."""
        if self.alone:
            import torch

            torch.cuda.synchronize()


def boot_terms(llm: Any) -> dict[str, Any]:
    """What the engine decided at start-up."""
    core = llm.llm_engine.engine_core.engine_core
    worker = core.model_executor.driver_worker.worker
    config = llm.llm_engine.vllm_config
    names = (
        "requested_memory", "total_consumed", "peak_activation_memory", "available_kv_cache_memory_bytes",
    )  # fmt: skip
    terms = {name: getattr(worker, name, None) for name in names}
    terms["weights_bytes"] = getattr(worker.model_runner, "model_memory_usage", None)
    blocks = getattr(config.cache_config, "num_gpu_blocks", 0) or 0
    from vllm.v1.worker import workspace

    report = getattr(workspace, "workspace_report", lambda: None)()
    return {
        "workspace": None if report is None else report.as_dict(),
        "graph_profile": graph_profile(worker),
        "graph_bytes_actual": ACTUAL_GRAPH_BYTES[-1] if ACTUAL_GRAPH_BYTES else None,
        "graph_bytes_estimated": getattr(worker, "cudagraph_memory_estimate", None),
        "kv_blocks": blocks,
        "kv_tokens": blocks * config.cache_config.block_size,
        "profile": terms,
        "runner": type(worker.model_runner).__module__,
    }


def prompt(tokens: int, seed: int, vocabulary: int) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(3, vocabulary) for _ in range(tokens)]


def serve(held: Engine, request: dict[str, Any], index: int, vocabulary: int, steps: list[dict[str, Any]]) -> list[str]:
    """Give one request of the scenario and step until it is done; returns a digest of each output."""
    from vllm import SamplingParams

    engine = held.llm.llm_engine
    sampling = SamplingParams(
        temperature=0.0, max_tokens=request["output_tokens"], min_tokens=request["output_tokens"], detokenize=False
    )
    for copy in range(request["count"]):
        ids = prompt(request["prompt_tokens"], 1000 * index + copy, vocabulary)
        engine.add_request(f"{index}-{copy}", {"prompt_token_ids": ids}, sampling)
    outputs: dict[str, list[int]] = {}
    SCHEDULED_TOKENS.clear()
    while engine.has_unfinished_requests():
        held.settle()
        begun = time.perf_counter()
        before = len(SCHEDULED_TOKENS)
        done = engine.step()
        held.settle()
        taken = time.perf_counter() - begun
        for output in done:
            outputs[output.request_id] = list(output.outputs[0].token_ids)
        tokens = sum(SCHEDULED_TOKENS[before:])
        steps.append({"request": index, "seconds": taken, "scheduled_tokens": tokens, **held.memory()})
    return [hashlib.sha256(json.dumps(outputs[key]).encode()).hexdigest() for key in sorted(outputs)]


def largest_allocations() -> list[dict[str, Any]]:
    """The largest allocations that the history holds, with the Python frames that made them."""
    import torch

    snapshot = torch.cuda.memory._snapshot()
    traces = [e for device in snapshot["device_traces"] for e in device if e["action"] == "alloc"]
    best: dict[tuple[str, ...], dict[str, Any]] = {}
    for entry in traces:
        frames = [f"{short(f['filename'])}:{f['line']} {f['name']}" for f in entry.get("frames", [])]
        python = tuple(f for f in frames if ".py:" in f)[:FRAMES]
        seen = best.setdefault(python, {"bytes": 0, "count": 0, "frames": list(python)})
        seen["bytes"] = max(seen["bytes"], entry["size"])
        seen["count"] += 1
    return sorted(best.values(), key=lambda e: -e["bytes"])[:LARGEST]


def short(filename: str) -> str:
    """A path from its package on."""
    for marker in ("/site-packages/", "/dist-packages/"):
        filename = filename.rsplit(marker, 1)[-1]
    parts = filename.split("/")
    if "vllm" in parts:
        return "/".join(parts[parts.index("vllm") :])
    return parts[-1] if filename.startswith("/") else filename


def ran_out_of_memory(error: Exception) -> bool:
    """Whether memory is what the engine failed for, at start-up or later.

    An extension of the stable ABI turns the allocator's error into one that does not name it; the
    allocator counts it all the same.
    """
    import torch

    text = f"{type(error).__name__}: {error}"
    said = ("OutOfMemory", "out of memory", "No available memory for the cache blocks", "Free memory on device")
    counted = torch.cuda.is_available() and torch.cuda.memory_stats().get("num_ooms", 0) > 0
    return counted or any(sign in text for sign in said)


def frames_of(error: BaseException) -> list[str]:
    """Where an error was raised, innermost last: file from its package on, line, function; no source text."""
    return [f"{short(f.filename)}:{f.lineno} {f.name}" for f in traceback.extract_tb(error.__traceback__)]


def without_machine_paths(text: str) -> str:
    """A message with every absolute path in it shortened as :func:`short` does."""
    return re.sub(r"(?<![\w.])/[^\s:,;'\"()]+", lambda found: short(found[0]), text)


def run(spec: dict[str, Any]) -> dict[str, Any]:
    import torch

    observe_capture()
    from vllm import LLM

    begun = time.perf_counter()
    llm = LLM(**engine_arguments(spec))
    held = Engine(llm, spec["ranks"])
    result: dict[str, Any] = {"boot_seconds": time.perf_counter() - begun, "boot": {**held.boot(), **held.memory()}}
    observe_schedule(llm)
    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    if spec["history"]:
        torch.cuda.memory._record_memory_history(max_entries=400000, stacks="python")
    steps: list[dict[str, Any]] = []
    requests = []
    for index, request in enumerate(spec["requests"]):
        digests = serve(held, request, index, vocabulary, steps)
        requests.append({**request, "outputs": digests, "after": held.memory()})
        if spec["sleep_after"] == index + 1:
            llm.sleep(level=1)
            requests[-1]["asleep"] = memory()
            llm.wake_up()
            requests[-1]["awake"] = memory()
    named = largest_allocations() if spec["history"] else []
    result |= {"largest_allocations": named, "requests": requests, "steps": steps}
    return result


def main(spec_path: str, result_path: str) -> int:
    with open(spec_path) as handle:
        spec = json.load(handle)
    environment(spec)
    result: dict[str, Any] = {"outcome": "done"}
    try:
        result |= run(spec)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        result["outcome"] = "out-of-memory" if ran_out_of_memory(error) else "failed"
        result["error"] = without_machine_paths(text)[:2000]
        result["where"] = frames_of(error)
    gc.collect()
    result["versions"] = versions()
    import torch

    if torch.cuda.is_available():
        result["device"] = torch.cuda.get_device_name()
    with open(result_path, "w") as handle:
        json.dump(result, handle)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
