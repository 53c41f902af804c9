# SPDX-License-Identifier: Apache-2.0
"""The PCIe collectives of a group of ranks: made where all ranks can and want to, else vLLM's.

These functions are what vLLM's own code calls; without PCIe collectives each of them does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

import torch
import vllm.envs as envs
from torch.distributed import ProcessGroup
from vllm.config import CompilationMode, get_current_vllm_config_or_none
from vllm.distributed.device_communicators.pcie_all_reduce import PcieAllReduce
from vllm.distributed.device_communicators.pcie_choice import (
    AUTO,
    CAPABILITIES,
    OFF,
    ON,
    Found,
    agreed_refusal,
    refusal,
    worth_a_line,
)
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


def found_here(group: ProcessGroup, device: torch.device, serves: str, obstacle: str = "") -> Found:
    """What this rank was told, and what its own device and b12x are; nothing in it waits for a peer, or raises."""
    found = Found(OFF, "listed", torch.distributed.get_world_size(group), serves)
    try:
        asked, architectures = envs.VLLM_NEAPTIDE_PCIE_COLLECTIVES, envs.VLLM_NEAPTIDE_PCIE_ARCHITECTURES
        found = replace(found, asked=asked, architectures=architectures, obstacle=obstacle or _obstacle(asked))
        return found if refusal(replace(found, capability=CAPABILITIES[0])) else _with_device(found, device)
    except Exception as error:
        return replace(found, asked=ON, obstacle=f"{type(error).__name__}: {error}")


def _obstacle(asked: str) -> str:
    from vllm.distributed import parallel_state

    if not current_platform.is_cuda():
        return "not the CUDA platform"
    if asked == AUTO and envs.VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC:
        return "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC, which chooses another"
    if asked == AUTO and not parallel_state._ENABLE_CUSTOM_ALL_REDUCE:
        return "custom all-reduce is disabled"
    return "VLLM_BATCH_INVARIANT, which wants one order of summation for all sizes" if envs.VLLM_BATCH_INVARIANT else ""


def _with_device(found: Found, device: torch.device) -> Found:
    config = get_current_vllm_config_or_none()
    properties = torch.cuda.get_device_properties(device)
    seen = replace(
        found,
        device=device.index,
        physical=current_platform.visible_device_id_to_physical_device_id(device.index),
        capability=(properties.major, properties.minor),
        mig=" MIG " in properties.name,
        ubatches=config is not None and config.parallel_config.use_ubatching,
    )
    return seen if refusal(seen) else replace(seen, runtime=_runtime())


def reached(found: Found, everyones: Sequence[Found], group: ProcessGroup, device: torch.device) -> Found:
    """``found``, and what lies between this device and those of the group; collective, and never raises."""
    from vllm.distributed.parallel_state import in_the_same_node_as

    try:
        if not all(in_the_same_node_as(group, source_rank=0)):
            return replace(found, obstacle="several nodes")
        devices = {one.device for one in everyones}
        if len(devices) < len(everyones):
            return replace(found, obstacle="ranks that see one device each")
        nvlink = bool(current_platform.is_fully_connected([one.physical for one in everyones]))
        return replace(found, peers=_peers(device, sorted(devices - {found.device})), nvlink=nvlink)
    except Exception as error:
        return replace(found, obstacle=f"{type(error).__name__}: {error}")


def _peers(device: torch.device, others: Sequence[int]) -> bool:
    return all(
        other < torch.cuda.device_count() and torch.cuda.can_device_access_peer(device, other) for other in others
    )


def _runtime() -> str:
    try:
        import b12x.comm.pcie as pcie
        import b12x.comm.pcie.slab_sizes as sizes

        # Names of the package are resolved on first use.
        patched = hasattr(pcie.OneshotAllReducePool, "transient_captures") and hasattr(sizes, "owned_oneshot_bytes")
        _ = pcie.DmaAllReduce, pcie.DcpAllToAllPool
    except Exception as error:
        return f"b12x's PCIe collectives, with neaptide's patches, cannot be imported ({type(error).__name__}: {error})"
    return "" if patched else "b12x without neaptide's channel pool; apply the b12x series"


def _told(group: ProcessGroup, mine: object) -> list[Any]:
    """What each rank of a group has, by rank."""
    everyones: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(everyones, mine, group=group)
    return everyones


def made_together(
    name: str, group: ProcessGroup, device: torch.device, make: Callable[[], Made], serves: str, obstacle: str = ""
) -> Made | None:
    """``make()`` on all ranks of a group or on none; collective over it, whatever a rank found.

    Ranks go on from one step to the next only if all of them do, and nobody waits in a step for a rank that is not
    in it.

    Args:
        name: of the group, for the log.
        serves: what goes over PCIe, alike on all ranks.
        obstacle: why this rank cannot even be asked.
    """
    found = found_here(group, device, serves, obstacle)
    everyones = _told(group, found)
    why = agreed_refusal(everyones)
    if not why:
        everyones = _told(group, reached(found, everyones, group, device))
        why = agreed_refusal(everyones)
    made, failure = None, ""
    if not why:
        try:
            made = make()
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        failures = _told(group, failure)
        why = next((f"rank {rank} of the group: {text}" for rank, text in enumerate(failures) if text), "")
    if made is not None and not why:
        made.join_captures()
        logger.info_once("PCIe collectives for group %s: %s; %d bytes held.", name, serves, made.held_bytes())
        return made
    if worth_a_line(everyones):
        logger.info_once("PCIe collectives for group %s: not used, because: %s.", name, why)
    return None


def attach_pcie_all_reduce(communicator: Any) -> None:
    """Give the communicator of a tensor-parallel group its PCIe all-reduce, or None."""
    communicator.pcie_ar_comm = None
    name = communicator.unique_name
    if name.split(":")[0] != "tp" or communicator.world_size < 2 or not _on_cuda(communicator.device):
        return
    group, device, allowed, wrong = communicator.cpu_group, communicator.device, Limits(0), ""
    try:
        allowed = limits()
    except ValueError as error:
        # Said again, as an error, when the switches of all ranks are compared.
        wrong = str(error)
    communicator.pcie_ar_comm = made_together(
        name, group, device, lambda: _all_reduce(group, device, allowed), f"all-reduce by {allowed}", wrong
    )
    config = get_current_vllm_config_or_none()
    if communicator.pcie_ar_comm is not None and _fuses_rms_norms(config):
        _set_apart(config)


def _all_reduce(group: ProcessGroup, device: torch.device, allowed: Limits) -> PcieAllReduce:
    """With the plans for the model that is being loaded, if one is."""
    made = PcieAllReduce(group, device, allowed)
    config = get_current_vllm_config_or_none()
    if config is not None and config.model_config is not None:
        model = config.model_config
        made.prepare_rows(model.get_hidden_size(), model.dtype, fused=_fuses_rms_norms(config))
    return made


def _fuses_rms_norms(config: Any) -> bool:
    """Whether graphs are compiled with the pass that fuses all-reduces and RMSNorms."""
    return (
        config is not None
        and config.compilation_config.mode == CompilationMode.VLLM_COMPILE
        and bool(config.compilation_config.pass_config.fuse_allreduce_rms)
    )


def _set_apart(config: Any) -> None:
    """Keep vLLM's caches of compiled graphs apart from those of engines that fuse otherwise.

    Their keys have no switch of ours. Of a rank that finds an old graph and one that compiles a new one, only one would
    make the fused call, and both would wait.
    """
    if isinstance(config.additional_config, dict):
        config.additional_config["neaptide_pcie_fused"] = True


def _on_cuda(device: torch.device) -> bool:
    return device.type == "cuda" and current_platform.is_cuda() and torch.cuda.is_available()


@cache
def pcie_exchange_of(
    group: ProcessGroup, name: str, device: torch.device, rows: int, heads: int, head_dim: int, query_head_dim: int
) -> PcieExchange | None:
    """The exchange of the layers of one shape, or None; collective the first time a shape comes.

    Args:
        rows: what a step can have in decode.
        heads: of all ranks.
    """
    most, wrong = 0, ""
    try:
        most = min(rows, envs.VLLM_NEAPTIDE_PCIE_DCP_ROWS)
        wrong = "" if most else "VLLM_NEAPTIDE_PCIE_DCP_ROWS is 0"
    except ValueError as error:
        wrong = str(error)
    return made_together(
        name,
        group,
        device,
        lambda: PcieExchange(group, device, rows=most, heads=heads, head_dim=head_dim, query_head_dim=query_head_dim),
        f"MLA exchange of {heads} heads, {head_dim} and {query_head_dim} wide, for up to {most} rows",
        wrong,
    )


def exchange_for(
    manager: Any, num_heads: int, query_head_dim: int, head_dim: int, use_pcp: bool
) -> PcieExchange | None:
    """The exchange of a layer's ``MLADCPManager``, whose group, device and rows are known; None where vLLM's own serve.

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
