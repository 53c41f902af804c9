"""Profiling captures of vLLM's TP group and of a b12x pool on two GPUs, again and again, then a real one.

``python tests/gpu/capture_child RANK PORT RESULT VARIANT``: one of two ranks; RESULT gets a JSON object. VARIANT is
``patched`` (a disposable scope, and the pool as its participant) or ``upstream`` (neither: vLLM as published).
Imports nothing of neaptide, so that the trees on the path decide what is under test.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "pcie_child"))

import torch
from devices import Gpu
from families import FAMILIES
from pool_participant import PoolParticipant
from worker import Context

WORLD, PROFILES, REPLAYS = 2, 50, 20
ROWS, HIDDEN, LAYERS = (64, 8), 4096, 16
HIGHEST_SEED = 100  # sums of two of these are exact in bf16


class Rig:
    """A TP group of two with CustomAllreduce, and in the patched variant a pool that takes part in its captures."""

    def __init__(self, rank: int, port: int, variant: str) -> None:
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.distributed import parallel_state as state

        self.rank, self.machine = rank, Gpu(rank)
        with set_current_vllm_config(VllmConfig()):
            state.init_distributed_environment(
                world_size=WORLD, rank=rank, distributed_init_method=f"tcp://127.0.0.1:{port}", local_rank=rank,
                backend="nccl",
            )  # fmt: skip
            state.initialize_model_parallel(tensor_model_parallel_size=WORLD)
        self.graph_capture, self.group = state.graph_capture, state.get_tp_group()
        self.all_reduce = self.group.device_communicator.ca_comm
        if self.all_reduce is None or self.all_reduce.disabled:
            raise RuntimeError("CustomAllreduce is off; this needs two GPUs that reach each other's memory")
        self.context = Context(
            rank, WORLD, {"sizes": "full", "variant": variant}, self.group.device_group, self.group.cpu_group,
            self.machine, print,
        )  # fmt: skip
        self.inputs = torch.zeros((max(ROWS), HIDDEN), dtype=torch.bfloat16, device=self.machine.device)
        self.participant: PoolParticipant | None = None
        if variant == "patched":
            from vllm.distributed.capture_scopes import register_capture_participant

            self.participant = PoolParticipant(self.context, FAMILIES["exchange"])
            register_capture_participant(self.participant, self.group.device_group)

    def disposable(self) -> AbstractContextManager[None]:
        if self.participant is None:
            return nullcontext()
        from vllm.distributed.capture_scopes import disposable_captures

        return disposable_captures()

    def channels(self) -> int:
        return 0 if self.participant is None else self.participant.channels()

    def layers(self, rows: int) -> list[torch.Tensor]:
        """Sums over the ranks, each of an input that the graph's own pool holds; then the pool's operation."""
        sums = [self.all_reduce.custom_all_reduce(self.inputs[:rows] + layer) for layer in range(LAYERS)]
        if self.participant is not None:
            self.participant.run()
        return sums

    def captured(self) -> tuple[list[tuple[Any, list[torch.Tensor]]], int]:
        """Graphs of all sizes with their outputs, as a runner captures them; and the channels meanwhile."""
        pool, graphs = torch.cuda.graph_pool_handle(), []
        with self.graph_capture(self.machine.device) as context:
            channels = self.channels()
            for rows in ROWS:
                self.layers(rows)
                self.machine.sync()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, stream=context.stream, capture_error_mode="thread_local"):
                    sums = self.layers(rows)
                graphs.append((graph, sums))
            self.machine.sync()
        return graphs, channels

    def profile(self) -> int:
        """A profiling capture, its graphs destroyed. Channels during it."""
        with self.disposable():
            graphs, channels = self.captured()
            del graphs
            self.machine.settle()
        return channels

    def free_bytes(self) -> int:
        """This device's free memory while all ranks are at rest."""
        self.machine.settle()
        self.context.meet()
        found = self.machine.free_bytes()
        self.context.meet()
        return found

    def pending(self) -> int:
        """Captured inputs that CustomAllreduce has not registered."""
        from vllm import _custom_ops as ops

        return len(ops.get_graph_buffer_ipc_meta(self.all_reduce._ptr)[1])

    def wrong_sums(self) -> int:
        """Replays of a real capture, with new inputs each: sums that are not as expected."""
        graphs, _ = self.captured()
        wrong = 0
        for seed in range(1, 1 + REPLAYS):
            self.inputs.fill_(seed * (1 + self.rank) % HIGHEST_SEED)
            if self.participant is not None:
                self.participant.operation.refresh(seed)
            self.machine.sync()
            self.context.meet()
            for graph, sums in graphs:
                graph.replay()
                self.machine.sync()
                base = sum(seed * (1 + rank) % HIGHEST_SEED for rank in range(WORLD))
                wrong += sum(int((value != base + WORLD * layer).sum()) for layer, value in enumerate(sums))
                if self.participant is not None:
                    wrong += int(self.participant.operation.mismatches())
            self.context.meet()
        return wrong


def run(rank: int, port: int, variant: str) -> dict[str, Any]:
    rig = Rig(rank, port, variant)
    channels_before = rig.channels()
    free_bytes, channels_inside = [], []
    for _ in range(PROFILES):
        channels_inside.append(rig.profile())
        free_bytes.append(rig.free_bytes())
    return {
        "variant": variant, "rank": rank, "device": rig.machine.name, "torch": torch.__version__,
        "profiles": PROFILES, "free_bytes": free_bytes, "channels_before": channels_before,
        "channels_inside": channels_inside, "channels_after": rig.channels(), "pending_inputs": rig.pending(),
        "replays": REPLAYS * len(ROWS), "wrong_sums": rig.wrong_sums(), "error": "",
    }  # fmt: skip


def main() -> None:
    rank, port, result, variant = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    try:
        found = run(rank, port, variant)
    except BaseException:
        found = {"variant": variant, "rank": rank, "error": traceback.format_exc()[-3000:]}
    result.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    sys.stdout.flush()
    # Neither torch's nor a peer's teardown is under test, and either may hang.
    os._exit(1 if found["error"] else 0)


if __name__ == "__main__":
    main()
