"""The launchers of a prepared indexer plan compile for sm_120a, and calls that fold or carry find each of them.

No GPU is needed: b12x 1.5 compiles in workers that see none, from a description of the device. This file, run as a
program on a tree, makes itself such a worker, describes and compiles a plan's job as a session does, and then runs
calls of it on tensors without storage, so that every launcher is looked up and none is launched.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import pickle
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from real import Trees, run_python

NEEDED = ("torch", "cutlass", "triton")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
PAGE, HEADS, TOPK, DIM = 64, 32, 2048, 128
# What a worker for an RTX PRO 6000 is told: capability, id, name, SMs, shared memory of a block and of an SM.
DEVICE = ((12, 0), "GPU-0", "sm_120", 188, 101_376, 102_400)
MOST_PAGES = 12_000


@dataclass(frozen=True)
class Case:
    """A plan and calls of it.

    Attributes:
        folds: live rows whose calls fold; a prefill plan has room for the candidates of a few.
        plan_bytes: its budget.
        pages: of a supertile.
        launches: of all rows.
    """

    rows: int
    mode: str
    folds: Sequence[int]
    scores: bool = False
    physical: bool = False
    plan_bytes: int = 0
    pages: int = 512
    launches: int = 1


FEW_ROWS = 5
CASES = {
    "decode": Case(48, "decode", folds=(48, FEW_ROWS), scores=True),
    "decode, indices only": Case(64, "decode", folds=(64, FEW_ROWS)),
    "decode, physical slots": Case(48, "decode", folds=(), physical=True),
    "prefill": Case(400, "prefill", folds=(FEW_ROWS,)),
    "prefill in chunks": Case(
        3072, "prefill", folds=(FEW_ROWS,), scores=True, plan_bytes=192 << 20, pages=256, launches=2
    ),
}
# Pages of calls: 47, 32, 3 and 2 slices, and one below a fold.
WIDTHS = (MOST_PAGES, 8192, 520, 512, 100)


@pytest.fixture(scope="module")
def found(trees: dict[str, Trees], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each case compiled and looked up."""
    if MISSING:
        pytest.skip(f"not installed beside this Python: {', '.join(MISSING)}")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("B12X_COMPILE_CACHE_DIR", "TRITON_CACHE_DIR"):
            patch.setenv(name, str(tmp_path_factory.mktemp("compiled")))
        patch.delenv("B12X_INDEXER_TWO_LEVEL_FOLD", raising=False)
        done = run_python(
            [__file__, json.dumps({name: asdict(case) for name, case in CASES.items()})],
            trees["current"].patched / "b12x",
        )
    said = [line for line in done.stdout.splitlines() if line.startswith("said")]
    assert len(said) == 1, done.stdout[-2000:] + done.stderr[-5000:]
    result: dict[str, Any] = json.loads(said[0].removeprefix("said"))
    return result


@pytest.mark.parametrize("name", CASES)
def test_every_program_is_compiled_for_the_device(name: str, found: dict[str, Any]) -> None:
    assert found[name]["objects"]
    assert set(found[name]["objects"].values()) == {True}


