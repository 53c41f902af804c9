"""A b12x without a device: pools, a ring and a preparation session that keep b12x's rules and write down their calls.

The rules that matter to a caller: ids of captures are unique and a plan belongs to one channel; a plan of a oneshot
has the shape, strides and dtype of the input it was made for; plans are not made while a stream is captured. A fused
call has at most 36 rows of whole packs, and operands of one dtype.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

ONESHOT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
FUSED = "OneshotAllReducePool.all_reduce_fused_add_rms_norm"


class Machine:
    """What torch.cuda would say, and what b12x was asked for."""

    def __init__(self) -> None:
        self.stream, self.capturing = 1, False
        self.own_stream: int | None = None
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.plans: list[Plan] = []
        self.sessions = 0

    def named(self, name: str) -> list[dict[str, Any]]:
        return [call for called, call in self.calls if called == name]

    def give_own_stream(self) -> None:
        """vLLM's ``current_stream``: the first call of a process makes its stream and sets it."""
        if self.own_stream is not None:
            self.stream, self.own_stream = self.own_stream, None

    @contextmanager
    def on_stream(self, stream: int) -> Iterator[None]:
        before, self.stream = self.stream, stream
        yield
        self.stream = before

    @contextmanager
    def captured(self) -> Iterator[None]:
        self.capturing = True
        yield
        self.capturing = False


class Plan:
    def __init__(self, query: dict[str, Any], runtime: Any) -> None:
        self.query, self.runtime, self.bound, self.prepared = query, runtime, False, False

    def request(self, *, name: str, prepare_call: Any) -> Any:
        return SimpleNamespace(name=name, plan=self, prepare_call=prepare_call)

    def bind_input(self, tensor: torch.Tensor) -> None:
        assert layout(tensor) == layout(self.query["call"]["inp"])
        self.bound = True


def assert_strides_of_its_shape(tensor: torch.Tensor) -> None:
    """b12x compares every stride, also that of a dimension of one, which torch leaves open."""
    assert tensor.stride() == torch.empty(tensor.shape, device="meta").stride()


def layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


class Channel:
    def __init__(self, device: torch.device, max_size: int) -> None:
        self.device, self.max_size = device, max_size

    def should_allreduce(self, tensor: torch.Tensor) -> bool:
        nbytes = tensor.numel() * tensor.element_size()
        dense = tensor.is_contiguous() or tensor.t().is_contiguous()
        return tensor.dtype in ONESHOT_DTYPES and nbytes <= self.max_size and nbytes % 16 == 0 and dense


