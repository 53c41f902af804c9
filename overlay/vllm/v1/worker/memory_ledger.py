# SPDX-License-Identifier: Apache-2.0
"""Where every byte of a worker's device is at the end of start-up, as the driver and the allocator say.

With ``VLLM_NEAPTIDE_LEDGER_FILE`` a worker marks the phases of its start-up (:func:`mark`) and at their end writes
``FILE.rankN.json``: regions that, with the free memory and a residue, sum to the device's total. Memory outside of
torch's allocator (contexts, communicators, slabs of IPC memory, loaded kernels, graphs) is attributed to the phase in
which the driver's figure grew; the allocator's blocks to the tensors in them, found from the model and the runner.
Rank 0 writes ``FILE.config.json`` as well (``configuration_dump``). Without the variable both functions do nothing.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import vllm.envs as envs
from vllm.logger import init_logger
from vllm.v1.worker.configuration_dump import configuration

logger = init_logger(__name__)
Result = TypeVar("Result")

SCHEMA_VERSION = 1
NAMED_FROM_BYTES = 64 << 20
KV_CACHE = "KV cache"
DEEP = 7
# Phases in order, and what memory outside of torch that comes in each is called.
PHASES: Mapping[str, str] = {
    "process": "CUDA context, and other processes",
    "communicators": "communicators",
    "weights": "kernels and libraries of loading",
    "profile": "kernels and libraries of the profile run",
    "kv cache": "set-up of the KV cache",
    "end": "kernels of the warm-up, and graphs",
}


@dataclass(frozen=True)
class Reading:
    """The device at a moment: bytes that the driver says are used, by anybody, and bytes that torch reserves."""

    used_bytes: int
    reserved_bytes: int

    @property
    def outside_bytes(self) -> int:
        """Used, and not torch's."""
        return self.used_bytes - self.reserved_bytes


def reading(device: torch.device) -> Reading:
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return Reading(total - free, torch.cuda.memory_reserved(device))


def mark(worker: Any, phase: str) -> None:
    """The phase before this call is over: what came in it is its own."""
    if envs.VLLM_NEAPTIDE_LEDGER_FILE:
        marks = worker.__dict__.setdefault("neaptide_marks", {})
        marks.setdefault(phase, reading(worker.device))


def written(worker: Any, result: Result) -> Result:
    """Write the ledger of this rank, if asked to; ``result`` is handed through."""
    if envs.VLLM_NEAPTIDE_LEDGER_FILE:
        mark(worker, "end")
        found = ledger(worker)
        _write("Memory ledger", f"rank{worker.rank}", found)
        if worker.rank == 0:
            kv_bytes = sum(region["bytes"] for region in found["regions"] if region["name"] == KV_CACHE)
            try:
                _write("Configuration", "config", configuration(worker, kv_bytes))
            except Exception as error:
                # Upstream's code runs in it, on any model: an engine serves all the same.
                logger.warning("Configuration not written: %r", error)
    return result


def _write(what: str, name: str, data: Mapping[str, Any]) -> None:
    path = f"{envs.VLLM_NEAPTIDE_LEDGER_FILE}.{name}.json"
    try:
        with open(path + ".part", "w") as handle:
            json.dump(data, handle, indent=1, sort_keys=True)
        os.replace(path + ".part", path)
        logger.info("%s: %s", what, path)
    except OSError as error:
        logger.warning("%s not written: %s", what, error)


@dataclass(frozen=True)
class Block:
    """A block of the allocator that is in use."""

    address: int
    size_bytes: int
    graphs: bool


def blocks_in_use(device: torch.device) -> tuple[list[Block], dict[bool, int]]:
    """Blocks in use, and the bytes that segments of graphs' pools (True) and of the default pool have besides."""
    used: list[Block] = []
    idle = {True: 0, False: 0}
    for segment in torch.cuda.memory_snapshot():
        if segment["device"] != device.index:
            continue
        graphs = tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0)
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"].startswith("active"):
                used.append(Block(address, block["size"], graphs))
            else:
                idle[graphs] += block["size"]
            address += block["size"]
    return used, idle