@pytest.mark.parametrize("name", CASES)
def test_a_fold_of_any_width_finds_its_launchers(name: str, found: dict[str, Any]) -> None:
    """Launches of the selections by width; the row launch is the last pass of a fold."""
    case = CASES[name]
    for call, launches in found[name]["calls"].items():
        rows, width = map(int, call.split("x"))
        folds = width >= 512 and rows in case.folds
        launched = case.launches if rows == case.rows else 1
        assert launches == {"tiled": launched * -(-width // case.pages), "row": int(folds)}, call


@pytest.mark.parametrize("name", CASES)
def test_launchers_of_a_fold_are_gathered_where_a_call_can_fold(name: str, found: dict[str, Any]) -> None:
    keys, case = [tuple(key) for key in found[name]["keys"]], CASES[name]
    splits = ("tiled", True, False, 2, True)
    # A supertile of 256 pages is one slice.
    assert (splits in keys) == (not case.physical and case.pages > 256)
    assert case.physical or ("row", True, case.scores) in keys


def become_worker() -> None:
    """Make this process one of b12x's compile workers."""
    from b12x._lib import compile_pool

    compile_pool._initialize_worker(0, *DEVICE, multiprocessing.Array("i", 2))


def operand(dtype: str, *shape: int, shared: bool = False) -> dict[str, Any]:
    """The description of a contiguous tensor; of one row for all with ``shared``."""
    strides = [1]
    for size in shape[:0:-1]:
        strides.insert(0, strides[0] * size)
    if shared:
        strides[0] = 0
    return {"shape": shape, "strides": tuple(strides), "dtype": dtype, "alignment": 16}


def operands_of(case: Case, rows: int, width: int) -> dict[str, Any]:
    """The tensors of a call of ``rows`` over ``width`` pages."""
    return {
        "q_fp8": operand("float8_e4m3fn", rows, HEADS, DIM),
        "query_weights": operand("float32", rows, HEADS),
        "index_k_cache": operand("uint8", 1, PAGE * (DIM + 4)),
        "page_table": operand("int32", rows, width, shared=case.mode == "prefill"),
        "cache_lengths": operand("int32", rows),
        "active_width": operand("int32", 1),
        "output_indices": operand("int32", rows, TOPK),
        "output_scores": operand("float32", rows, TOPK) if case.scores else None,
    }


def try_case(case: Case) -> dict[str, Any]:
    from b12x._lib import compile_plan, compile_pool, compiler
    from b12x.attention.dsa_indexer import _preparation, api
    from b12x.attention.dsa_indexer._tuning import DsaIndexerConfig
    from b12x.attention.dsa_indexer.plan_budget import Budget

    caps = api.Caps(
        device="cuda:0", num_q_heads=HEADS, max_q_rows=case.rows, max_page_table_width=MOST_PAGES, topk=TOPK,
        mode=case.mode, output_index_space="physical" if case.physical else "logical",
        plan_budget=Budget(case.plan_bytes),
    )  # fmt: skip
    invocation = api.invocation_from_descriptors(caps, operands=operands_of(case, case.rows, MOST_PAGES))
    plan, config = api.plan(caps, invocation=invocation), DsaIndexerConfig(backend="native")
    (job,) = plan._compile_jobs(config, SimpleNamespace(ordinal=0))
    programs = compile_pool.describe_compilation(job).programs
    compile_plan.evict_planning_artifacts(programs)
    # Raises if the programs are others than described, or if CUDA was asked for.
    compile_pool._run_job(pickle.dumps(job), programs)
    launchers = _preparation.compile_indexer(*job.args)
    layout = _preparation.plan_indexer_scratch(
        _preparation._scratch_caps(plan.query, device=caps.device, config=config), fused_merge=config.fused_merge
    )
    state = _preparation._DsaIndexerState(layout, config, launchers)
    files = [Path(compiler._cache_object_path(program.key)) for program in programs if program.dialect == "cute"]
    return {
        "objects": {path.name: b"sm_120a" in path.read_bytes() for path in files},
        "keys": list(launchers["tiled"]),
        "calls": {
            f"{rows}x{width}": launches_of(state, case, rows, width)
            for rows in (case.rows, FEW_ROWS)
            for width in WIDTHS
        },
    }


class NotLaunched:
    """In the place of Triton's gather, which asks for a driver even before it is launched."""

    def __getitem__(self, grid: object) -> Any:
        return lambda *args: None


def launches_of(state: Any, case: Case, rows: int, width: int) -> dict[str, int]:
    """Launches of each selection in a call, on tensors without storage."""
    import torch
    from b12x._lib.compile_plan import compile_only_launches
    from b12x.attention.dsa_indexer import _preparation, paged
    from torch._subclasses.fake_tensor import FakeTensorMode

    counts, shared = {"tiled": 0, "row": 0}, case.mode == "prefill"
    launchers = {**state.launchers, "gather": NotLaunched()} if shared else state.launchers

    def counted(kind: str, selection: Any) -> Any:
        def run(**given: Any) -> Any:
            counts[kind] += 1
            # The plan's own, so nothing is compiled on the way.
            assert given["launcher"] is state.launchers["tiled"]
            return selection(**given)

        return run

    with FakeTensorMode(), compile_only_launches(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "launchers", launchers)
        patch.setattr(paged, "run_tiled_topk", counted("tiled", paged.run_tiled_topk))
        patch.setattr(paged, "run_row_topk", counted("row", paged.run_row_topk))
        given = operands_of(case, rows, width)
        made = {name: _preparation._fake(one, torch.device("cuda", 0)) for name, one in given.items()}
        (spec,) = state.layout.scratch_specs()
        binding = state.bind(
            scratch=torch.empty(spec.shape, dtype=torch.uint8, device="cuda:0"),
            real_page_table=made.pop("page_table"),
            cache_seqlens_int32=made.pop("cache_lengths"),
            active_width=made.pop("active_width"),
            expected_num_q_heads=HEADS,
            shared_page_table=shared,
            output_physical_slots=case.physical,
            _initialize=False,
        )
        state.run(binding, **made)
    return counts


if __name__ == "__main__":
    become_worker()
    print("said" + json.dumps({name: try_case(Case(**case)) for name, case in json.loads(sys.argv[1]).items()}))