class Pool:
    """Of either kind."""

    machine: Machine
    transient_captures = None

    def __init__(self, **options: Any) -> None:
        self.options = options
        self._logical_channels: dict[str, Channel] = {}
        self.groups: dict[str, Channel] = {}
        self.captured_ids: list[str] = []
        self.open: list[Channel] = []

    @classmethod
    def from_exchange_group(cls, *, exchange_group: Any, device: torch.device, **options: Any) -> Pool:
        cls.machine.calls.append(("pool", {"exchange_group": exchange_group, "device": device, **options}))
        return cls(device=device, **options)

    def prepare_channels(self, ids: tuple[str, ...], *, replay_group: str | None = None) -> None:
        for name in ids:
            made = Channel(self.options["device"], self.options.get("max_size", 0))
            self._logical_channels[name] = self.groups.setdefault(str(replay_group or name), made)

    @contextmanager
    def capture(self, stream: Any, *, channel_id: str, replay_group: str | None = None) -> Iterator[Channel]:
        if channel_id in self.captured_ids:
            raise RuntimeError(f"{channel_id!r} was already captured")
        self.captured_ids.append(channel_id)
        self.prepare_channels((channel_id,), replay_group=replay_group)
        self.machine.calls.append(("capture", {"stream": stream, "id": channel_id, "group": replay_group}))
        self.open.append(self._logical_channels[channel_id])
        try:
            yield self.open[-1]
        finally:
            self.open.pop()

    def checkpoint_channels(self) -> tuple[list[str], dict[str, Channel]]:
        return list(self.captured_ids), dict(self._logical_channels)

    def rollback_channels(self, then: tuple[list[str], dict[str, Channel]]) -> None:
        self.machine.calls.append(("rollback", {}))
        self.captured_ids, self._logical_channels = list(then[0]), dict(then[1])

    def _used(self, name: str, plan: Plan, channel_id: str, **call: Any) -> None:
        channel = self.open[-1] if self.open else self._logical_channels[channel_id]
        assert plan.prepared
        assert plan.runtime is channel
        self.machine.calls.append((name, {"plan": plan, "channel_id": channel_id, **call}))

    def all_reduce(self, inp: torch.Tensor, *, plan: Plan, out: torch.Tensor, channel_id: str) -> torch.Tensor:
        assert_strides_of_its_shape(inp)
        self._used("oneshot", plan, channel_id, inp=inp)
        assert plan.bound
        if layout(inp) != layout(plan.query["call"]["inp"]):
            raise ValueError("oneshot input metadata differs from the prepared plan")
        return out.copy_(inp * 2)

    def all_reduce_fused_add_rms_norm(
        self, inp: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float, *, plan: Plan,
        out: torch.Tensor, residual_out: torch.Tensor, channel_id: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        self._used("fused", plan, channel_id, weight=weight, epsilon=epsilon)
        assert plan.bound
        assert plan.query["surface"] == FUSED
        assert layout(inp) == layout(plan.query["call"]["inp"])
        assert all(layout(made)[::2] == layout(inp)[::2] for made in (residual, out, residual_out))
        assert (tuple(weight.shape), weight.dtype) == ((inp.shape[-1],), inp.dtype)
        assert all(operand.is_contiguous() for operand in (residual, weight))
        assert len({made.data_ptr() for made in (inp, residual, out, residual_out)}) == 4
        total = inp.float() * 2 + residual.float()
        residual_out.copy_(total)
        out.copy_(total * torch.rsqrt(total.square().mean(-1, keepdim=True) + epsilon) * weight.float())
        return out, residual_out

    def all_gather_heads(
        self, local_input: torch.Tensor, out: torch.Tensor, *, plan: Plan, channel_id: str
    ) -> torch.Tensor:
        assert_strides_of_its_shape(local_input)
        self._used("gather", plan, channel_id, shape=tuple(local_input.shape))
        return out.view(torch.uint8).copy_(torch.cat([local_input] * 2, dim=1).view(torch.uint8)).view(out.dtype)

    def lse_reduce_scatter(
        self, partial_output: torch.Tensor, partial_lse: torch.Tensor, out: torch.Tensor, *, plan: Plan,
        is_lse_base_on_e: bool, channel_id: str,
    ) -> torch.Tensor:  # fmt: skip
        assert_strides_of_its_shape(partial_output)
        assert_strides_of_its_shape(partial_lse)
        lse = partial_lse.clone()
        self._used(
            "reduce", plan, channel_id, natural=is_lse_base_on_e, lse=lse, shape=tuple(partial_output.shape),
            output=partial_output,
        )  # fmt: skip
        return out.copy_(partial_output[:, : out.shape[1]])


def query_from_runtime(runtime: Any, *, surface: str, call: dict[str, Any]) -> dict[str, Any]:
    if surface == FUSED:
        inp = call["inp"]
        assert inp.shape[-1] * inp.element_size() % 16 == 0
        assert inp.numel() // inp.shape[-1] <= 36
    return {"surface": surface, "call": dict(call)}


class Ring:
    machine: Machine

    def __init__(self, *, exchange_group: Any, device: torch.device, max_bytes: int, fp8: str | None = None) -> None:
        self.machine.calls.append(("ring made", {"max_bytes": max_bytes, "fp8": fp8}))
        self.device, self.max_bytes = device, max_bytes
        self._layout = SimpleNamespace(slab_bytes=1000, stage_bytes=24)

    def should_allreduce(self, tensor: torch.Tensor) -> bool:
        return tensor.dtype in ONESHOT_DTYPES and tensor.is_contiguous() and tensor.numel() % 16 == 0

    def all_reduce(self, inp: torch.Tensor, *, plan: Plan, out: torch.Tensor) -> torch.Tensor:
        assert plan.prepared
        assert plan.runtime is self
        self.machine.calls.append(("ring", {"plan": plan}))
        return out.copy_(inp * 2)


def install(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """``b12x`` of ``sys.modules``, and the streams of ``torch.cuda``."""
    stood = {name: ModuleType(name) for name in ("b12x", "b12x.comm", "b12x.comm.pcie", "b12x.comm.pcie.slab_sizes")}
    pcie, sizes = stood["b12x.comm.pcie"], stood["b12x.comm.pcie.slab_sizes"]
    preparation = stood["b12x.preparation"] = ModuleType("b12x.preparation")

    class Session:
        def __init__(self, *, device: Any, autotune: bool, compile_workers: int) -> None:
            machine.sessions += 1

        def prepare(self, requests: tuple[Any, ...], *, autotune: bool) -> None:
            assert not machine.capturing, "no plan can be made while a stream is captured"
            for request in requests:
                request.prepare_call(request.plan).run()
                request.plan.prepared = True
                machine.plans.append(request.plan)

    kinds = {"OneshotAllReducePool": Pool, "DcpAllToAllPool": Pool, "DmaAllReduce": Ring}
    vars(pcie).update({name: type(name, (kind,), {"machine": machine}) for name, kind in kinds.items()})
    vars(pcie).update(
        query_from_runtime=query_from_runtime,
        plan=lambda query, *, runtime: Plan(query, runtime),
        slab_sizes=sizes,
    )
    vars(sizes).update(owned_oneshot_bytes=lambda channel: 300, owned_a2a_bytes=lambda channel: 70)
    vars(preparation).update(
        PreparationSession=Session, detect_device=lambda device: device, PreparedCall=SimpleNamespace
    )
    vars(stood["b12x.comm"])["pcie"] = pcie
    vars(stood["b12x"]).update(comm=stood["b12x.comm"], preparation=preparation)
    for name, module in stood.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *args: SimpleNamespace(cuda_stream=machine.stream))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: machine.capturing)
    from vllm.distributed.device_communicators import pcie_channels

    monkeypatch.setattr(pcie_channels, "current_stream", machine.give_own_stream)
