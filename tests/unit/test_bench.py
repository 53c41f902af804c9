"""The engine bench without an engine: views, choices, bisection, and what it makes of results."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from neaptide.bench.child import engine_arguments
from neaptide.bench.engine import Bench, check_model, choose_scenarios, highest, outcome_code
from neaptide.bench.models import MODELS, write_model
from neaptide.bench.results import growth, table_rows, without_steps
from neaptide.bench.scenarios import SCENARIOS
from neaptide.bench.view import make_view
from neaptide.cli import main
from neaptide.errors import NeaptideError
from neaptide.output import Progress
from toy import write_files

ROOT = Path(__file__).resolve().parents[2]
FILES = {"__init__.py": "", "a.py": "A = 1\n", "deep/__init__.py": "", "deep/b.py": "B = 1\n", "other/c.py": "C = 1\n"}


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_view_is_the_package_but_for_the_changed_files(tmp_path: Path) -> None:
    package = tmp_path / "site" / "toy"
    write_files(package, FILES)
    before = contents(package)
    view = make_view(package, {"deep/b.py": b"B = 2\n", "new/d.py": b"D = 1\n"}, tmp_path / "view")
    assert contents(view)["deep/b.py"] == b"B = 2\n"
    assert contents(view)["new/d.py"] == b"D = 1\n"
    assert contents(view)["a.py"] == before["a.py"]
    assert (view / "other").is_symlink()
    assert (view / "other/c.py").read_bytes() == before["other/c.py"]
    assert contents(package) == before


@pytest.mark.parametrize("limit", [None, 0, 3, 9, 10])
def test_bisection_finds_the_last_that_survives(limit: int | None) -> None:
    tried: list[int] = []

    def survives(step: int) -> bool:
        tried.append(step)
        return limit is not None and step <= limit

    assert highest(survives, 0, 10) == limit
    assert len(tried) <= 4


@pytest.mark.parametrize("name", ["graphs-64-sizes", "graphs-64-sizes-v1"])
def test_a_scenario_with_64_capture_sizes_has_64(name: str) -> None:
    spec = {**SCENARIOS[name].as_dict(), "model_path": "model", "dummy_weights": True}
    sizes = engine_arguments(spec)["compilation_config"]["cudagraph_capture_sizes"]
    assert len(sizes) == len(set(sizes)) == SCENARIOS[name].capture_sizes == 64


def test_scenarios_are_of_known_models_and_fit() -> None:
    for scenario in SCENARIOS.values():
        assert scenario.model in MODELS
        for request in scenario.requests:
            assert request.prompt_tokens + request.output_tokens <= scenario.max_model_len
            assert request.count <= scenario.max_num_seqs
    assert [s.name for s in choose_scenarios([])] == list(SCENARIOS)


@pytest.mark.parametrize("name", MODELS)
def test_built_in_models_are_written_whole(name: str, tmp_path: Path) -> None:
    assert json.loads((write_model(name, tmp_path) / "config.json").read_text()) == MODELS[name]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--scenario", "nope"], "no scenario 'nope'"),
        (["--model", "/nowhere/model"], "no config.json"),
        (["--model", "deepseek-v32-tiny"], "built-in"),
        (["--python", "/nowhere/python"], "/nowhere/python"),
        ([], "vllm is not installed"),
    ],
)
def test_a_wrong_call_is_one_clear_error(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [p for p in sys.path if "site-packages" not in p])
    assert main(["bench", "engine", "--root", str(ROOT), *arguments]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert says in errors[0]


def test_a_hub_name_is_taken_as_it_is() -> None:
    assert check_model("org/model") == "org/model"
    assert check_model(None) is None


def test_a_missing_extension_is_named(tmp_path: Path) -> None:
    """An interpreter whose vLLM has no compiled extensions."""
    torch = "class cuda:\n    is_available = staticmethod(lambda: False)\n"
    write_files(tmp_path / "site", {"torch.py": torch, "vllm/__init__.py": ""})
    bench = Bench(Path(sys.executable), tmp_path / "site/vllm", tmp_path, Progress())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path / "site"))
        with pytest.raises(NeaptideError, match="_C_stable_libtorch"):
            bench.probe()
        write_files(tmp_path / "site/vllm", {f"{n}.py": "" for n in ("_C_stable_libtorch", "_moe_C_stable_libtorch")})
        write_files(tmp_path / "site/vllm", {"third_party/__init__.py": "", "third_party/deep_gemm.py": ""})
        with pytest.raises(NeaptideError, match="no CUDA device"):
            bench.probe()


def row(variant: str, reserved: list[int], outputs: str, seconds: float) -> dict[str, Any]:
    memory = [{"reserved_bytes": r, "cuda_mallocs": i} for i, r in enumerate(reserved)]
    return {
        "case": "one", "variant": variant, "outcome": "done", "boot": {"kv_tokens": 64, **memory[0]},
        "requests": [{"outputs": [outputs], "after": m} for m in memory[1:]], "steps": [{"seconds": seconds}] * 2,
    }  # fmt: skip


def test_rows_are_compared_with_upstream() -> None:
    rows = [row("upstream", [10**9, 3 * 10**9], "a", 1.0), row("patched", [10**9, 2 * 10**9], "b", 0.5)]
    rows.append({"case": "one", "variant": "tree", "outcome": "out-of-memory", "error": "CUDA out of memory"})
    table = table_rows(rows)
    assert growth(rows[1]) == [10**9]
    assert table[0][-2:] == ["same", "1.000"]
    assert table[1][4:] == ["+954", "1", "DIFFER", "0.500"]
    assert table[2][2:4] == ["out-of-memory", "CUDA out of memory"]
    assert without_steps(rows[0])["step_seconds"] == 2.0
    assert outcome_code(rows) == 0
    assert outcome_code([{"outcome": "failed"}]) == 1


def test_a_repeated_run_is_timed_against_its_own_turn_and_its_tokens_against_the_first() -> None:
    rows = [
        {**row("upstream", [10**9, 2 * 10**9], "a", 8.0), "repeat": 0},
        {**row("patched", [10**9, 2 * 10**9], "a", 4.0), "repeat": 0},
        {**row("upstream", [10**9, 2 * 10**9], "b", 2.0), "repeat": 1},
        {**row("patched", [10**9, 2 * 10**9], "a", 3.0), "repeat": 1},
    ]
    assert [line[-2:] for line in table_rows(rows)] == [
        ["same", "1.000"], ["same", "0.500"], ["DIFFER", "1.000"], ["same", "1.500"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "ooms", "wanted"),
    [
        ("CUDA out of memory. Tried to allocate 514.00 MiB", 0, True),
        ("No available memory for the cache blocks", 0, True),
        ("Free memory on device cuda:0 (1/2 GiB) on startup is less than desired", 0, True),
        # An extension of the stable ABI does not name the allocator's error.
        ('torch_call_dispatcher("aten::new_empty") API call failed', 1, True),
        ('torch_call_dispatcher("aten::new_empty") API call failed', 0, False),
    ],
)
def test_an_engine_that_ran_out_of_memory_is_known(
    text: str, ooms: int, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from neaptide.bench import child

    cuda = SimpleNamespace(is_available=lambda: True, memory_stats=lambda: {"num_ooms": ooms})
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert child.ran_out_of_memory(RuntimeError(text)) is wanted


def test_an_error_is_placed_without_source_text_or_machine_paths() -> None:
    """Neither upstream's lines nor a machine's folders may reach a result that is kept."""
    from neaptide.bench import child

    def fails() -> None:
        raise ValueError("a line of the source")

    try:
        fails()
    except ValueError as error:
        frames = child.frames_of(error)
    assert [re.sub(r":\d+ ", " ", f) for f in frames] == [
        "test_bench.py test_an_error_is_placed_without_source_text_or_machine_paths", "test_bench.py fails",
    ]  # fmt: skip
    said = "failed at /a/site-packages/torch/csrc/ops.h, line 9; see /b/vllm/a.py: 1.5/2.5 GiB"
    assert child.without_machine_paths(said) == "failed at torch/csrc/ops.h, line 9; see vllm/a.py: 1.5/2.5 GiB"


def test_no_kept_result_names_a_machines_folder() -> None:
    for path in (ROOT / "tests/bench/results").glob("*.json"):
        assert not re.search(r"/(tmp|opt|work|home|root|usr)/", path.read_text()), path.name
