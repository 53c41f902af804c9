"""Profiles of the ledger: fields, what is refused, the template, and dumps of vLLM's configuration."""

from __future__ import annotations

import importlib.util
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from neaptide.cli import main
from neaptide.errors import NeaptideError
from neaptide.ledger.fields import FIELDS
from neaptide.ledger.profiles import Profile, checked, load_profile
from neaptide.ledger.template import template

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("gate", "turnkey", "v41-flash-ep4", "spark-glm53")
DUMP: dict[str, Any] = {
    "use_v2_model_runner": True,
    "model_config": {
        "architecture": "GlmMoeDsaForCausalLM", "max_model_len": 262144,
        "hf_text_config": {
            "hidden_size": 5120, "num_attention_heads": 96, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
            "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048, "num_hidden_layers": 78,
        },
    },
    "parallel_config": {
        "tensor_parallel_size": 4, "decode_context_parallel_size": 2, "dcp_comm_backend": "a2a",
        "dcp_q_replicate": True,
    },
    "scheduler_config": {"max_num_seqs": 16, "max_num_batched_tokens": 4096},
    "speculative_config": {"num_speculative_tokens": 3, "method": "mtp"},
    "compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE", "max_cudagraph_capture_size": 128},
    "cache_config": {"cache_dtype": "fp8_ds_mla"},
    "attention_config": {"backend": "FLASHMLA_SPARSE", "sparse_mla_prefill_workspace_factor": 5},
    "kv_cache": {"bytes": 57_381_225_881, "tokens": 3_998_134},
    "device": {"capability": [12, 0], "multiprocessors": 188},
}  # fmt: skip


def values(**changes: Any) -> dict[str, Any]:
    """Fields of a sound profile; None takes one away."""
    given = tomllib.loads((ROOT / "profiles" / "turnkey.toml").read_text()) | {"name": "x"} | changes
    return {name: value for name, value in given.items() if value is not None}


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_profile_loads_and_is_described(name: str) -> None:
    profile = load_profile(ROOT, name)
    assert profile.name == name
    assert profile.description


def test_the_shipped_profiles_are_the_seeds() -> None:
    gate, turnkey, v41, spark = (load_profile(ROOT, name) for name in NAMES)
    seen = [(p.runner, p.tensor_parallel, p.decode_context_parallel, p.max_num_seqs) for p in (gate, turnkey)]
    assert seen == [("v2", 4, 4, 1), ("v1", 4, 2, 8)]
    assert (gate.speculative_tokens, turnkey.speculative_tokens) == (3, 5)
    assert gate.max_num_batched_tokens == turnkey.max_num_batched_tokens == 3072
    assert turnkey.kv_bytes_per_token == 14352
    assert (v41.max_num_seqs, v41.max_model_len, v41.speculative_tokens) == (256, 1048576, 5)
    assert (spark.max_model_len // spark.index_compress_ratio, spark.chunk_tokens) == (51200, 4608)


def test_what_follows_from_the_fields() -> None:
    gate, turnkey = load_profile(ROOT, "gate"), load_profile(ROOT, "turnkey")
    assert (gate.exchanged_heads, turnkey.exchanged_heads) == (96, 48)
    assert turnkey.widest_all_reduce == 36 << 20
    assert turnkey.query_head_dim == 576
    assert load_profile(ROOT, "turnkey", ["ring_bytes=1024"]).widest_all_reduce == 1024
    assert load_profile(ROOT, "turnkey", ["engine=fork", "speculative_method=eagle"]).engine == "fork"


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ("pcie_collectives=1", "1"), ("speculative_method=3", "3"), ("description=true", "true"),
        ("attention_backend=1.5", "1.5"), ("ring=true", True), ("max_num_seqs=0x10", 16), ("ring_wire_mode=0", "0"),
    ],
)  # fmt: skip
def test_a_changed_value_is_read_by_the_kind_of_its_field(change: str, value: Any) -> None:
    """A text needs no quotes, and looks like a number if it likes."""
    assert getattr(load_profile(ROOT, "turnkey", [change]), change.partition("=")[0]) == value


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"attention_heads": 90}, "attention_heads is 90; wanted a multiple of the 4 ranks of tensor_parallel"),
        ({"max_num_batched_tokens": 0}, "Expected `int` >= 1 - at `$.max_num_batched_tokens`"),
        ({"max_model_len": 0}, "Expected `int` >= 1 - at `$.max_model_len`"),
        ({"runner": "v3"}, "Invalid enum value 'v3' - at `$.runner`"),
        ({"decode_context_parallel": 3}, "decode_context_parallel is 3; wanted a divisor of tensor_parallel, 4"),
        ({"index_compress_ratio": 3}, "index_compress_ratio is 3; wanted a divisor of 524288"),
        ({"prefill_chunk_tokens": 4096}, "prefill_chunk_tokens is 4096; wanted 3072 or less"),
        ({"engine": "fork", "pcie_collectives": "1"}, "pcie_collectives is 1; wanted 0"),
        ({"kv_bytes_per_token": None}, "missing required field `kv_bytes_per_token`"),
        ({"heads": 3}, "unknown field `heads`"),
        ({"max_model_len": 99_999_999_999}, "Expected `int` <= 67108864 - at `$.max_model_len`"),
        ({"max_num_seqs": "8"}, "Expected `int`, got `str` - at `$.max_num_seqs`"),
    ],
)
def test_a_wrong_profile_is_refused_by_the_name_of_its_field(changes: dict[str, Any], found: str) -> None:
    with pytest.raises(NeaptideError, match=re.escape(found)) as error:
        checked(values(**changes), "x.toml")
    assert error.value.code == 2
    assert error.value.where == "x.toml"


