"""Split counts and their bytes, against FlashAttention's own device-side choice, and the call that gets them."""

from __future__ import annotations

import importlib
import math
import random
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

MIB = 1 << 20


def splits() -> Any:
    return importlib.import_module("vllm.v1.attention.backends.mla.fa3_splits")


def case(heads: int = 64, keys: int = 2048, multiprocessors: int = 132, width: int = 512) -> Any:
    return splits().SplitCase(heads, width, keys, multiprocessors)


def chosen_on_the_device(of: Any, keys: list[int], bound: int) -> list[int]:
    """Splits of each row, as the scheduler kernel chooses them in single precision from all rows' work."""
    single = torch.tensor(1.0, dtype=torch.float32)
    blocks = [-(-n // of.tile[1]) for n in keys]
    work = single * (of.row_blocks * sum(blocks)) * torch.tensor(1.1, dtype=torch.float32)
    each = math.ceil(float(work / of.multiprocessors))
    return [1 if bound == 1 or each == 0 else max(min(-(-n // each), bound), 1) for n in blocks]


def test_what_was_measured_at_912_rows() -> None:
    of = case()
    assert splits().upstream_splits(of, 912) == 28
    assert of.bytes_of(912, 28) - 28 * 912 * 64 * 4 == 3_347_054_592


@pytest.mark.parametrize(("rows", "keys", "count"), [(992, 2048, 28), (993, 2048, 1), (1, 256, 1), (1, 320, 5)])
def test_upstreams_count(rows: int, keys: int, count: int) -> None:
    assert splits().upstream_splits(case(keys=keys), rows) == count


@pytest.mark.parametrize("heads", [16, 64, 128])
def test_no_row_wants_more_than_its_own_splits(heads: int) -> None:
    """Batches with a key in every row, among them the worst: one long row, all others of one block."""
    rng, of, reached = random.Random(heads), case(heads), 0
    for _ in range(600):
        rows = rng.randint(1, 992)
        longest = rng.choice([1, 64, rng.randint(1, 2048)])
        keys = [2048] + [rng.randint(1, longest) for _ in range(rows - 1)]
        own, upstream = splits().own_splits(of, rows), splits().upstream_splits(of, rows)
        wanted = chosen_on_the_device(of, keys, upstream)
        assert max(wanted) <= own <= upstream
        reached += max(wanted) == own
        within = splits().splits_within(of, rows, splits().exact_budget(of, 992))
        assert chosen_on_the_device(of, keys, within) == wanted
    assert reached > 100


@pytest.mark.parametrize("budget", [1, 64 * MIB, 512 * MIB, 520 * MIB, 4096 * MIB])
def test_no_call_is_over_the_budget_and_the_profile_holds_the_largest(budget: int) -> None:
    of, largest = case(), 0
    for rows in range(1, 1100):
        count = splits().splits_within(of, rows, budget)
        assert 1 <= count <= splits().upstream_splits(of, rows)
        assert of.bytes_of(rows, count) <= budget
        # One more would not fit, unless it is more than upstream's.
        assert count == splits().upstream_splits(of, rows) or of.bytes_of(rows, count + 1) > budget
        largest = max(largest, of.bytes_of(rows, count))
    assert splits().most_bytes(of, 3072, budget) == largest
    assert splits().most_bytes(of, 3072, 0) == of.bytes_of(992, 28)


def test_the_budget_that_never_reorders_sums() -> None:
    assert splits().exact_budget(case(), 3072) == case().bytes_of(689, 6)
    assert 517 * MIB < splits().exact_budget(case(), 3072) < 518 * MIB


def load_backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The backend's module, past FlashAttention's extensions where they are not built."""
    package = "vllm.vllm_flash_attn"
    interface = ModuleType(f"{package}.flash_attn_interface")
    interface.flash_attn_varlen_func = None  # type: ignore[attr-defined]
    if not torch.cuda.is_available():
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
        monkeypatch.setitem(sys.modules, interface.__name__, interface)
    return importlib.import_module("vllm.v1.attention.backends.mla.flashattn_mla_sparse")


def an_impl(monkeypatch: pytest.MonkeyPatch, budget: int | None, capturing: bool = False) -> tuple[Any, dict[str, Any]]:
    backend = load_backend(monkeypatch)
    seen: dict[str, Any] = {}

    def call(**options: Any) -> torch.Tensor:
        seen.update(options)
        return options["q_v"]

    monkeypatch.setattr(backend, "flash_attn_varlen_func", call)
    monkeypatch.setattr(splits(), "split_case", lambda impl: case())
    monkeypatch.setattr(splits(), "set_budget", lambda: budget)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    impl = object.__new__(backend.FlashAttnMLASparseImpl)
    # Stands for a buffer on a GPU.
    impl.topk_indices_buffer = SimpleNamespace(is_cuda=True, shape=(3072, 2048))
    impl.kv_lora_rank, impl.qk_rope_head_dim, impl.scale = 512, 64, 1.0
    impl.cu_seqlens_q_buffer = torch.arange(3073)
    return impl, seen


@pytest.mark.parametrize(
    ("rows", "budget", "count"), [(100, 512 * MIB, 0), (912, 512 * MIB, 4), (912, 0, 0), (2000, MIB, 0), (912, MIB, 1)]
)
def test_the_call_gets_the_count(monkeypatch: pytest.MonkeyPatch, rows: int, budget: int, count: int) -> None:
    impl, seen = an_impl(monkeypatch, budget)
    query = (torch.empty(rows, 64, 512, device="meta"), torch.empty(rows, 64, 64, device="meta"))
    indices, counts = torch.empty(rows, 2048, device="meta"), torch.empty(rows, device="meta")
    cache = torch.empty(4, 64, 576, device="meta")
    impl._forward_mqa_kernel(query, cache, indices, counts, layer=None, block_size=64, is_decode=False)
    assert seen["num_splits"] == count
    assert impl.mqa_scratch(3072) == (splits().most_bytes(case(), 3072, budget), 992)


@pytest.mark.parametrize(("capturing", "count"), [(False, 4), (True, 0)])
def test_the_default_changes_no_bit(monkeypatch: pytest.MonkeyPatch, capturing: bool, count: int) -> None:
    """Eager calls have as many splits as their rows can come to; padding of a captured call is no work: upstream's."""
    impl, _ = an_impl(monkeypatch, None, capturing)
    assert splits().bounded_splits(impl, 912) == count
    assert count == 0 or count >= splits().own_splits(case(), 912)
    assert impl.mqa_scratch(3072) == (splits().exact_budget(case(), 992), 992)


def test_a_budget_that_is_set_holds_in_captures_too(monkeypatch: pytest.MonkeyPatch) -> None:
    impl, _ = an_impl(monkeypatch, MIB, capturing=True)
    assert splits().bounded_splits(impl, 912) == 1


def test_nothing_off_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    impl, _ = an_impl(monkeypatch, 512 * MIB)
    impl.topk_indices_buffer = torch.empty(8, 2048)
    assert splits().bounded_splits(impl, 912) == 0
    assert impl.mqa_scratch(3072) == (0, 0)


@pytest.mark.parametrize("keys", [2048, 4096, 8192])
@pytest.mark.parametrize("rows", [1, 64, 400, 912])
def test_the_default_stays_with_upstreams_combine(keys: int, rows: int) -> None:
    """It has kernels for up to 32, 64 and 128 splits; another one would be another order of sums."""
    of = case(keys=keys)
    wanted, own = splits().upstream_splits(of, rows), splits().own_splits(of, rows)
    assert [count > 32 for count in (own, wanted)] in ([False] * 2, [True] * 2)
    assert [count > 64 for count in (own, wanted)] in ([False] * 2, [True] * 2)
