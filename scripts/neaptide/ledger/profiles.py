"""Profiles: one rank of a deployment, as a TOML file of documented fields."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin

import msgspec
from msgspec import Meta, Struct

from neaptide.errors import NeaptideError

# No deployment has more of anything; a slip of the keyboard has, and would be computed for hours.
MOST = 1 << 26
Count = Annotated[int, Meta(ge=1, le=MOST)]
Whole = Annotated[int, Meta(ge=0, le=MOST)]
Size = Annotated[int, Meta(ge=0)]
WIRE_MODES = Literal["0", "ag", "i8", "mx", "ring", "i8_ring", "mx_ring", "a2a", "i8_a2a", "mx_a2a"]


class Profile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rank of a deployment; docs/ledger.md says what each field means."""

    name: str
    description: str = ""
    # The engine
    engine: Literal["mainline", "fork"] = "mainline"
    runner: Literal["v1", "v2"]
    model: Literal["deepseek_v32", "glm5next", "deepseek_v41"]
    tensor_parallel: Count
    decode_context_parallel: Count = 1
    dcp_interleave: Count = 1
    dcp_comm_backend: Literal["a2a", "ag_rs"] = "ag_rs"
    replicated_queries: bool = False
    max_num_seqs: Count
    max_num_batched_tokens: Count
    max_model_len: Count
    prefill_chunk_tokens: Whole = 0
    speculative_tokens: Whole = 0
    speculative_method: str = "mtp"
    full_graphs: bool = True
    largest_capture_rows: Whole
    # The model
    hidden_size: Count
    attention_heads: Count
    kv_lora_rank: Count
    qk_rope_head_dim: Count
    element_bytes: Count = 2
    query_bytes: Count = 2
    index_heads: Count
    index_head_dim: Count
    index_topk: Count
    index_layers: Count
    index_compress_ratio: Count = 1
    # KV cache and backends
    kv_bytes_per_token: Count
    kv_cache_dtype: str
    page_size: Count = 64
    attention_backend: str
    topk_backend: str = "auto"
    prefill_workspace_factor: Count
    logits_budget_mib: Whole = 0
    # The device
    margin_mib: Whole = 0
    architecture: Literal["sm90", "sm100", "sm120"]
    multiprocessors: Count
    # b12x
    pcie_collectives: Literal["0", "auto", "1"] = "0"
    exchange_rows: Whole = 64
    oneshot_kib: Count = 84
    ring: bool = False
    ring_bytes: Size = 0
    ring_wire_mode: WIRE_MODES = "0"
    indexer_plan_budget_mib: Whole = 0

    @property
    def heads_per_rank(self) -> int:
        return self.attention_heads // self.tensor_parallel

    @property
    def exchanged_heads(self) -> int:
        """Heads of all ranks of a DCP group."""
        return self.heads_per_rank * self.decode_context_parallel

    @property
    def query_head_dim(self) -> int:
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def chunk_tokens(self) -> int:
        """Most rows of a prefill step."""
        return self.prefill_chunk_tokens or self.max_num_batched_tokens

    @property
    def widest_all_reduce(self) -> int:
        """Bytes that the ring is made for: the hidden states of a whole batch, if nothing else is said."""
        return self.ring_bytes or self.max_num_batched_tokens * self.hidden_size * self.element_bytes

    def for_child(self) -> dict[str, Any]:
        return {**msgspec.to_builtins(self), "prefill_chunk_tokens": self.chunk_tokens}


def profile_folder(root: Path) -> Path:
    return root / "profiles"


def load_profile(root: Path, given: str, changes: Sequence[str] = ()) -> Profile:
    """The profile of a file, or of a name in ``profiles/``.

    Args:
        changes: ``FIELD=VALUE``, each in place of what the file says.

    Raises:
        NeaptideError: no such profile, or one whose fields are wrong; the message names the first.
    """
    path = profile_folder(root) / f"{given}.toml" if Path(given).suffix != ".toml" else Path(given)
    if not path.is_file():
        known = sorted(p.stem for p in profile_folder(root).glob("*.toml"))
        raise NeaptideError(
            f"no profile {given!r}", wanted=f"one of {', '.join(known)}, or a .toml file",
            todo="`neaptide profile init` writes one.", where=str(path),
        )  # fmt: skip
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _refused(str(error), path) from error
    profile = checked({"name": path.stem, **data}, str(path))
    if not changes:
        return profile
    return checked({"name": path.stem, **data, **dict(_change(text) for text in changes)}, f"{path} with --set")


def _change(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise NeaptideError(f"{text!r}", wanted="FIELD=VALUE", todo="For example --set engine=fork.", where="--set")
    if _is_text(name):
        return name, value
    try:
        return name, tomllib.loads(f"value = {value}")["value"]
    except ValueError:
        return name, value


def _is_text(name: str) -> bool:
    """Whether a field is one, so that its value needs no quotes."""
    kinds = {field.name: field.type for field in msgspec.structs.fields(Profile)}
    return kinds.get(name) is str or get_origin(kinds.get(name)) is Literal


def checked(data: dict[str, Any], where: str) -> Profile:
    """A profile whose fields fit together.

    Raises:
        NeaptideError: one that is missing, unknown or wrong.
    """
    try:
        profile = msgspec.convert(data, Profile, strict=True)
    except msgspec.ValidationError as error:
        raise _refused(str(error), where) from error
    p, tp = profile, profile.tensor_parallel
    for wrong, name, wanted in (
        (p.attention_heads % tp, "attention_heads", f"a multiple of the {tp} ranks of tensor_parallel"),
        (tp % p.decode_context_parallel, "decode_context_parallel", f"a divisor of tensor_parallel, {tp}"),
        (p.max_model_len % p.index_compress_ratio, "index_compress_ratio", f"a divisor of {p.max_model_len}"),
        (p.chunk_tokens > p.max_num_batched_tokens, "prefill_chunk_tokens", f"{p.max_num_batched_tokens} or less"),
        (p.engine == "fork" and p.pcie_collectives != "0", "pcie_collectives", "0: the fork has its own callers"),
    ):
        if wrong:
            raise NeaptideError(
                f"{name} is {getattr(p, name)}", wanted=wanted, todo="Correct the profile.", where=where
            )
    return profile


def _refused(found: str, where: Path | str) -> NeaptideError:
    return NeaptideError(found, wanted="the fields of docs/ledger.md", todo="Correct the profile.", where=str(where))