def test_no_such_profile_and_no_toml(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger", "nowhere", "--root", str(ROOT)]) == 2
    assert "no profile 'nowhere'; wanted one of gate, spark-glm53, turnkey, v41-flash-ep4" in capsys.readouterr().err
    broken = tmp_path / "broken.toml"
    broken.write_text("runner = v1\n")
    assert main(["ledger", str(broken), "--root", str(ROOT)]) == 2
    assert str(broken) in capsys.readouterr().err


def test_every_field_is_documented() -> None:
    assert ["name", *FIELDS] == list(Profile.__struct_fields__)
    page = (ROOT / "docs" / "ledger.md").read_text()
    assert [name for name in FIELDS if f"`{name}`" not in page] == []


# neaptide profile init


def test_the_template_is_a_profile_with_every_field() -> None:
    text = template({})
    data = tomllib.loads(text)
    assert list(data) == list(FIELDS)
    assert checked({"name": "x", **data}, "x").runner == "v2"
    for field in FIELDS.values():
        assert f"# {field.meaning}\n" in text


def test_init_writes_to_stdout_or_a_new_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "init", "--root", str(ROOT)]) == 0
    assert tomllib.loads(capsys.readouterr().out)["tensor_parallel"] == 4
    path = tmp_path / "mine.toml"
    assert main(["profile", "init", "--root", str(ROOT), "--output", str(path)]) == 0
    assert load_profile(ROOT, str(path)).name == "mine"
    assert main(["profile", "init", "--root", str(ROOT), "--output", str(path)]) == 2
    assert "it exists; wanted a new file" in capsys.readouterr().err


def from_dump(dump: Any, folder: Path) -> tuple[int, Path]:
    source, path = folder / "dump.json", folder / "mine.toml"
    source.write_text(dump if isinstance(dump, str) else json.dumps(dump))
    code = main(["profile", "init", "--root", str(ROOT), "--from", str(source), "--output", str(path)])
    return code, path


def test_a_dump_fills_the_template(tmp_path: Path) -> None:
    code, path = from_dump(DUMP, tmp_path)
    assert code == 0
    profile = load_profile(ROOT, str(path))
    assert (profile.runner, profile.model, profile.architecture) == ("v2", "deepseek_v32", "sm120")
    assert (profile.attention_heads, profile.hidden_size, profile.index_layers) == (96, 5120, 78)
    assert (profile.decode_context_parallel, profile.dcp_comm_backend, profile.replicated_queries) == (2, "a2a", True)
    assert (profile.speculative_tokens, profile.full_graphs, profile.largest_capture_rows) == (3, True, 128)
    assert profile.kv_bytes_per_token == 14352
    assert profile.oneshot_kib == 84, "no dump has it"


