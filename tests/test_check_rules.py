"""Wrong layouts: each refused for the right reason; and what is noticed without corrections."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from cookbook.check.check import judge
from cookbook.config.finding import ERROR, WARNING
from cookbook.config.validate import validation_errors as cell_refusals
from tests.check_cells import cell_of, cluster_of, refusals, with_options

P = "parallelism"
TP, PP, CP = (
    f"{P}.tensor_parallel_degree",
    f"{P}.pipeline_parallel_degree",
    f"{P}.context_parallel_degree",
)
EP, ETP = f"{P}.expert_parallel_degree", f"{P}.expert_tensor_parallel_degree"
SHARD, REPLICATE = f"{P}.data_parallel_shard_degree", f"{P}.data_parallel_replicate_degree"
SCHEDULE = f"{P}.pipeline_parallel_schedule"
OVERLAP = f"{P}.pipeline_parallel_expert_parallel_overlap"
MICROBATCH = f"{P}.pipeline_parallel_microbatch_size"
PER_STAGE = f"{P}.pipeline_parallel_layers_per_stage"
BATCH, GLOBAL, SEQ = "training.local_batch_size", "training.global_batch_size", "training.seq_len"
KEPT, MODE = "activation_checkpoint.num_layers_kept", "activation_checkpoint.mode"
SELECTED = "activation_checkpoint.selective_ac_option"
BIG, SMALL = "deepseek_v3_671b", "deepseek_v3_16b"
B200 = "soperator-b200"

# recipe, options, where, the option that the refusal names, words of its reason
WRONG: list[tuple[str, dict[str, Any], dict[str, Any], str, str]] = [
    (BIG, {TP: 3}, {}, TP, "3 does not divide 256 ranks"),
    (BIG, {PP: 3}, {}, PP, "3 does not divide 256 ranks"),
    (BIG, {CP: 3}, {}, CP, "3 does not divide 256 ranks"),
    (BIG, {REPLICATE: 5}, {}, REPLICATE, "5 does not divide 256 ranks"),
    (BIG, {SHARD: 32}, {}, SHARD, "is 128 ranks, the job has 256"),
    (BIG, {TP: 0}, {}, TP, "found 0"),
    (BIG, {EP: 48}, {}, EP, "48 does not divide 128 ranks of a stage"),
    (BIG, {EP: 256}, {}, EP, "256 does not divide 128 ranks of a stage"),
    (SMALL, {EP: 128}, {}, EP, "128 does not divide 64 experts"),
    (BIG, {ETP: 4}, {}, ETP, "found 4, allowed: 1 or the tensor parallel degree (2)"),
    (SMALL, {TP: 32}, {}, TP, "32 does not divide 16 attention heads"),
    (SMALL, {SHARD: 1, TP: 256, EP: 1}, {}, TP, "256 does not divide 16 attention heads"),
    (SMALL, {TP: 8, EP: 8, SHARD: 1}, {"nodes": 1}, SHARD, "allowed with EP above 1: 2 and up"),
    (BIG, {SEQ: 8190}, {}, SEQ, "8190 is not a multiple of TP x CP x 2 = 4"),
    (BIG, {SEQ: 0}, {}, SEQ, "0 is not a multiple"),
    (BIG, {BATCH: 0}, {}, BATCH, "found 0"),
    (BIG, {GLOBAL: 100}, {}, GLOBAL, "100 is not a multiple of local batch 64 x 64"),
    (BIG, {MICROBATCH: 3}, {}, MICROBATCH, "3 does not divide the local batch of 64"),
    (BIG, {PP: 64, EP: 1}, {}, PP, "64 pipeline ranks"),
    (BIG, {SCHEDULE: "Interleaved1F2B"}, {}, SCHEDULE, "found 'Interleaved1F2B', allowed"),
    (BIG, {PER_STAGE: 61}, {}, PER_STAGE, "cannot divide among 2 pipeline ranks"),
    (BIG, {SCHEDULE: "1F1B", PER_STAGE: 10}, {}, PER_STAGE, "which 1F1B cannot divide"),
    (BIG, {BATCH: 7}, {}, BATCH, "7 microbatches are not a multiple of the schedule's 3 rounds"),
    (BIG, {BATCH: 1, SCHEDULE: "1F1B"}, {}, BATCH, "fewer than the 2 stages, which 1F1B refuses"),
    (BIG, {BATCH: 2, SCHEDULE: "DualPipeV"}, {}, BATCH, "fewer than the 4 stages"),
    (BIG, {SCHEDULE: "ZBVZeroBubble"}, {}, SCHEDULE, "splits the backward, which compiled layers"),
    (BIG, {SCHEDULE: "DualPipeV", PER_STAGE: 8}, {}, PER_STAGE, "needs two on each of 2 ranks"),
    (BIG, {"model.flavor": "617B"}, {}, "model.flavor", "'617B'"),
    (BIG, {EP: 1}, {"ep_backend": "deepep"}, "", "deepep needs parallelism.expert_parallel_degree"),
    (SMALL, {TP: 2, ETP: 2}, {"ep_backend": "deepep"}, ETP, "DeepEP needs 1, found 2"),
    (BIG, {"deepep.num_chunks": 0}, {}, "deepep.num_chunks", "found 0, allowed: 1 and up"),
    (BIG, {KEPT: -1}, {}, KEPT, "found -1, allowed: 0 and up"),
    (BIG, {KEPT: 1, MODE: "none"}, {}, KEPT, "mode none recomputes no layer as a whole"),
    (BIG, {KEPT: 1, MODE: "memory_budget"}, {}, KEPT, "recomputes no layer as a whole"),
    *(
        (BIG, {SELECTED: word}, {}, SELECTED, f"found {word!r}, allowed: op, or n from 1 up")
        for word in ("ops", "0", "00", "-1", "1.5", "2 ", "\u00b2", "")
    ),
    (
        SMALL,
        {"model.flavor": "236B", EP: 40, PP: 1},
        {"nodes": 20, "ep_backend": "deepep"},
        EP,
        "EP 40",
    ),
    (BIG, {}, {"precision": "mxfp8_linear"}, "", "MXFP8 linear layers with tensor parallelism"),
    (
        SMALL,
        {},
        {"precision": "mxfp8", "cluster": "a100"},
        "",
        "needs a GPU of compute capability 10",
    ),
    (SMALL, {}, {"ep_backend": "mxfp8_a2a"}, "", "mxfp8_a2a needs a precision with grouped_gemms"),
    (BIG, {"training.steps": 0}, {}, "training.steps", "found 0, allowed: 1 and up"),
    (BIG, {"training.steps": -5}, {}, "training.steps", "found -5, allowed: 1 and up"),
    (BIG, {"metrics.log_freq": 0}, {}, "metrics.log_freq", "found 0, allowed: 1 and up"),
    (BIG, {"lr_scheduler.warmup_steps": -1}, {}, "lr_scheduler.warmup_steps", "found -1, allowed"),
    (BIG, {"lr_scheduler.decay_ratio": 7.0}, {}, "lr_scheduler.decay_ratio", "allowed: 0 to 1"),
    (BIG, {"checkpoint.interval": 0}, {}, "checkpoint.interval", "found 0, allowed: 1 and up"),
    (BIG, {"checkpoint.interval_minutes": -1.0}, {}, "checkpoint.interval_min", "found -1.0, allo"),
    (BIG, {"comm.num_sms": -1}, {}, "comm.num_sms", "found -1, allowed: 0 to 64"),
    (BIG, {"comm.num_sms": 65}, {}, "comm.num_sms", "found 65, allowed: 0 to 64"),
    (BIG, {"training.dataset": "c5"}, {}, "training.dataset", "found 'c5', allowed: c4, c4_test"),
    (BIG, {"model.name": "llama3"}, {}, "model.name", "found 'llama3', allowed: deepseek_v3"),
    (
        BIG,
        {"model.converters": ["quantize.grouped_mm.mx"]},
        {},
        "model.converters",
        "precision bf16",
    ),
    (
        BIG,
        {"checkpoint.enable": True, "checkpoint.keep_latest_k": 1},
        {},
        "checkpoint.keep",
        "1 would",
    ),
]


def _where(words: dict[str, Any]) -> dict[str, Any]:
    if words.get("cluster") != "a100":
        return words
    gpu = cluster_of(B200).gpu
    assert gpu
    old = dataclasses.replace(gpu, name="A100", compute_capability=8.0)
    return {**words, "cluster": dataclasses.replace(cluster_of(B200), gpu=old)}


@pytest.mark.parametrize(
    ("recipe", "options", "where", "option", "words"),
    WRONG,
    ids=[f"{index}-{case[3] or case[4][:20]}" for index, case in enumerate(WRONG)],
)
def test_wrong_layout_is_refused_with_its_reason(
    recipe: str, options: dict[str, Any], where: dict[str, Any], option: str, words: str
) -> None:
    found = refusals(recipe, options, **_where(where))
    assert any(option in one.option and words in one.reason for one in found), found


@pytest.mark.parametrize("ep_backend", ["standard", "deepep"])
@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
@pytest.mark.parametrize("recipe", [BIG, SMALL])
def test_published_layouts_pass(recipe: str, precision: str, ep_backend: str) -> None:
    assert not refusals(recipe, {}, precision=precision, ep_backend=ep_backend)


def test_the_recipes_own_tokenizers_are_no_advice() -> None:
    for recipe in (BIG, SMALL):
        assert not [one for one in judge(cell_of(recipe)) if one.rule == "files"]


def test_deepep_between_nodes_of_four_is_refused() -> None:
    cell = cell_of(SMALL, {EP: 8}, cluster=cluster_of(B200, 4), ep_backend="deepep")
    reasons = [one.reason for one in judge(cell) if one.rule == "deepep_size"]
    assert reasons and "takes them to have 8 GPUs, not 4" in reasons[0]


def test_corrections_that_are_off_are_noticed() -> None:
    cell = cell_of(BIG, precision="mxfp8", ep_backend="deepep")
    rules = {"hooks_are_on", "router_gradient"}
    assert not [one for one in judge(cell) if one.rule in rules]
    without = dataclasses.replace(cell, hooks="mine")
    found = [one for one in judge(without) if one.rule in rules]
    assert [one.level for one in found] == [ERROR, ERROR, WARNING]
    assert "counts every token once for each TP rank" in found[0].reason
    assert "padded to 32" in found[1].reason


@pytest.mark.parametrize(
    ("ep_backend", "changes", "hooks", "refused"),
    [
        ("deepep", {}, None, True),
        ("deepep", {SCHEDULE: "dualpipev"}, None, True),
        ("deepep", {OVERLAP: False}, None, False),
        ("deepep", {SCHEDULE: "Interleaved1F1B"}, None, False),
        ("deepep", {PP: 1}, None, False),
        # The released layer has what the hooks call.
        ("deepep", {TP: 1}, "none", False),
        ("standard", {}, None, False),
        ("mxfp8_a2a", {}, None, False),
    ],
)
def test_dual_pipe_v_overlaps_no_deepep(
    ep_backend: str, changes: dict[str, Any], hooks: str | None, refused: bool
) -> None:
    options = {SCHEDULE: "DualPipeV", "compile.components": ["loss"], MODE: "none"}
    cell = cell_of(BIG, options | changes, ep_backend=ep_backend)
    cell = dataclasses.replace(cell, hooks=hooks) if hooks else cell
    found = [one for one in cell_refusals(cell) if one.rule == "dual_pipe_v_overlap"]
    assert [one.option for one in found] == [OVERLAP] * refused


def test_converters_without_their_gpu_are_refused() -> None:
    cell = cell_of(SMALL, {EP: 8}, cluster="h200-node")
    mx = with_options(cell, {"model.converters": ["quantize.grouped_mm.mx"]})
    rules = {one.rule for one in judge(mx) if one.level == ERROR}
    assert rules == {"mxfp8_hardware", "declaration"}
    emulated = with_options(mx, {"quantize.grouped_mm.mx.emulate": True})
    assert "mxfp8_hardware" not in {one.rule for one in judge(emulated)}


def test_every_finding_has_a_public_reference() -> None:
    cells = [
        cell_of(BIG, {BATCH: 1}, precision="mxfp8", ep_backend="deepep"),
        cell_of(SMALL, {"debug.moe_force_load_balance": True, "checkpoint.enable": False}),
    ]
    findings = [one for cell in cells for one in judge(cell)]
    assert findings
    for one in findings:
        assert one.reference.startswith("https://") and one.reason


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("deepep.num_chunks", 2),
        ("deepep.score_activations", True),
        ("comm.num_sms", 64),
        (KEPT, 1),
    ],
)
def test_what_the_hooks_do_needs_them(option: str, value: Any) -> None:
    cell = cell_of(BIG, {option: value}, ep_backend="deepep")
    assert option not in {one.option for one in judge(cell) if one.level == ERROR}
    bare = dataclasses.replace(cell, hooks="none")
    assert option in {one.option for one in judge(bare) if one.level == ERROR}


@pytest.mark.parametrize(
    ("word", "remedy"),
    [("ops", "did you mean 'op'?"), ("0", "set activation_checkpoint.mode=full"), ("x", "")],
)
def test_what_is_selected_is_told_with_its_remedy(word: str, remedy: str) -> None:
    (finding,) = refusals(BIG, {SELECTED: word})
    assert remedy in str(finding) if remedy else str(finding).endswith("every n-th layer")


@pytest.mark.parametrize("word", ["op", "1", "2", "03", "61"])
def test_operators_or_every_nth_layer_may_be_selected(word: str) -> None:
    assert refusals(BIG, {SELECTED: word, MODE: "selective"}) == []
