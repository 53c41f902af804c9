"""The cases by name, in order."""

from __future__ import annotations

import math
import random
from functools import partial
from typing import Any

import torch
from rig import HIDDEN

SIZES = tuple(1 << shift for shift in range(10, 27))
HEADS, HEAD_DIM, QUERY_DIM, ROWS = 48, 512, 576, 64
FUSED_ROWS = (1, 4, 10, 64)
REPLAYS = 10000


def made(rig: Any) -> None:
    """What the communicator holds, against what its construction took of the device."""
    held = rig.pcie.held_bytes() if rig.pcie is not None else 0
    rig.row(serves=rig.pcie is not None, held_bytes=held, groups_took_bytes=rig.made_bytes)
    if rig.pcie is None:
        raise RuntimeError("PCIe collectives are off; the log says why")
    # As for an engine with the fusing pass; after the first capture none is made.
    rig.pcie.prepare_rows(HIDDEN, torch.bfloat16, fused=True)


def _payload(rig: Any, nbytes: int, seed: int) -> torch.Tensor:
    return rig.normal(seed, (max(1, nbytes // 2 // HIDDEN), min(HIDDEN, nbytes // 2)))


def sums(rig: Any) -> None:
    """Every size through the group, eager and replayed: bytes alike on all ranks, and NCCL's within rounding."""
    payloads = {nbytes: _payload(rig, nbytes, nbytes) for nbytes in SIZES}
    eagers = {}
    for nbytes, tensor in payloads.items():  # all kinds before the first capture, as an engine's warm-up
        route = rig.pcie.limits.route(nbytes)
        before = rig.pcie.calls[route]
        eagers[nbytes] = rig.group.all_reduce(tensor), rig.pcie.calls[route] - before
    for nbytes, tensor in payloads.items():
        wanted = rig.nccl_sum(tensor)
        route = rig.pcie.limits.route(nbytes)
        eager, first = eagers[nbytes]
        before = rig.pcie.calls[route] - first
        graph, out = rig.captured(partial(rig.group.all_reduce, tensor))
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        errors = [_error(value, wanted) for value in (eager, out)]
        alike = [rig.alike(value) for value in (eager, out)]
        # Eager, warm-up, capture.
        took = rig.pcie.calls[route] - before == 3
        rig.row(nbytes=nbytes, route=route, took_it=took, max_abs_errors=errors, ranks_alike=alike,
                failed=not max(errors) <= rig.world * 2.0**-5 or not all(alike) or not took)  # fmt: skip


def _gathered(rig: Any, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Every rank's, by rank."""
    everyones = [torch.empty_like(tensor) for _ in range(rig.world)]
    torch.distributed.all_gather(everyones, tensor, group=rig.group.device_group)
    return everyones


def fused(rig: Any) -> None:
    """Sum, residual and RMSNorm by the operation of compiled graphs, against fp64; 64 rows are vLLM's own steps."""
    from vllm.compilation.passes.fusion import pcie_rms_fusion

    epsilon = pcie_rms_fusion.EPSILONS[0]
    weight = 1 + 0.1 * _gathered(rig, rig.normal(500, (HIDDEN,)))[0]
    for rows in FUSED_ROWS:
        tensor = rig.normal(300 + rows, (rows, HIDDEN))
        residual = _gathered(rig, rig.normal(400 + rows, (rows, HIDDEN)))[0]
        total = torch.stack(_gathered(rig, tensor)).double().sum(dim=0) + residual.double()
        normed = total * torch.rsqrt(total.square().mean(dim=-1, keepdim=True) + epsilon) * weight.double()
        operation = partial(
            torch.ops.vllm.neaptide_all_reduce_add_rms_norm, tensor, residual, weight, epsilon, rig.group.unique_name
        )
        before = rig.pcie.calls["fused"]
        found = [operation()]
        graph, replayed = rig.captured(operation)
        for value in replayed:
            value.zero_()
        for _ in range(3):  # sums in between, on the same channel
            rig.group.all_reduce(tensor)
            graph.replay()
        torch.cuda.synchronize()
        found.append(replayed)
        errors = [_error(value, wanted) for pair in found for value, wanted in zip(pair, (normed, total), strict=True)]
        alike = [rig.alike(value) for pair in found for value in pair]
        over = rig.pcie.limits.route(tensor.nbytes) == "oneshot"
        # Eager, warm-up, capture.
        took = rig.pcie.calls["fused"] - before == (3 if over else 0)
        rig.row(rows=rows, over_pcie=over, took_it=took, max_abs_errors=errors, ranks_alike=alike,
                failed=not max(errors) <= 0.06 or not all(alike) or not took)  # fmt: skip


def times(rig: Any) -> None:
    """Replayed graphs of 20 sums each: this route over NCCL, vLLM's or, where it finds no library, torch's."""
    base, through = rig.nccl()
    for nbytes in SIZES:
        tensor = _payload(rig, nbytes, 1)

        def chain(one: Any, tensor: torch.Tensor = tensor) -> None:
            for _ in range(20):
                one(tensor)

        ours, _ = rig.captured(partial(chain, rig.group.all_reduce))
        nccl, _ = rig.captured(partial(chain, base))
        ratio = rig.seconds(ours.replay) / rig.seconds(nccl.replay)
        rig.row(nbytes=nbytes, route=rig.pcie.limits.route(nbytes), nccl_of=through,
                time_ratio_to_nccl_nvlink_not_pcie=ratio)  # fmt: skip


def _manager(rig: Any, *, natural: bool, padded: int | None) -> Any:
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.ops.dcp import MLADCPManager

    with set_current_vllm_config(rig.config):
        return MLADCPManager(
            rig.config, rig.device, HEADS // rig.world, QUERY_DIM, HEAD_DIM, torch.bfloat16, torch.bfloat16, padded,
            natural, False,
        )  # fmt: skip


def _nccl_combine(
    rig: Any, output: torch.Tensor, lse: torch.Tensor, natural: bool, **shards: Any
) -> torch.Tensor | None:
    """vLLM's own; None where PyNccl found no library: its reduce-scatter then writes nothing."""
    from vllm.v1.attention.ops.dcp import cp_lse_ag_out_rs

    if rig.group.device_communicator.pynccl_comm.disabled:
        return None
    return cp_lse_ag_out_rs(output.clone(), lse.clone(), rig.dcp, is_lse_base_on_e=natural, **shards)


def _merged(rig: Any, output: torch.Tensor, lse: torch.Tensor, natural: bool) -> torch.Tensor:
    """This rank's heads of all ranks' outputs by LSE in fp64, from nothing of vLLM or b12x."""
    outputs, lses = _gathered(rig, output), _gathered(rig, lse)
    scale = 1.0 if natural else math.log(2)
    weights = torch.softmax(torch.stack(lses).double() * scale, dim=0).nan_to_num(0.0)
    whole = (torch.stack(outputs).double() * weights.unsqueeze(-1)).sum(dim=0)
    share = HEADS // rig.world
    return whole[:, rig.rank * share : (rig.rank + 1) * share].float()


def _error(value: torch.Tensor, wanted: torch.Tensor) -> float:
    """The greatest absolute error; not-a-number counts as infinite."""
    return float((value.float() - wanted.float()).abs().nan_to_num(math.inf, math.inf).max())


def exchange(rig: Any) -> None:
    """A layer's manager: rows below, at and above the capacity, empty shards, padding; vLLM over NCCL beside it."""
    # Layers are made, and called eagerly once, before the first capture.
    managers = {natural: _manager(rig, natural=natural, padded=64 if natural else None) for natural in (True, False)}
    for manager in managers.values():
        manager.combine(rig.normal(1, (1, HEADS, HEAD_DIM)), rig.normal(2, (1, HEADS), torch.float32))
        manager.query_gather(rig.normal(3, (1, HEADS // rig.world, QUERY_DIM)))
    for natural, manager in managers.items():
        for rows in (1, 7, ROWS, ROWS + 1):
            output = rig.normal(rows, (rows, HEADS, HEAD_DIM))
            lse = 3 * rig.normal(100 + rows, (rows, HEADS), torch.float32)
            starts = torch.arange(rows + 1, device=rig.device, dtype=torch.int32)
            lengths = torch.full((rows,), 5, device=rig.device, dtype=torch.int32)
            lengths[rig.rank :: 3] = 0
            lengths[5:6] = 0  # of no rank
            wanted = _merged(rig, output, lse.masked_fill((lengths == 0)[:, None], -math.inf), natural)
            nccl = _nccl_combine(rig, output, lse, natural, seq_lens=lengths, query_start_loc=starts)
            nccl_error = None if nccl is None else _error(nccl, wanted)
            query = rig.normal(200 + rows, (rows, HEADS // rig.world, QUERY_DIM))
            all_heads = rig.dcp.all_gather(query, dim=1)

            def body(
                manager: Any = manager, output: torch.Tensor = output, lse: torch.Tensor = lse,
                lengths: torch.Tensor = lengths, starts: torch.Tensor = starts, query: torch.Tensor = query,
            ) -> Any:  # fmt: skip
                # vLLM's own path works in place.
                combined = manager.combine(output.clone(), lse.clone(), seq_lens=lengths, query_start_loc=starts)
                return combined, manager.query_gather(query)

            served = manager.pcie.calls
            found = [body()]
            graph, replayed = rig.captured(body)
            for value in replayed:
                value.zero_()
            graph.replay()
            torch.cuda.synchronize()
            found.append(replayed)
            errors = [_error(combined, wanted) for combined, _ in found]
            gathers = [bool(torch.equal(gathered, all_heads)) for _, gathered in found]
            over = rows <= ROWS
            took = manager.pcie.calls - served == (6 if over else 0)
            rig.row(rows=rows, natural=natural, padded_heads=manager.padded_num_heads, over_pcie=over,
                    max_abs_errors=errors, nccl_max_abs_error=nccl_error, gathers_equal=gathers,
                    failed=(over and not max(errors) <= 0.03) or not all(gathers) or not took
                    or not (nccl_error is None or nccl_error <= 0.06))  # fmt: skip


def interleaved(rig: Any) -> None:
    """Graphs of target and draft, in random order, with eager work between: every hundredth result is checked."""
    manager = _manager(rig, natural=True, padded=None)
    target_in, draft_in = rig.normal(1, (4, HIDDEN)), rig.normal(2, (2, HIDDEN))
    query = rig.normal(3, (8, HEADS // rig.world, QUERY_DIM))

    def target() -> Any:
        return rig.group.all_reduce(rig.group.all_reduce(target_in) * 0.5), manager.query_gather(query)

    def draft() -> Any:
        return (rig.group.all_reduce(draft_in),)

    before = rig.pcie.calls["upstream"], manager.pcie.calls
    graphs = {"target": rig.captured(target), "draft": rig.captured(draft)}
    over_pcie = rig.pcie.calls["upstream"] == before[0] and manager.pcie.calls - before[1] == 2
    wrong, checked, order = 0, 0, random.Random(7)
    for turn in range(REPLAYS):
        name = order.choice(("target", "draft", "draft", "eager"))
        if turn % 100 == 0:
            target_in.copy_(rig.normal(turn, (4, HIDDEN)))
            draft_in.copy_(rig.normal(turn + 1, (2, HIDDEN)))
            query.copy_(rig.normal(turn + 2, query.shape))
        if name == "eager":
            given = (rig.group.all_reduce(draft_in),)
        else:
            graphs[name][0].replay()
            given = graphs[name][1]
        if turn % 100 < 3:
            checked += 1
            source = target_in if name == "target" else draft_in
            wanted = rig.nccl_sum(source)
            if name == "target":
                wanted = rig.nccl_sum(wanted * 0.5)
                wrong += int(not torch.equal(given[1], rig.dcp.all_gather(query, dim=1)))
            wrong += int(not _error(given[0], wanted) <= 2.0**-3)
    rig.meet()
    rig.row(replays=REPLAYS, checked=checked, wrong=wrong, over_pcie=over_pcie, failed=wrong > 0 or not over_pcie)


def profiling(rig: Any) -> None:
    """Free memory after each of ten profiling captures."""
    from vllm.distributed.capture_scopes import disposable_captures

    tensor, pool = rig.normal(1, (4, HIDDEN)), rig.pcie.oneshot.pool
    before = sorted(pool._captured_channel_ids)
    free = [rig.free_at_rest()]
    for _ in range(10):
        with disposable_captures():
            graph, out = rig.captured(lambda: rig.group.all_reduce(tensor))
            del graph, out
            rig.free_bytes()
        free.append(rig.free_at_rest())
    rolled_back = sorted(pool._captured_channel_ids) == before
    # What the first one loads stays: code, and what libraries keep.
    rig.row(free_bytes=free, captures=10, rolled_back=rolled_back, failed=free[1] != free[-1] or not rolled_back)


CASES = {
    "made": made, "sums": sums, "fused": fused, "exchange": exchange, "profiling": profiling,
    "interleaved": interleaved, "times": times,
}  # fmt: skip
