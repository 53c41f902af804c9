"""A rank of a vLLM with tensor parallelism and decode context parallelism over all ranks."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from importlib import metadata
from typing import Any

import torch

HIDDEN = 4096


class Rig:
    """Groups as a worker makes them, and rows of what was found."""

    def __init__(self, rank: int, world: int, port: int, rows: list[dict[str, Any]]) -> None:
        from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
        from vllm.distributed import parallel_state as state

        self.rank, self.world, self.rows, self.case = rank, world, rows, "start"
        self.device = torch.device("cuda", rank)
        torch.cuda.set_device(self.device)
        torch.zeros(1, device=self.device)
        self.config = VllmConfig(
            parallel_config=ParallelConfig(tensor_parallel_size=world, decode_context_parallel_size=world)
        )
        self.config.kernel_config.enable_jit_warmup = False
        with set_current_vllm_config(self.config):
            state.init_distributed_environment(
                world_size=world, rank=rank, distributed_init_method=f"tcp://127.0.0.1:{port}", local_rank=rank,
                backend="nccl",
            )  # fmt: skip
            before = self.free_bytes()
            state.initialize_model_parallel(tensor_model_parallel_size=world, decode_context_model_parallel_size=world)
        self.made_bytes = before - self.free_bytes()
        self.graph_capture, self.group, self.dcp = state.graph_capture, state.get_tp_group(), state.get_dcp_group()
        self.pcie = self.group.device_communicator.pcie_ar_comm

    def named(self) -> dict[str, Any]:
        versions = {}
        for name in ("torch", "vllm", "b12x", "nvidia-cutlass-dsl", "triton"):
            try:
                versions[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                versions[name] = "from a tree"
        return {"device": torch.cuda.get_device_name(self.device), "versions": versions}

    def row(self, **found: Any) -> None:
        self.rows.append({"case": self.case, **found})

    def meet(self) -> None:
        torch.cuda.synchronize(self.device)
        torch.distributed.barrier(group=self.group.cpu_group)

    def free_bytes(self) -> int:
        torch.cuda.synchronize(self.device)
        gc.collect()
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.device)[0])

    def free_at_rest(self) -> int:
        """This device's free memory while all ranks are at rest."""
        self.meet()
        found = self.free_bytes()
        self.meet()
        return found

    def normal(self, seed: int, shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        generator = torch.Generator(device=self.device).manual_seed(1000 * seed + self.rank)
        return torch.randn(shape, generator=generator, device=self.device, dtype=torch.float32).to(dtype)

    def nccl_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.clone()
        torch.distributed.all_reduce(total, group=self.group.device_group)
        return total

    def nccl(self) -> tuple[Callable[[torch.Tensor], object], str]:
        """The sum by NCCL, for graphs, and whose it is."""
        ours = self.group.device_communicator.pynccl_comm
        if not ours.disabled:
            return ours.all_reduce, "vllm"
        return partial(torch.distributed.all_reduce, group=self.group.device_group), "torch"

    def alike(self, tensor: torch.Tensor) -> bool:
        """Whether every rank has the same bytes."""
        mine = tensor.contiguous().view(torch.uint8).view(-1)
        everyones = [torch.empty_like(mine) for _ in range(self.world)]
        torch.distributed.all_gather(everyones, mine, group=self.group.device_group)
        return all(bool(torch.equal(everyones[0], other)) for other in everyones)

    def captured(self, body: Any) -> tuple[Any, Any]:
        """A graph of ``body`` and what it gave, warmed up and captured as a runner does."""
        with self.graph_capture(self.device) as context:
            body()
            torch.cuda.synchronize(self.device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=context.stream, capture_error_mode="thread_local"):
                given = body()
            torch.cuda.synchronize(self.device)
        return graph, given

    def seconds(self, body: Any, count: int = 20) -> float:
        for _ in range(3):
            body()
        self.meet()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(count):
            body()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000 / count
