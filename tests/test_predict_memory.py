"""Memory of a rank by hand from the 16B's sizes, and of a pipeline; other terms are golden."""

import dataclasses
import math
import random
from typing import Any

import pytest

from cookbook.base.family import Model
from cookbook.base.gpus import Gpu
from cookbook.config.cell import Cell
from cookbook.config.resolve import this_machine
from cookbook.predict.memory import GIB, StageMemory, predict_memory
from cookbook.predict.operators import Unit
from cookbook.predict.rank import Layer, ModelPart, describe_ranks, model_of
from cookbook.predict.shapes import destinations, padded_tokens
from tests.check_cells import cell_of, with_options
from tests.predict_machine import on_gpus

TOKENS, DIM, WORDS = 4 * 8192, 2048, 102400
TP2 = {"parallelism.tensor_parallel_degree": 2}
EAGER_LOSS = {"compile.components": ["model"]}


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


def test_two_stages_of_a_rank_without_fsdp_keep_gradients_beside_one_microbatch() -> None:
    parts = describe_ranks(cell := on_gpus(1))[0].parts * 2
    found = memory(cell, parts=parts, stages=(0, 1), in_flight=[[1, 1]], num_stages=2).terms
    assert found["gradients (not sharded)"] == found["parameters"]


def two_nodes(ep: int, ep_backend: str) -> Cell:
    cell = dataclasses.replace(on_gpus(8, ep_backend=ep_backend), nodes=2)
    return with_options(cell, {"parallelism.expert_parallel_degree": ep})


@pytest.mark.parametrize(("ep", "peers", "nodes"), [(4, 4, 0), (8, 8, 0), (16, 8, 2)])
def test_deepep_has_buffers_of_its_own(ep: int, peers: int, nodes: int) -> None:
    """Ten channels: 256 tokens a peer, and 128 of each node, sent and received."""
    standard, deepep = (memory(two_nodes(ep, name)).outside for name in ("standard", "deepep"))
    token = DIM * 2 + 6 * 12
    assert deepep - standard == pytest.approx(10 * token * (peers * 256 + 2 * nodes * 128) / GIB)


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


@pytest.mark.titan
def test_671b_has_its_published_share_a_rank() -> None:
    cell = cell_of("deepseek_v3_671b")
    ranks = describe_ranks(cell)
    assert ranks[0].local_parameters == 2_542_205_696
    stored = predict_memory(cell, ranks[0]).terms
    state = stored["parameters"] + stored["optimizer state"] + stored["gradients"]
    assert state == pytest.approx(37.9, abs=0.05)
    assert max(predict_memory(cell, one).total for one in ranks) < 178 * 0.88


@pytest.mark.parametrize(("capability", "block"), [(9.0, 64), (10.0, 128)])
def test_flash_attention_pads_documents_to_blocks(capability: float, block: int) -> None:
    cluster = this_machine(4, Gpu("a GPU", capability, 80))
    cell = dataclasses.replace(on_gpus(4), cluster=cluster)
    # 3 sequences with room for 64 documents each.
    assert padded_tokens(cell, 3) == 3 * 8192 + (3 * 64 + 1) * block
