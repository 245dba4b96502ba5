"""Memory and work of a rank, term by term, by hand from the 16B's sizes; no torch is asked."""

import dataclasses
import math
import random
from typing import Any

import pytest

from cookbook.base.family import Model
from cookbook.base.gpus import Gpu
from cookbook.config.cell import Cell
from cookbook.config.resolve import this_machine
from cookbook.predict import memory as memory_terms
from cookbook.predict.layer_memory import RankLayers, layer_bytes
from cookbook.predict.memory import GIB, StageMemory, predict_memory
from cookbook.predict.operators import Unit
from cookbook.predict.rank import Layer, ModelPart, describe_ranks, model_of
from cookbook.predict.shapes import destinations, padded_tokens, shapes_of
from tests.check_cells import cell_of, with_options
from tests.predict_machine import on_gpus

TOKENS, DIM, WORDS = 4 * 8192, 2048, 102400
# 26 of the 27 layers have experts of 1408, 6 rows a token; layer 0 has a hidden size of 10944.
ROWS, HIDDEN, DENSE, MOE_LAYERS = TOKENS * 6, 1408, 10944, 26
TP2 = {"parallelism.tensor_parallel_degree": 2}
EAGER_LOSS = {"compile.components": ["model"]}
MODE = "activation_checkpoint.mode"
SELECTIVE = {MODE: "selective", "activation_checkpoint.selective_ac_option": "op"}
LIST = "activation_checkpoint.op_sac_save_list"
POLICY = "parallelism.fsdp_reshard_after_forward"


def memory(cell: Cell, **changed: Any) -> StageMemory:
    (rank,) = describe_ranks(cell)
    return predict_memory(cell, dataclasses.replace(rank, **changed))


@pytest.mark.parametrize(
    ("options", "stages", "bytes_a_logit"),
    [
        # Fused: logits and their gradient in BF16.
        ({}, 1, 4),
        # Logits, and what `loss_parallel` scatters into, and its sum with the softmax, in FP32.
        (TP2, 1, 2 + 8),
        (EAGER_LOSS, 1, 12),
        (EAGER_LOSS | TP2, 1, 16),
        # A pipeline's stage keeps its output as well.
        (EAGER_LOSS, 2, 12 + 2),
    ],
)
def test_bytes_of_the_loss(options: dict[str, Any], stages: int, bytes_a_logit: int) -> None:
    found = memory(on_gpus(4, options), num_stages=stages)
    assert found.moment == "the loss"
    logits = TOKENS * WORDS // (2 if TP2.items() <= options.items() else 1)
    assert found.terms["logits and loss"] == pytest.approx(logits * bytes_a_logit / GIB)


