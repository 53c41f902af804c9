"""The ledger of a worker: sums, names, phases, and where upstream's worker calls it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.worker import gpu_worker, memory_ledger, workspace
from vllm.v1.worker.memory_ledger import PHASES, Reading

CPU = torch.device("cpu")
MIB = 1 << 20
TOTAL = 96 << 30


@dataclass
class Device:
    """What the driver and the allocator say."""

    free: int = TOTAL
    reserved: int = 0
    segments: list[dict[str, Any]] = field(default_factory=list)
    asked: int = 0

    def add(self, blocks: list[tuple[int, int, str]], pool: tuple[int, int] = (0, 0)) -> None:
        """A segment of blocks (address, bytes, state), one behind the other from the first address on."""
        self.segments.append({
            "device": None, "address": blocks[0][0], "segment_pool_id": pool,
            "blocks": [{"size": size, "state": state} for _, size, state in blocks],
        })  # fmt: skip
        self.reserved += sum(size for _, size, _ in blocks)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()

    def info(_: Any) -> tuple[int, int]:
        made.asked += 1
        return made.free, TOTAL

    cuda = torch.cuda
    monkeypatch.setattr(cuda, "mem_get_info", info)
    monkeypatch.setattr(cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(cuda, "memory_reserved", lambda _: made.reserved)
    monkeypatch.setattr(cuda, "memory_snapshot", lambda: made.segments)
    monkeypatch.setattr(cuda, "get_device_name", lambda _: "a card")
    monkeypatch.setattr(memory_ledger, "_pcie_bytes", lambda worker: 0)
    monkeypatch.setattr(workspace, "_manager", None)
    return made


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(64, 64, bias=False)
        self.scratch = [torch.zeros(128)]


class Runner:
    """A runner of vLLM, as far as the ledger goes through one."""

    __module__ = "vllm.v1.worker.stand_in"

    def __init__(self) -> None:
        self.model, self.kv_caches = Model(), [torch.zeros(1024), torch.zeros(1024)]
        self.input_ids = torch.zeros(256)
        self.elsewhere = SimpleNamespace(hidden=torch.zeros(512))

    def get_model(self) -> Model:
        return self.model


@pytest.fixture
def worker(device: Device) -> Any:
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={}))
    return SimpleNamespace(device=CPU, rank=3, model_runner=Runner(), vllm_config=config)


def at(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def regions(found: dict[str, Any]) -> dict[str, int]:
    return {one["name"]: one["bytes"] for one in found["regions"]}


@pytest.fixture
def full(device: Device, worker: Any) -> dict[str, Any]:
    """A device with a block of every kind."""
    runner = worker.model_runner
    worker.neaptide_marks = {"process": Reading(700 * MIB, 0), "end": Reading(0, 0)}
    blocks = {
        runner.model.linear.weight: 5, runner.kv_caches[0]: 300, runner.kv_caches[1]: 301, runner.input_ids: 7,
        runner.model.scratch[0]: 11, runner.elsewhere.hidden: 70,
    }  # fmt: skip
    for tensor, size in blocks.items():
        device.add([(at(tensor), size * MIB, "active_allocated"), (0, 13 * MIB, "inactive")])
    device.add([(1 << 50, 90 * MIB, "active_allocated"), (0, 17 * MIB, "inactive")], pool=(0, 1))
    device.free = TOTAL - 900 * MIB - device.reserved
    worker.neaptide_marks["end"] = memory_ledger.reading(CPU)
    return memory_ledger.ledger(worker)


def test_regions_free_memory_and_residue_are_the_device(full: dict[str, Any]) -> None:
    assert sum(regions(full).values()) + full["free_bytes"] + full["residue_bytes"] == full["total_bytes"] == TOTAL
    assert full["residue_bytes"] == 0
    assert full["residue_share"] == 0


def test_every_block_is_in_one_region(full: dict[str, Any]) -> None:
    assert regions(full) == {
        "KV cache": 601 * MIB, "weights": 5 * MIB, "buffers of the runner": 7 * MIB, "tensors of layers": 11 * MIB,
        "other tensors": 70 * MIB, "graphs: tensors of their pools": 90 * MIB,
        "graphs: free blocks of their pools": 17 * MIB, "allocator: free blocks": 6 * 13 * MIB,
        PHASES["process"]: 700 * MIB, PHASES["end"]: 200 * MIB,
    }  # fmt: skip


def test_large_blocks_have_names_and_one_without_is_told(full: dict[str, Any]) -> None:
    """What a namespace of nobody's holds is reached by no path."""
    assert [(one["name"], one["bytes"] // MIB) for one in full["large_blocks"]] == [
        ("kv_caches[1]", 301), ("kv_caches[0]", 300), ("graphs: tensors of their pools", 90), ("other tensors", 70),
    ]  # fmt: skip
    assert [one["bytes"] // MIB for one in full["large_blocks"] if not one["named"]] == [70]


def test_what_nobody_accounts_for_is_residue(device: Device, worker: Any) -> None:
    worker.neaptide_marks = {"process": Reading(100 * MIB, 0), "end": Reading(100 * MIB, 0)}
    device.free = TOTAL - 150 * MIB
    found = memory_ledger.ledger(worker)
    assert found["residue_bytes"] == 50 * MIB
    assert found["residue_share"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("forgotten", [False, True])
def test_blocks_that_are_missed_or_counted_twice_are_residue(forgotten: bool, device: Device, worker: Any) -> None:
    """The allocator's total is not the sum of its blocks."""
    device.add([(1 << 40, 40 * MIB, "active_allocated")])
    device.free = TOTAL - device.reserved
    worker.neaptide_marks = {"end": memory_ledger.reading(CPU)}
    device.segments = [] if forgotten else 2 * device.segments
    assert memory_ledger.ledger(worker)["residue_bytes"] == (40 if forgotten else -40) * MIB


def test_the_shortest_path_counts() -> None:
    """What a long way reaches just before its end is gone through from a short one."""
    shared = [[torch.zeros(4)]]
    way: Any = shared
    for _ in range(memory_ledger.DEEP - 2):
        way = [way]
    found = list(memory_ledger.tensors_of([[shared], way], "root", set()))
    assert [path for path, _ in found] == ["root[0][0][0][0]"]


def test_what_lies_too_deep_is_found_from_elsewhere() -> None:
    end = {"tensor": torch.zeros(4)}
    way: Any = end
    for _ in range(memory_ledger.DEEP):
        way = [way]
    seen: set[int] = set()
    assert list(memory_ledger.tensors_of(way, "long", seen)) == []
    assert [path for path, _ in memory_ledger.tensors_of(end, "short", seen)] == ["short[tensor]"]


def test_memory_outside_of_torch_by_phase() -> None:
    marks = {
        "process": Reading(500, 0), "communicators": Reading(900, 100), "profile": Reading(2000, 1300),
        "end": Reading(3000, 2200),
    }  # fmt: skip
    found = memory_ledger.outside(marks)
    assert found == {
        PHASES["process"]: 500, PHASES["communicators"]: 300, PHASES["profile"]: -100, PHASES["end"]: 100,
    }  # fmt: skip
    assert sum(found.values()) == marks["end"].outside_bytes


def test_a_block_of_two_owners_counts_once(device: Device, worker: Any) -> None:
    worker.neaptide_marks = {"end": Reading(0, 0)}
    runner = worker.model_runner
    runner.again = runner.model.linear.weight
    device.add([(at(runner.again), 9 * MIB, "active_allocated")])
    device.free = TOTAL - device.reserved
    assert regions(memory_ledger.ledger(worker)) == {"weights": 9 * MIB}


def test_the_draft_models_weights(device: Device, worker: Any) -> None:
    runner = worker.model_runner
    runner.speculator = SimpleNamespace(model=Model())
    device.add([(at(runner.speculator.model.linear.weight), MIB, "active_allocated")])
    assert memory_ledger.attributed(worker, memory_ledger.blocks_in_use(CPU)[0])[0] == {"weights": MIB}


def test_without_the_variable_nothing_is_asked(device: Device, worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_NEAPTIDE_LEDGER_FILE", raising=False)
    memory_ledger.mark(worker, "process")
    assert memory_ledger.written(worker, "times") == "times"
    assert device.asked == 0
    assert "neaptide_marks" not in vars(worker)


def test_the_file(device: Device, worker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_NEAPTIDE_LEDGER_FILE", str(tmp_path / "ledger"))
    device.free = TOTAL - 10 * MIB
    memory_ledger.mark(worker, "process")
    device.free -= 5 * MIB
    assert memory_ledger.written(worker, "times") == "times"
    found = json.loads((tmp_path / "ledger.rank3.json").read_text())
    assert regions(found) == {PHASES["process"]: 10 * MIB, PHASES["end"]: 5 * MIB}
    assert [path.name for path in tmp_path.iterdir()] == ["ledger.rank3.json"]


def test_rank_0_writes_the_configuration_too(
    device: Device, worker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_NEAPTIDE_LEDGER_FILE", str(tmp_path / "ledger"))
    given: list[int] = []
    monkeypatch.setattr(memory_ledger, "configuration", lambda _, size: given.append(size) or {"kv": size})
    worker.rank = 0
    device.add([(at(worker.model_runner.kv_caches[0]), 30 * MIB, "active_allocated")])
    assert memory_ledger.written(worker, "times") == "times"
    assert json.loads((tmp_path / "ledger.config.json").read_text()) == {"kv": 30 * MIB}
    assert given == [30 * MIB]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ledger.config.json", "ledger.rank0.json"]


def test_an_engine_whose_configuration_is_another_serves_all_the_same(
    device: Device, worker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_NEAPTIDE_LEDGER_FILE", str(tmp_path / "ledger"))
    worker.rank = 0
    assert memory_ledger.written(worker, "times") == "times"
    assert [path.name for path in tmp_path.iterdir()] == ["ledger.rank0.json"]


def test_the_first_mark_of_a_phase_counts(device: Device, worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine may be profiled again."""
    monkeypatch.setenv("VLLM_NEAPTIDE_LEDGER_FILE", "ledger")
    for free in (50, 40):
        device.free = free
        memory_ledger.mark(worker, "profile")
    assert worker.neaptide_marks["profile"].used_bytes == TOTAL - 50


def test_a_folder_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import envs

    monkeypatch.setenv("VLLM_NEAPTIDE_LEDGER_FILE", "/nowhere/ledger")
    with pytest.raises(ValueError, match="VLLM_NEAPTIDE_LEDGER_FILE is '/nowhere/ledger', wanted a file in a folder"):
        _ = envs.VLLM_NEAPTIDE_LEDGER_FILE


class Ended(Exception):
    """A worker's method went on behind its mark."""


class Bare:
    def __getattr__(self, name: str) -> Any:
        raise Ended(name)


@pytest.mark.parametrize(
    ("method", "phase", "arguments"),
    [
        ("load_model", "communicators", ()),
        ("determine_available_memory", "weights", ()),
        ("initialize_from_config", "profile", (Bare(),)),
        ("compile_or_warm_up_model", "kv cache", ()),
    ],
)
def test_upstreams_worker_marks_before_it_begins(
    method: str, phase: str, arguments: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(gpu_worker, "mark_memory", lambda worker, phase: told.append(phase))
    called = getattr(gpu_worker.Worker, method)
    with pytest.raises(Ended):
        getattr(called, "__wrapped__", called)(Bare(), *arguments)
    assert told == [phase]


@pytest.mark.parametrize("second_runner", [False, True])
def test_upstreams_worker_writes_at_its_end(second_runner: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from contextlib import nullcontext

    told: list[Any] = []
    monkeypatch.setattr(gpu_worker, "mark_memory", lambda *_: None)
    monkeypatch.setattr(gpu_worker, "with_memory_ledger", lambda worker, result: told.append(result) or result)
    worker = SimpleNamespace(
        use_v2_model_runner=second_runner, _compile_or_warm_up_model=lambda: "times",
        model_runner=SimpleNamespace(eplb=SimpleNamespace(suppress=nullcontext)),
    )  # fmt: skip
    assert gpu_worker.Worker.compile_or_warm_up_model(worker) == "times"
    assert told == ["times"]
