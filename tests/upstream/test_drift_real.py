"""Upstream's next commit on real sources: what is drift, what is only moved, and what does not count."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from neaptide import verify
from neaptide.anchor import find
from neaptide.cli import main
from neaptide.model import Rule
from neaptide.outcomes import Plan, Status, Subject
from neaptide.pins import load_lock
from neaptide.plan import plan_series
from neaptide.series import after_closure, load_series
from neaptide.symbols import find_symbol
from neaptide.text import Source
from real import ROOT, Trees
from toy import commit_all, git


def run(*arguments: str) -> int:
    command, *more = arguments
    return main([command, "--root", str(ROOT), *more])


SHARED, KPOOL = "model_executor/layers/sparse_attn_indexer.py", "models/glm5next/nvidia/sparse_indexer.py"
ONESHOT = "comm/pcie/pcie_oneshot.py"
A2A, RING = "comm/pcie/pcie_dcp_a2a.py", "comm/pcie/pcie_dma.py"
DROP, LOGITS, RANK = "indexer-drop-previous-logits", "indexer-logits", "oneshot-rank-data"
POOL, SLABS, DMA = "channel-pool", "exact-slabs", "dma-wire-slots"
REGIONS, DSA = "indexer-regions", "attention/dsa_indexer"
BUDGET, DIRECT = "indexer-plan-budget", "indexer-direct-outputs"
SWITCHES, WORKER = "neaptide-switches", "v1/worker/gpu_worker.py"
BUILDER = "v1/attention/backends/mla/indexer.py"
CAPTURES, MANAGER, LANES, ESTIMATE = "disposable-captures", "workspace-manager", "workspace-lanes", "graph-estimate"
PCIE, DCP_OPS = "pcie-collectives", "v1/attention/ops/dcp.py"
LEDGER = "live-ledger"
TRANSIENTS, SPLITS = "mla-profile-transients", "mla-split-budget"
STATE, RUNNER_V1 = "distributed/parallel_state.py", "v1/worker/gpu_model_runner.py"
RUNNER_V2, GRAPHS_V2 = "v1/worker/gpu/model_runner.py", "v1/worker/gpu/cudagraph_utils.py"
MLA, FA_SPARSE = "model_executor/layers/attention/mla_attention.py", "v1/attention/backends/mla/flashattn_mla_sparse.py"


@dataclass(frozen=True)
class Change:
    """Upstream's next commit: in ``symbol`` of ``file``, the first hit of ``match``, in that of ``within``, changes.

    ``patch`` drifts, and those of ``also``. ``new`` stands for the hit, with ``$MATCH`` for its text and ``$FLAT``
    for its text on one line.
    """

    patch: str
    file: str
    symbol: str
    match: Rule
    new: str
    within: Rule | None = None
    also: tuple[str, ...] = ()

    @property
    def target(self) -> str:
        return "b12x" if self.file.startswith(("comm/", "attention/")) else "vllm"

    def apply(self, text: str) -> tuple[str, str]:
        """The changed text, and what was put in."""
        source = Source(text)
        symbol = find_symbol(source.tree, self.symbol)
        assert symbol is not None
        span = (0, len(text)) if self.symbol == "<module>" else source.span(symbol)
        if self.within is not None:
            span = (lambda hit: (hit.start, hit.end))(find(source, self.within, span)[0])
        hit = find(source, self.match, span)[0]
        old = text[hit.start : hit.end]
        new = self.new.replace("$MATCH", old).replace("$FLAT", " ".join(old.split()))
        return text[: hit.start] + new + text[hit.end :], new


def name(identifier: str) -> Rule:
    return {"kind": "identifier", "regex": f"^{identifier}$"}


MERGE, RESERVED = "_merge_dcp_topk_global($$$ARGS)", "max_logits_elems = $BYTES"
OP, KPOOL_OP = "sparse_attn_indexer", "sparse_attn_indexer_kpool"
CHUNKS = {"pattern": "prefill_metadata.chunks", "inside": {"kind": "for_statement", "field": "right"}}
IN_A_TEST = {"inside": {"kind": "if_statement", "field": "condition"}}
SCORED, PAGED = "fp8_fp4_mqa_logits($$$ARGS)", "fp8_fp4_paged_mqa_logits($$$ARGS)"
KPOOL_INPUTS = "mqa_logits_mx_inputs(padded_q_quant_cast, $$$REST)"
SPLIT = "self._split_indexer_prefill_chunks($$$ARGS)"
GROUPS = "init_worker_distributed_environment($$$ARGS)"
IGNORED = {"kind": "set", "inside": {"kind": "assignment"}}
REGISTER = "PCIeOneshotAllReduce.register_buffer"
DRIFTS = {
    "shared op, last use": Change(DROP, SHARED, OP, name("dcp_world_size"), "$MATCH + 0", MERGE),
    "shared op, condition": Change(
        DROP,
        SHARED,
        OP,
        {"kind": "comparison_operator", "regex": "^deinterleave_idx is None"},
        "$MATCH and has_prefill",
    ),
    "shared op, loop": Change(DROP, SHARED, OP, CHUNKS, "reversed($MATCH)", also=(LOGITS,)),
    "kpool op, last use": Change(DROP, KPOOL, KPOOL_OP, name("dcp_rank"), "$MATCH + 0", MERGE),
    "kpool op, condition": Change(
        DROP, KPOOL, KPOOL_OP, {**name("has_prefill"), **IN_A_TEST}, "$MATCH and num_tokens", also=(LOGITS,)
    ),
    "reservation": Change(LOGITS, SHARED, OP, {"kind": "binary_operator"}, "2 * $MATCH", RESERVED),
    "condition of the FP32 copy": Change(
        LOGITS, SHARED, OP, {"kind": "comparison_operator", "regex": "deep_select"}, "not $MATCH"
    ),
    "kpool reservation": Change(LOGITS, KPOOL, KPOOL_OP, name("prefill_cap_elems"), "$MATCH + 1", RESERVED),
    "shared op, prefill": Change(LOGITS, SHARED, OP, name("cu_seqlen_ke"), "$MATCH + 0", SCORED),
    "kpool op, prefill": Change(LOGITS, KPOOL, KPOOL_OP, name("cu_seqlen_ke"), "$MATCH + 0", SCORED),
    "shared op, decode": Change(LOGITS, SHARED, OP, name("decode_weights"), "$MATCH * 1", PAGED),
    "kpool op, decode": Change(LOGITS, KPOOL, KPOOL_OP, name("num_padded_tokens"), "$MATCH + 0", KPOOL_INPUTS),
    "plan": Change(
        LOGITS, BUILDER, "DeepseekV32IndexerMetadataBuilder.build", name("num_decodes"), "$MATCH + 0", SPLIT
    ),
    "width of a chunk": Change(
        LOGITS,
        BUILDER,
        "build_prefill_chunk_metadata",
        name("end_idx"),
        "$MATCH + 1",
        "int(compressed_seq_lens_cpu[start_idx:end_idx].max())",
    ),
    "process groups": Change(
        SWITCHES, WORKER, "Worker.init_device", name("rank"), "local_rank", GROUPS, also=(LEDGER,)
    ),
    "compile hash": Change(SWITCHES, "envs.py", "compile_factors", {"kind": "string"}, "'another'", IGNORED),
    "rank data constant": Change(RANK, ONESHOT, "DEFAULT_RANK_DATA_BYTES", {"kind": "integer"}, "16"),
    "table width": Change(RANK, ONESHOT, "_MAX_RANKS", {"kind": "integer"}, "32"),
    "registering an input": Change(
        RANK, ONESHOT, REGISTER, name("list"), "tuple", "self._ext.register_buffer($$$ARGS)"
    ),
}
DRIFTS |= {
    "a method that moved to the base": Change(
        POOL, A2A, "PCIeDCPA2APool.rollback_channels", "self._all_channels = retained", "$MATCH; checked = True"
    ),
    "shapes of a sharded transport": Change(
        SLABS, ONESHOT, "_CuTeOneshotBackend._fused_topology_mode", {"kind": "integer"}, "16", "2 <= rows <= 8"
    ),
    "a fused launch": Change(
        SLABS,
        ONESHOT,
        "PCIeOneshotAllReduce._run_prepared_fused",
        "float(epsilon)",
        "float(epsilon + 0)",
        "launcher($$$ARGS)",
    ),
    "pieces of a ring's shard": Change(
        DMA, RING, "PCIeDmaAllReduce._pick_pieces", {"kind": "integer", "regex": "^512$"}, "256"
    ),
}
DRIFTS |= {
    "the groups of a capture": Change(
        CAPTURES, STATE, "graph_capture", name("nullcontext"), "capture_again", {"kind": "with_statement"}
    ),
    "the whole drop-in": Change(MANAGER, "v1/worker/workspace.py", "<module>", "self._locked = True", "..."),
    "the profile run": Change(
        MANAGER,
        WORKER,
        "Worker.determine_available_memory",
        name("randomize_dummy_inputs"),
        "eager_inputs",
        "self.model_runner.profile_run($$$ARGS)",
    ),
    "how many lanes": Change(LANES, WORKER, "_num_workspace_lanes", {"kind": "integer", "regex": "^2$"}, "3"),
    "the manager of the lanes": Change(
        LANES,
        WORKER,
        "Worker._init_workspace_and_model_runner",
        name("num_ubatches"),
        "2 * $MATCH",
        "init_workspace_manager($$$ARGS)",
    ),
    "the draft's attention": Change(
        LANES,
        RUNNER_V2,
        "GPUModelRunner.initialize_kv_cache",
        name("block_tables"),
        "draft_tables",
        "self.speculator.set_attn($$$ARGS)",
    ),
    "ops at which graphs break": Change(
        LANES,
        "compilation/breakable_cudagraph.py",
        "eager_break_during_capture",
        name("fn"),
        "op",
    ),
    "the stream of a capture": Change(
        ESTIMATE, STATE, "graph_capture", "GraphCaptureContext($STREAM)", "($MATCH, 0)[0]"
    ),
    "V1's sum of estimates": Change(
        ESTIMATE,
        RUNNER_V1,
        "GPUModelRunner.profile_cudagraph_memory",
        "decoder_estimate + encoder_memory_estimate",
        "$MATCH + 0",
    ),
    "the dense projection of a profile": Change(
        TRANSIENTS, MLA, "MLAAttention.forward_impl", name("v_head_dim"), "$MATCH + 0", "_ = torch.empty($$$SIZE)"
    ),
    "FlashAttention's call": Change(
        SPLITS,
        FA_SPARSE,
        "FlashAttnMLASparseImpl._forward_mqa_kernel",
        {"kind": "integer", "regex": "^3$"},
        "4",
        "flash_attn_varlen_func($$$ARGS)",
    ),
}
DRIFTS |= {
    "the size of a plan": Change(
        REGIONS,
        f"{DSA}/scratch.py",
        "_indexer_paged_scratch_layout",
        "max(int(cursor), SCRATCH_ALIGN_BYTES)",
        "$MATCH + 1024",
    ),
    "the candidates of a fold": Change(
        REGIONS,
        f"{DSA}/paged.py",
        "index_topk_fp8",
        "total_slices * topk",
        "$MATCH + 0",
        "torch.full($$$ARGS)",
    ),
    "the exchanges of a layer": Change(
        PCIE, DCP_OPS, "MLADCPManager.__init__", name("use_pcp"), "bool($MATCH)", "self._init_combine($$$ARGS)"
    ),
    "the binding of a launch": Change(
        BUDGET,
        f"{DSA}/scratch.py",
        "B12XIndexerPagedScratchPlan.bind",
        {"kind": "keyword_argument", "regex": "^schedule_metadata="},
        "schedule_metadata=None",
        "build_indexer_paged_binding($$$ARGS)",
    ),
    "no direct logits": Change(
        DIRECT,
        f"{DSA}/kernel.py",
        "run_paged_logits_kernel",
        {"kind": "keyword_argument", "regex": "^device="},
        "device=weights.device",
        "torch.empty((rows, width_tokens), $$$ARGS)",
    ),
    "the fold of a prepared run": Change(
        REGIONS,
        f"{DSA}/_preparation.py",
        "_DsaIndexerState.run",
        "self.layout.caps.topk",
        "$MATCH + 0",
        "index_topk_fp8($$$ARGS)",
    ),
}
MOVES = {
    "another statement of the loop": Change(DROP, KPOOL, KPOOL_OP, "num_rows = $ROWS", "$MATCH; checked = True"),
    "another statement of the builder": Change(
        LOGITS, BUILDER, "DeepseekV32IndexerMetadataBuilder.build", "num_reqs = $VALUE", "$MATCH; checked = True"
    ),
    "another statement of the function": Change(DROP, SHARED, OP, "fp8_dtype = $TYPE", "$MATCH; checked = True"),
}
CLEAN = {
    "another variable of the environment": Change(
        SWITCHES, "envs.py", "environment_variables", {"kind": "string", "regex": "VLLM_HOST_IP"}, "'VLLM_HOST_NAME'"
    ),
    "a comment": Change(DROP, KPOOL, KPOOL_OP, "num_rows = $ROWS", "$MATCH  # new"),
    "formatting": Change(DROP, KPOOL, KPOOL_OP, {"kind": "argument_list"}, "$FLAT", MERGE),
    "another function": Change(DROP, KPOOL, "<module>", "logger = $LOGGER", "$MATCH\n\n\ndef added() -> None: ..."),
}


@pytest.fixture
def no_smoke(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout of a part of the files cannot be imported."""
    monkeypatch.setattr(verify, "import_smoke", lambda *args: verify.Smoke("skipped", "not a whole tree"))