def test_the_vocabulary_is_whole_where_the_loss_is_not_parallel() -> None:
    whole = on_gpus(4, TP2 | {"parallelism.disable_loss_parallel": True})
    for chunks, words in ((0, WORDS), (8, WORDS // 2)):
        cell = with_options(whole, {"loss.num_chunks": chunks})
        assert shapes_of(cell).vocab == words


def test_an_optimizer_that_is_not_fused_makes_roots_of_all_moments() -> None:
    small = {"training.local_batch_size": 1, "training.seq_len": 256}
    for implementation, extra in (("fused", False), ("foreach", True)):
        found = memory(on_gpus(4, {**small, "optimizer.implementation": implementation}))
        assert (found.moment == "the optimizer step") is extra
        assert found.terms["optimizer state"] == 2 * found.terms["parameters"]
        if extra:
            assert found.terms["optimizer step"] == found.terms["parameters"]


def test_two_stages_of_a_rank_without_fsdp_keep_gradients_beside_one_microbatch() -> None:
    parts = describe_ranks(cell := on_gpus(1))[0].parts * 2
    found = memory(cell, parts=parts, stages=(0, 1), in_flight=[[1, 1]], num_stages=2).terms
    assert found["gradients (not sharded)"] == found["parameters"]


@pytest.mark.parametrize(
    ("setting", "share"),
    [("expandable_segments:True", 0.01), ("expandable_segments:False", 0.03), ("", 0.03)],
)
def test_pages_that_are_mapped_leave_fewer_fragments(setting: str, share: float) -> None:
    cell = on_gpus(4)
    backend = dataclasses.replace(cell.ep_backend, environment={"PYTORCH_ALLOC_CONF": setting})
    found = memory(dataclasses.replace(cell, ep_backend=backend))
    of_streams = ("gradients", "all-gather stream", "dispatch stream", "fragments")
    compute = sum(size for name, size in found.terms.items() if name not in of_streams)
    assert found.terms["fragments"] == pytest.approx(share * compute)


@pytest.mark.parametrize(("capability", "kib"), [(8.0, 2 * 4096 + 8 * 16), (9.0, 32 * 1024)])
def test_cublas_has_a_workspace_for_each_of_two_threads(capability: float, kib: int) -> None:
    cell = on_gpus(4)
    cluster = dataclasses.replace(cell.cluster, gpu=Gpu("a GPU", capability, 80))
    found = memory(dataclasses.replace(cell, cluster=cluster))
    assert found.terms["cuBLAS workspaces"] == pytest.approx(2 * kib * 1024 / GIB)


def two_nodes(ep: int, ep_backend: str) -> Cell:
    cell = dataclasses.replace(on_gpus(8, ep_backend=ep_backend), nodes=2)
    return with_options(cell, {"parallelism.expert_parallel_degree": ep})


@pytest.mark.parametrize(("ep", "peers", "nodes"), [(4, 4, 0), (8, 8, 0), (16, 8, 2)])
def test_deepep_has_buffers_of_its_own(ep: int, peers: int, nodes: int) -> None:
    """Ten channels: 256 tokens a peer, and 128 of each node, sent and received."""
    standard, deepep = (memory(two_nodes(ep, name)).outside for name in ("standard", "deepep"))
    token = DIM * 2 + 6 * 12
    assert deepep - standard == pytest.approx(10 * token * (peers * 256 + 2 * nodes * 128) / GIB)


def layers_of(cell: Cell) -> RankLayers:
    (rank,) = describe_ranks(cell)
    return RankLayers(cell, rank, shapes_of(cell))


def kept(cell: Cell) -> float:
    """Bytes that a microbatch leaves on the rank."""
    return layers_of(cell).kept(describe_ranks(cell)[0].parts[0])


def test_what_is_saved_by_name_is_kept_and_not_computed_again() -> None:
    bytes_kept, again = {}, {}
    for names in (("attention",), ("attention", "grouped_mm"), ("attention", "communication")):
        cell = on_gpus(4, {**SELECTIVE, LIST: list(names)}, ep_backend="deepep")
        bytes_kept[names[-1]] = kept(cell)
        again[names[-1]] = layers_of(cell).backward()["recomputed layer"]
    # Gate and up, and the experts' output.
    gemms = 2 * ROWS * (2 * HIDDEN + DIM)
    assert bytes_kept["grouped_mm"] - bytes_kept["attention"] == MOE_LAYERS * gemms
    assert again["attention"] - again["grouped_mm"] == gemms
    # Dealt out evenly a token goes to 1.25 of 4 ranks. Rows that came are of no use to a backward.
    sent = 2 * (1.25 + 1) * TOKENS * DIM
    assert bytes_kept["communication"] - bytes_kept["attention"] == pytest.approx(MOE_LAYERS * sent)
    assert again["communication"] == again["attention"]


@pytest.mark.parametrize(("ep_backend", "down"), [("deepep", 0), ("standard", DIM)])
def test_compiled_layers_keep_the_gemms_that_are_worth_it(ep_backend: str, down: int) -> None:
    """Queries, latents, attention's output, the router's, the shared experts' gate and up."""
    names = ["attention", "communication", "grouped_mm"]
    less, more = (
        on_gpus(4, {**SELECTIVE, LIST: saved}, ep_backend=ep_backend)
        for saved in (names, [*names, "mm"])
    )
    latents, gate_up = 512 + 64, 2 * 2 * HIDDEN
    outputs = 16 * (128 + 64) + latents + DIM + 64 + gate_up + down
    # Of the dense layer, which is compiled with its recomputation, one of gate and up.
    assert kept(more) - kept(less) == 2 * TOKENS * (MOE_LAYERS * outputs + DENSE)
    recomputed = [layers_of(one).backward()["recomputed layer"] for one in (less, more)]
    # The others are inputs of what computes again in any case, and not kept for a backward.
    assert recomputed[0] - recomputed[1] == 2 * TOKENS * (latents + gate_up)


def test_a_layers_backward_has_its_parameters_and_the_next_ones() -> None:
    found = layers_of(on_gpus(4)).backward()
    (rank,) = describe_ranks(on_gpus(4))
    own, experts = (unit.gathered for unit in rank.layers[5].units)
    assert found["gathered layers"] == 2 * 2 * (own + experts)
    # Its gradients in BF16, and the largest of its modules' once more in FP32.
    assert found["new gradients"] == 2 * (own + experts) + 4 * experts


@pytest.mark.parametrize("options", [{}, {"loss.num_chunks": 8}])
def test_what_fsdp_never_reshards_is_kept_and_counted_once(options: dict[str, Any]) -> None:
    policies = ({**options, POLICY: policy} for policy in ("default", "never"))
    default, never = map(on_gpus, (4, 4), policies)
    (rank,) = describe_ranks(never)
    kept = 2 * sum(unit.gathered for unit in rank.units)
    assert memory(never).terms["gathered parameters"] == pytest.approx(kept / GIB)
    # The loss has the output layer's weight among them, a layer's backward its parameters.
    before, after = (
        memory_terms._loss(rank, shapes_of(cell), layers_of(cell), True)["output layer"]
        for cell in (default, never)
    )
    assert before - after == 2 * WORDS * DIM
    assert "gathered layers" not in layers_of(never).backward()


def test_swiglu_keeps_gate_up_and_product_and_eager_silu_too() -> None:
    compiled, eager = (
        kept(on_gpus(4, {MODE: "none", "compile.components": components}))
        for components in (["model", "loss"], ["loss"])
    )
    one = 2 * TOKENS * DENSE + MOE_LAYERS * 2 * (TOKENS * 2 * HIDDEN + ROWS * HIDDEN)
    assert eager - compiled == one


def test_a_memory_budget_keeps_its_part_and_what_lies_between_compiled_pieces() -> None:
    cells = [
        on_gpus(4, {MODE: "memory_budget", "activation_checkpoint.memory_budget": budget})
        for budget in (0.0, 0.25, 1.0)
    ]
    found, none = [kept(cell) for cell in cells], kept(on_gpus(4, {MODE: "none"}))
    assert found[2] == none
    assert none - found[1] == pytest.approx(0.75 * (none - found[0]))
    again = [layers_of(cell).backward()["recomputed layer"] for cell in cells]
    assert again[2] == 0 < again[1] == pytest.approx(0.75 * again[0])
    # Routers' scores and rows stay where they are.
    assert found[0] > MOE_LAYERS * 2 * (TOKENS + ROWS) * DIM


@pytest.mark.parametrize(("etp", "sent"), [(1, TOKENS // 2), (2, TOKENS)])
def test_tp_ranks_share_the_tokens_where_experts_are_whole(etp: int, sent: int) -> None:
    options = {"parallelism.expert_tensor_parallel_degree": etp}
    cell = on_gpus(4, {**TP2, "parallelism.expert_parallel_degree": 2, **options})
    found = shapes_of(cell)
    assert (found.sent_tokens, found.expert_hidden) == (sent, HIDDEN // etp)


DEEPSEEK = model_of(cell_of("deepseek_v3_671b"))
SMALL = model_of(on_gpus(4))


def simulated(model: Model, places: int) -> float:
    """Distinct places of 4,000 tokens: groups by their two best scores, then the best experts."""
    drawn, per_group = random.Random(1), model.num_experts // (model.num_expert_groups or 1)
    visited = 0
    for _ in range(4000):
        scores = [drawn.gauss(0, 1) for _ in range(model.num_experts)]
        groups = [range(first, first + per_group) for first in range(0, len(scores), per_group)]
        groups.sort(key=lambda own: -sum(sorted(1 / (1 + math.exp(-scores[e])) for e in own)[-2:]))
        allowed = [expert for own in groups[: model.num_limited_groups] for expert in own]
        chosen = sorted(allowed, key=lambda expert: -scores[expert])[: model.top_k]
        visited += len({expert * places // model.num_experts for expert in chosen})
    return visited / 4000


@pytest.mark.parametrize(
    ("model", "places"),
    [
        (DEEPSEEK, 32),
        (DEEPSEEK, 4),
        (DEEPSEEK, 8),
        (dataclasses.replace(DEEPSEEK, num_experts=160, top_k=6, num_limited_groups=3), 16),
        (SMALL, 4),
    ],
)
def test_a_token_goes_to_as_many_ranks_as_simulated(model: Model, places: int) -> None:
    found = destinations(model, places, "random")
    assert found == destinations(model, places, "trained")
    assert found == pytest.approx(simulated(model, places), rel=0.01)


def test_round_robin_sends_a_token_to_the_fewest_ranks() -> None:
    # Dealt out in turn they are neighbours: all on one rank, or six on three.
    assert destinations(DEEPSEEK, 32, "round_robin") == 1
    assert [destinations(SMALL, places, "round_robin") for places in (1, 4, 32)] == [1, 1.25, 3]


@pytest.mark.parametrize(
    ("forced", "routing", "rows"),
    [
        (True, "trained", ROWS),
        (False, "trained", ROWS * 12 // 10),
        (False, "random", ROWS),
        (False, "round_robin", ROWS),
    ],
)
def test_trained_routing_is_uneven_and_dealt_routing_is_not(
    forced: bool, routing: str, rows: int
) -> None:
    options = {"debug.moe_force_load_balance": forced, "debug.moe_routing": routing}
    cell = with_options(on_gpus(4), options)
    found = shapes_of(cell)
    assert (found.sent_rows, found.rows) == (ROWS, rows)


def test_a_rank_keeps_at_most_three_stages_gathered() -> None:
    cell = on_gpus(4, {"training.local_batch_size": 1, "training.seq_len": 256})
    (rank,) = describe_ranks(cell)
    sizes = (10, 40, 20, 30)
    scale = 1_000_000
    parts = tuple(
        ModelPart((Layer(0, False, True, (Unit("layer", 4, size, size * scale, 4),)),))
        for size in sizes
    )
    rank = dataclasses.replace(
        rank, parts=parts, stages=[0, 2, 4, 6], num_stages=8, num_microbatches=6
    )
    rank = dataclasses.replace(rank, in_flight=[[2, 1, 1, 1], [1] * 4])
    found = predict_memory(with_options(cell, {"parallelism.pipeline_parallel_degree": 2}), rank)
    terms = {name: gib * GIB for name, gib in found.terms.items()}
    assert terms["gathered parameters"] == pytest.approx((40 + 30 + 20) * scale * 2)
    # Nothing is reduced between microbatches, so that all stages' gradients are there.
    assert terms["unreduced gradients"] == pytest.approx((10 + 40 + 20 + 30) * scale * 4)
    hidden = 256 * DIM * 2
    # Each keeps its input and, recomputed, its layer's.
    assert terms["activations"] == pytest.approx(5 * 2 * hidden)
    # Stages 2, 4 and 6 receive from both sides, stage 0 from the next one alone.
    assert terms["pipeline receive buffers"] == pytest.approx(7 * 6 * hidden)


CHUNKED, SCORED = {"loss.num_chunks": 8}, {"deepep.score_activations": True}
FLASH = {"model.attention": "flash_attention_4"}


def deepep(*options: dict[str, Any]) -> Cell:
    """The 16B with DeepEP on 4 H200."""
    merged = {name: value for one in options for name, value in one.items()}
    return on_gpus(4, merged, ep_backend="deepep")


def saving(*names: str) -> dict[str, Any]:
    return SELECTIVE | {LIST: list(names)}


@pytest.mark.titan
def test_671b_has_its_published_share_a_rank() -> None:
    cell = cell_of("deepseek_v3_671b")
    ranks = describe_ranks(cell)
    assert ranks[0].local_parameters == 2_542_205_696
    stored = predict_memory(cell, ranks[0]).terms
    state = stored["parameters"] + stored["optimizer state"] + stored["gradients"]
    assert state == pytest.approx(37.9, abs=0.05)
    assert max(predict_memory(cell, one).total for one in ranks) < 178 * 0.88


def test_logits_of_a_chunk_and_gradients_in_fp32() -> None:
    def logits(options: dict[str, Any]) -> float:
        cell = deepep(CHUNKED, options)
        (rank,) = describe_ranks(cell)
        shapes = shapes_of(cell)
        terms = memory_terms._loss(rank, shapes, RankLayers(cell, rank, shapes), True)
        return terms["logits and loss"]

    gradients = 4 * (TOKENS + WORDS) * DIM
    assert logits({}) == gradients + TOKENS / 8 * WORDS * 2
    assert logits(EAGER_LOSS) == gradients + TOKENS / 8 * WORDS * 14
    # A rank has half of the words, and so of the logits; the hidden states are whole.
    half = 4 * (TOKENS + WORDS / 2) * DIM
    assert logits(TP2) == half + max(TOKENS / 8 * WORDS, half / 2)


def test_scored_activations_keep_less() -> None:
    """No gradient needs the last product's rows, nor their return."""
    every = ("attention", "communication", "grouped_mm")
    plain, scored = (kept(deepep(saving(*every), one)) for one in ({}, SCORED))
    assert plain - scored == pytest.approx(MOE_LAYERS * 2 * (ROWS + TOKENS) * DIM)
    shapes = [shapes_of(cell) for cell in (deepep(), deepep(SCORED))]
    layers = [layer_bytes(one, moe=True) for one in shapes]
    assert layers[0].saved - layers[1].saved == pytest.approx(2 * ROWS * DIM)


def test_selective_recomputation_keeps_the_output_of_flash_attention() -> None:
    """Compiled, FlexAttention is out of its sight, and an operator is not."""
    selective, full = (
        kept(deepep(mode, FLASH)) - kept(deepep(mode)) for mode in (SELECTIVE, {MODE: "full"})
    )
    # 16 heads of 128 in BF16, and a number in FP32 for each, in all 27 layers.
    assert selective == pytest.approx(27 * TOKENS * 16 * (128 * 2 + 4))
    assert full == 0


def test_flash_attentions_backward_sums_in_fp32() -> None:
    cells = [deepep(kind) for kind in ({}, FLASH)]
    sizes = [shapes_of(cell) for cell in cells]
    # Without a feed-forward network, whose own temporaries are larger here.
    flex, flash = (layer_bytes(dataclasses.replace(one, dense_hidden=0), False) for one in sizes)
    # 4 sequences with room for 64 documents each, in blocks of 64 queries on Hopper.
    rows = TOKENS + (4 * 64 + 1) * 64
    assert flash.temporary - flex.temporary == 4 * rows * 16 * (192 + 2)
    assert flash.saved == flex.saved


@pytest.mark.parametrize(("capability", "block"), [(9.0, 64), (10.0, 128)])
def test_flash_attention_pads_documents_to_blocks(capability: float, block: int) -> None:
    cluster = this_machine(4, Gpu("a GPU", capability, 80))
    cell = dataclasses.replace(on_gpus(4), cluster=cluster)
    # 3 sequences with room for 64 documents each.
    assert padded_tokens(cell, 3) == 3 * 8192 + (3 * 64 + 1) * block