def tensors_of(root: Any, name: str, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that can be reached from an object through attributes, mappings and sequences, by the shortest path.

    Args:
        seen: ids of what was gone through before, by this call or others.
    """
    todo: deque[tuple[Any, str, int]] = deque([(root, name, 0)])
    while todo:
        value, path, depth = todo.popleft()
        if id(value) in seen:
            continue
        if isinstance(value, torch.Tensor):
            seen.add(id(value))
            yield path, value
        elif depth < DEEP:
            seen.add(id(value))
            todo.extend((part, f"{path}{key}", depth + 1) for key, part in _parts(value))


def _parts(root: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(root, Mapping):
        yield from ((f"[{str(key)[:40]}]", value) for key, value in list(root.items()))
    elif isinstance(root, (list, tuple, set)):
        yield from ((f"[{index}]", value) for index, value in enumerate(list(root)))
    elif isinstance(root, torch.nn.Module) or type(root).__module__.split(".")[0] in ("vllm", "b12x"):
        yield from ((f".{key}", value) for key, value in list(getattr(root, "__dict__", {}).items()))


def _owners(worker: Any) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Region, path and tensor of what the ledger has names for, the more particular first."""
    from vllm.v1.worker import workspace

    runner, seen = worker.model_runner, set[int]()
    for path, tensor in tensors_of(getattr(runner, "kv_caches", ()), "kv_caches", seen):
        yield KV_CACHE, path, tensor
    for layer, module in worker.vllm_config.compilation_config.static_forward_context.items():
        for path, tensor in tensors_of(getattr(module, "kv_cache", ()), f"{layer}.kv_cache", seen):
            yield KV_CACHE, path, tensor
    for path, tensor in tensors_of(getattr(workspace, "_manager", None), "workspace", seen):
        yield "workspace", path, tensor
    models = [runner.get_model(), *([draft] if (draft := _draft(runner)) is not None else [])]
    for model in models:
        for path, tensor in (*model.named_parameters(), *model.named_buffers()):
            seen.add(id(tensor))
            yield "weights", path, tensor
    for model in models:
        for path, tensor in tensors_of(model, "model", seen):
            yield "tensors of layers", path, tensor
    for path, tensor in tensors_of(runner, "runner", seen):
        yield "buffers of the runner", path, tensor


def _draft(runner: Any) -> Any | None:
    for name in ("drafter", "speculator"):
        model = getattr(getattr(runner, name, None), "model", None)
        if isinstance(model, torch.nn.Module):
            return model
    return None


def _storage(tensor: torch.Tensor, device: torch.device) -> int | None:
    """The address of a tensor's storage on the device; None for one that has none there."""
    try:
        if tensor.device != device or tensor.is_meta:
            return None
        return tensor.untyped_storage().data_ptr() or None
    except (RuntimeError, NotImplementedError):
        return None


def attributed(worker: Any, used: list[Block]) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """Bytes of blocks by the region of the first tensor found in each, and blocks of 64 MiB and more by name.

    A block of a graphs' pool that no such tensor is in is the graphs'; of the default pool, ``other tensors``.
    """
    by_address = {block.address: block for block in used}
    found: dict[int, tuple[str, str]] = {}
    for region, path, tensor in _owners(worker):
        address = _storage(tensor, worker.device)
        if address in by_address:
            found.setdefault(address, (region, path))
    sums: dict[str, int] = {}
    large = []
    for block in used:
        own = "graphs: tensors of their pools" if block.graphs else "other tensors"
        region, path = found.get(block.address, (own, ""))
        sums[region] = sums.get(region, 0) + block.size_bytes
        if block.size_bytes >= NAMED_FROM_BYTES:
            named = bool(path) or block.graphs
            large.append({"bytes": block.size_bytes, "name": path or own, "named": named, "region": region})
    return sums, sorted(large, key=lambda one: (-one["bytes"], one["name"]))


def outside(marks: Mapping[str, Reading]) -> dict[str, int]:
    """Bytes outside of torch by the phase in which they came; of a phase without a mark in the next one."""
    out: dict[str, int] = {}
    before = 0
    for phase, name in PHASES.items():
        if phase in marks:
            out[name] = marks[phase].outside_bytes - before
            before = marks[phase].outside_bytes
    return out


def ledger(worker: Any) -> dict[str, Any]:
    """The device of this rank: regions, free memory and residue, in bytes, which sum to the total.

    The residue is what the driver says is used less the regions. Those in torch are counted block by block, those
    outside by the allocator's own total at the last mark: so it holds what was missed or counted twice among the
    blocks, and what came since. That a phase is called rightly it cannot say.
    """
    device, marks = worker.device, worker.__dict__["neaptide_marks"]
    torch.cuda.synchronize(device)
    used, idle = blocks_in_use(device)
    sums, large = attributed(worker, used)
    sums["allocator: free blocks"] = idle[False]
    sums["graphs: free blocks of their pools"] = idle[True]
    regions = [_region(name, size, torch_memory=True) for name, size in sums.items() if size]
    regions += [_region(name, size, torch_memory=False) for name, size in outside(marks).items() if size]
    free, total = torch.cuda.mem_get_info(device)
    residue = total - free - sum(one["bytes"] for one in regions)
    kv_bytes = sums.get(KV_CACHE, 0)
    return {
        "device": torch.cuda.get_device_name(device),
        "free_bytes": free,
        "large_blocks": large,
        "pcie_held_bytes": _pcie_bytes(worker),
        "rank": worker.rank,
        "regions": sorted(regions, key=lambda one: (-one["bytes"], one["name"])),
        "residue_bytes": residue,
        "residue_share": residue / max(1, total - free - kv_bytes),
        "schema_version": SCHEMA_VERSION,
        "total_bytes": total,
    }


def _region(name: str, size_bytes: int, *, torch_memory: bool) -> dict[str, Any]:
    return {"bytes": size_bytes, "in_torch": torch_memory, "name": name}


def _pcie_bytes(worker: Any) -> int:
    """Of the regions above: what PCIe collectives hold, by the functions that size it."""
    from vllm.distributed import get_tp_group

    held = getattr(getattr(get_tp_group(), "device_communicator", None), "pcie_ar_comm", None)
    return 0 if held is None else int(held.held_bytes())