def changed_checkout(trees: dict[str, Trees], folder: Path, change: Change) -> tuple[Path, str]:
    """The files that the series touches (of b12x the whole package), and the change as a commit on top."""
    pristine = trees["current"].pristine / change.target / change.target
    if change.target == "b12x":
        shutil.copytree(pristine, folder / "b12x")
    touched = [p for p, sha in load_lock(ROOT, "current")[change.target].before.items() if sha is not None]
    for path in touched:
        (folder / change.target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(pristine / path, folder / change.target / path)
    git(folder, "init", "-q", "-b", "main")
    commit_all(folder, "pristine")
    file = folder / change.target / change.file
    text, new = change.apply(file.read_text())
    file.write_text(text)
    commit_all(folder, "upstream moves on")
    return folder, new


def planned(trees: dict[str, Trees], change: Change) -> tuple[Plan, str]:
    """The patches that have to do with the changed file, and what they come after, planned on the changed files."""
    pristine = trees["current"].pristine / change.target / change.target
    text, new = change.apply((pristine / change.file).read_text())
    lock = load_lock(ROOT, "current")[change.target]

    def original(path: str) -> bytes | None:
        return (pristine / path).read_bytes() if (pristine / path).is_file() else None

    def read(path: str) -> bytes | None:
        return text.encode() if path == change.file else original(path)

    series = load_series(ROOT, change.target)
    touching = [
        p for p in series if any(key.split("::")[0].endswith(change.file) for key in lock.guards.get(p.name, {}))
    ]
    names = {p.name for p in touching}.union(*(after_closure(p, series) for p in touching))
    assert change.patch in names
    artefact = lock.artefact
    subject = Subject(change.target, artefact.version, artefact.names, read, original, lock.guards)
    return plan_series(subject, [p for p in series if p.name in names]), new


@pytest.mark.parametrize("name", DRIFTS)
def test_drift_is_named_and_shown(trees: dict[str, Trees], name: str) -> None:
    change = DRIFTS[name]
    plan, new = planned(trees, change)
    drifted = plan.open_drift(frozenset())
    assert plan.exit_code() == 4
    assert {o.patch for o in drifted} == {change.patch, *change.also}
    for outcome in drifted:
        assert (outcome.file, outcome.symbol.split(".")[0]) == (change.file, change.symbol.split(".")[0])
        assert any(line.startswith("+") and new in line for line in outcome.upstream_change.splitlines())


@pytest.mark.parametrize("name", [*MOVES, *CLEAN])
def test_changes_beside_the_anchor_go_on(trees: dict[str, Trees], name: str) -> None:
    change = {**MOVES, **CLEAN}[name]
    plan, _ = planned(trees, change)
    assert plan.exit_code() == 0
    moved = {o.patch for o in plan.outcomes if o.status is Status.MOVED}
    assert (change.patch in moved) == (name in MOVES)


@pytest.mark.usefixtures("no_smoke")
def test_drift_in_a_checkout_writes_nothing(
    trees: dict[str, Trees], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change = DRIFTS["shared op, loop"]
    checkout, new = changed_checkout(trees, tmp_path, change)
    head = git(checkout, "rev-parse", "HEAD")
    assert run("apply", "--checkout", f"{change.target}={checkout}") == 4
    shown = capsys.readouterr().err
    assert f"drift: {change.target}/{change.patch}: {change.file} {change.symbol.split('.')[0]}" in shown
    assert any(line.startswith("+") and new in line for line in shown.splitlines())
    assert git(checkout, "rev-parse", "HEAD") == head


@pytest.mark.usefixtures("no_smoke")
@pytest.mark.parametrize("name", ["another statement of the builder", "formatting"])
def test_a_checkout_with_changes_beside_the_anchor(
    trees: dict[str, Trees], tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change = {**MOVES, **CLEAN}[name]
    checkout, _ = changed_checkout(trees, tmp_path, change)
    assert run("apply", "--checkout", f"{change.target}={checkout}") == 0
    assert (f"moved: {change.target}/{change.patch}" in capsys.readouterr().err) == (name in MOVES)


@pytest.mark.usefixtures("no_smoke")
@pytest.mark.parametrize("name", ["shared op, loop", "table width", "the whole drop-in"])
def test_accepted_drift_is_remembered(trees: dict[str, Trees], tmp_path: Path, name: str) -> None:
    change = DRIFTS[name]
    checkout, _ = changed_checkout(trees, tmp_path, change)
    given = ("--checkout", f"{change.target}={checkout}")
    accepted = [p for patch in (change.patch, *change.also) for p in ("--accept-drift", f"{change.target}/{patch}")]
    assert run("apply", *given, *accepted) == 0
    assert run("revert", *given) == 0
    assert run("apply", *given) == 0, "the accepted drift is remembered"


@pytest.mark.usefixtures("no_smoke")
def test_another_release_with_its_version_is_refused(trees: dict[str, Trees], tmp_path: Path) -> None:
    """b12x 1.1.0 under the pin of 1.5.1 would get code for another backend."""
    shutil.copytree(trees["r12"].pristine / "b12x", tmp_path / "b12x")
    git(tmp_path / "b12x", "init", "-q", "-b", "main")
    commit_all(tmp_path / "b12x", "1.1.0")
    given = ("apply", "--checkout", f"b12x={tmp_path / 'b12x'}")
    assert run(*given) == 2
    assert run(*given, "--pin", "r12") == 0