def test_a_dump_without_speculation_or_graphs(tmp_path: Path) -> None:
    compilation = {"cudagraph_mode": "NONE", "max_cudagraph_capture_size": None}
    code, path = from_dump({**DUMP, "speculative_config": None, "compilation_config": compilation}, tmp_path)
    assert code == 0
    profile = load_profile(ROOT, str(path))
    assert (profile.speculative_tokens, profile.full_graphs, profile.largest_capture_rows) == (0, False, 0)


def test_an_engine_dumps_what_a_profile_is_made_from() -> None:
    pytest.importorskip("torch")
    path = ROOT / "overlay/vllm/v1/worker/configuration_dump.py"
    spec = importlib.util.spec_from_file_location("configuration_dump", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    own = {"kv_cache", "device.capability", "device.multiprocessors"}
    assert {field.dumped for field in FIELDS.values() if field.dumped} == {*module.PATHS, *own}


def test_the_page_has_every_path_of_a_dump() -> None:
    page = (ROOT / "docs" / "ledger.md").read_text()
    required, optional = page.split("By hand, required:")[1].split("Optional:")
    listed = [set(re.findall(r"`([a-z0-9_.]+)`", text)) for text in (required, optional.split("`kv_cache` is")[0])]
    for field in FIELDS.values():
        if field.dumped:
            assert field.dumped in listed[field.optional], field.dumped


@pytest.mark.parametrize(
    ("dump", "found"),
    [
        ({**DUMP, "device": {"capability": [12, 0]}}, "no device.multiprocessors, which multiprocessors is taken from"),
        ({k: v for k, v in DUMP.items() if k != "kv_cache"}, "no kv_cache, which kv_bytes_per_token is taken from"),
        ({**DUMP, "kv_cache": {"bytes": 3}}, "kv_cache is {\"bytes\": 3}, no kv_bytes_per_token"),
        ({**DUMP, "device": {"capability": [7], "multiprocessors": 1}}, "device.capability is [7], no architecture"),
        ({**DUMP, "scheduler_config": {"max_num_seqs": 0, "max_num_batched_tokens": 1}}, "at `$.max_num_seqs`"),
        ({**DUMP, "model_config": {**DUMP["model_config"], "architecture": 3}}, "model_config.architecture is 3, no"),
        ({**DUMP, "kv_cache": {"bytes": float("inf"), "tokens": 1}}, "no kv_bytes_per_token"),
        ({**DUMP, "use_v2_model_runner": []}, "use_v2_model_runner is [], no runner"),
        ({**DUMP, "device": {"capability": 12, "multiprocessors": 1}}, "device.capability is 12, no architecture"),
        ({**DUMP, "compilation_config": {"cudagraph_mode": "FOO", "max_cudagraph_capture_size": 1}},
         "compilation_config.cudagraph_mode is \"FOO\", no full_graphs"),
        ("{", "no JSON"),
        ("[]", "a list; wanted the form of docs/ledger.md"),
    ],
)  # fmt: skip
def test_a_wrong_dump_is_one_error(dump: Any, found: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, path = from_dump(dump, tmp_path)
    said = capsys.readouterr().err
    assert code == 2
    assert said.count("error:") == 1
    assert found in said
    assert not path.exists()


def test_every_path_of_a_dump_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Taking any required value away is an error that names its path."""
    required = [field.dumped for field in FIELDS.values() if field.dumped and not field.optional]
    assert len(required) > 20
    for path in required:
        dump = json.loads(json.dumps(DUMP))
        *parts, last = path.split(".")
        inner = dump
        for part in parts:
            inner = inner[part]
        del inner[last]
        assert from_dump(dump, tmp_path)[0] == 2
        assert f"no {path}, which" in capsys.readouterr().err
