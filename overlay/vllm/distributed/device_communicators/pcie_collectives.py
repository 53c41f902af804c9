# SPDX-License-Identifier: Apache-2.0
"""The PCIe collectives of a group of ranks: made where all ranks can and want to, else NCCL, with one line in the log.

These functions are what vLLM's own code calls; without PCIe collectives each of them does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
import vllm.envs as envs
from torch.distributed import ProcessGroup
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.device_communicators.pcie_all_reduce import PcieAllReduce
from vllm.distributed.device_communicators.pcie_choice import OFF, Found, agreed_refusal, refusal, worth_a_line
from vllm.distributed.device_communicators.pcie_exchange import PcieExchange
from vllm.distributed.device_communicators.pcie_limits import KIB, MIB, Limits
from vllm.logger import init_logger
from vllm.platforms import current_platform

logger = init_logger(__name__)
Made = TypeVar("Made", PcieAllReduce, PcieExchange)


def limits() -> Limits:
    """From the switches; which sizes a DMA ring takes is decided by ``VLLM_NEAPTIDE_PCIE_RING_KB``."""
    ring = envs.VLLM_NEAPTIDE_PCIE_RING_KB * KIB
    return Limits(envs.VLLM_NEAPTIDE_PCIE_ONESHOT_KB * KIB, ring, envs.VLLM_NEAPTIDE_PCIE_RING_MB * MIB if ring else 0)


def found_here(group: ProcessGroup, device: torch.device) -> Found:
    """What this rank sees. Nothing is asked of the device or of b12x that does not decide."""
    found = Found(
        envs.VLLM_NEAPTIDE_PCIE_COLLECTIVES,
        envs.VLLM_NEAPTIDE_PCIE_ARCHITECTURES,
        torch.distributed.get_world_size(group),
    )
    if found.asked == OFF:
        return found
    obstacle = _obstacle(group)
    if obstacle:
        return Found(found.asked, found.architectures, found.world_size, obstacle=obstacle)
    config = get_current_vllm_config_or_none()
    properties = torch.cuda.get_device_properties(device)
    others = [index for index in range(found.world_size) if index != device.index]
    seen = Found(
        found.asked, found.architectures, found.world_size,
        capability=(properties.major, properties.minor),
        peers=_peers(device, others),
        nvlink=_nvlink(found.world_size),
        mig=" MIG " in properties.name,
        ubatches=config is not None and config.parallel_config.use_ubatching,
    )  # fmt: skip
    return seen if refusal(seen) else Found(**{**vars(seen), "runtime": _runtime()})


def _obstacle(group: ProcessGroup) -> str:
    from vllm.distributed.parallel_state import in_the_same_node_as

    if not current_platform.is_cuda():
        return "not the CUDA platform"
    if envs.VLLM_BATCH_INVARIANT:
        return "VLLM_BATCH_INVARIANT, which wants one order of summation for all sizes"
    return "" if all(in_the_same_node_as(group, source_rank=0)) else "several nodes"


def _peers(device: torch.device, others: list[int]) -> bool:
    return all(
        other < torch.cuda.device_count() and torch.cuda.can_device_access_peer(device, other) for other in others
    )


def _nvlink(world_size: int) -> bool:
    return bool(current_platform.is_fully_connected(list(range(world_size))))


def _runtime() -> str:
    try:
        import b12x.comm.pcie as pcie
        import b12x.comm.pcie.slab_sizes as sizes
    except Exception as error:
        return f"b12x's PCIe collectives, with neaptide's patches, cannot be imported ({type(error).__name__}: {error})"
    if not hasattr(pcie.OneshotAllReducePool, "transient_captures") or not hasattr(sizes, "owned_oneshot_bytes"):
        return "b12x without neaptide's channel pool; apply the b12x series"
    return ""


def made_together(
    name: str, group: ProcessGroup, device: torch.device, make: Callable[[], Made], serves: str
) -> Made | None:
    """``make()`` on all ranks of a group or on none; collective over it, whatever a rank found.

    Args:
        name: of the group, for the log.
        serves: what goes over PCIe, for the log.
    """
    everyones: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(everyones, found_here(group, device), group=group)
    why = agreed_refusal(everyones)
    made: Made | None = None
    if not why:
        try:
            made = make()
            failure = ""
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        failures: list[Any] = [None] * len(everyones)
        torch.distributed.all_gather_object(failures, failure, group=group)
        why = next((f"rank {rank} of the group: {text}" for rank, text in enumerate(failures) if text), "")
        if why and made is not None:
            made = None
    if made is not None:
        logger.info_once("PCIe collectives for group %s: %s; %d bytes held.", name, serves, made.held_bytes())
    elif worth_a_line(everyones):
        logger.info_once("PCIe collectives for group %s: NCCL for everything, because: %s.", name, why)
    return made


def attach_pcie_all_reduce(communicator: Any) -> None:
    """Give the communicator of a tensor-parallel group its PCIe all-reduce, or None."""
    communicator.pcie_ar_comm = None
    name = communicator.unique_name
    if name.split(":")[0] != "tp" or communicator.world_size < 2 or not _on_cuda(communicator.device):
        return
    allowed = limits()
    communicator.pcie_ar_comm = made_together(
        name,
        communicator.cpu_group,
        communicator.device,
        lambda: PcieAllReduce(communicator.cpu_group, communicator.device, allowed),
        f"all-reduce by {allowed}",
    )


def _on_cuda(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_available()


@cache
def pcie_exchange_of(
    group: ProcessGroup, name: str, device: torch.device, rows: int, heads: int, head_dim: int, query_head_dim: int
) -> PcieExchange | None:
    """The exchange of the layers of one shape, or None; collective the first time a shape comes.

    Args:
        rows: what a step can have in decode.
        heads: of all ranks.
    """
    most = min(rows, envs.VLLM_NEAPTIDE_PCIE_DCP_ROWS)
    if most < 1:
        return None
    return made_together(
        name,
        group,
        device,
        lambda: PcieExchange(group, device, rows=most, heads=heads, head_dim=head_dim, query_head_dim=query_head_dim),
        f"MLA exchange of {heads} heads, {head_dim} and {query_head_dim} wide, for up to {most} rows, NCCL above",
    )


def exchange_for(
    manager: Any, num_heads: int, query_head_dim: int, head_dim: int, use_pcp: bool
) -> PcieExchange | None:
    """The exchange of a layer's ``MLADCPManager``, whose group, device and rows are known; None where NCCL serves.

    Args:
        num_heads: of this rank.
    """
    if use_pcp or not _on_cuda(manager.device) or manager.group.world_size < 2:
        return None
    device = torch.device("cuda", torch.cuda.current_device())
    heads = num_heads * manager.group.world_size
    return pcie_exchange_of(
        manager.group.cpu_group, manager.group.unique_name, device, manager.max_num_tokens, heads, head_dim,
        query_head_dim,
    )  # fmt: skip
