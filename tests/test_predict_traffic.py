"""FLOPs and bytes that a step sends, by hand."""

import dataclasses
from dataclasses import replace
from typing import Any

import pytest

from cookbook.config.cell import Cell
from cookbook.config.facts import Layout
from cookbook.predict.operators import Unit, fsdp_units, layer_operators
from cookbook.predict.rank import Layer, ModelPart, Rank, describe_ranks, model_of
from cookbook.predict.shapes import destinations, shapes_of
from cookbook.predict.traffic import Traffic, Work, count_work, step_traffic
from tests.check_cells import cell_of, with_options
from tests.predict_machine import on_gpus

TOKENS, DIM, MOE_LAYERS = 4 * 8192, 2048, 26
MODE = "activation_checkpoint.mode"
TP2 = {"parallelism.tensor_parallel_degree": 2}
PP, EP = "parallelism.pipeline_parallel_degree", "parallelism.expert_parallel_degree"
BATCH, BACKENDS = "training.local_batch_size", ("standard", "deepep", "mxfp8_a2a")


def work(cell: Cell) -> Work:
    return count_work(cell, describe_ranks(cell))


def rank_of(cell: Cell, *parts: ModelPart, **changed: Any) -> Rank:
    """The cell's first rank with other parts; a pipeline's is that of no pipeline, changed."""
    (rank,) = describe_ranks(with_options(cell, {PP: 1}))
    return dataclasses.replace(rank, parts=parts or rank.parts, **changed)


def test_flops_and_tokens_of_a_step() -> None:
    one, halves = work(on_gpus(4)), work(on_gpus(4, TP2))
    assert one.tokens_per_step == 4 * TOKENS
    assert one.flops_per_gpu_step == one.flops_per_token * TOKENS
    assert halves.tokens_per_step == 2 * TOKENS
    assert halves.flops_per_gpu_step == one.flops_per_gpu_step / 2


@pytest.mark.parametrize(("mode", "exchanges"), [("none", 4), ("full", 6)])
def test_bytes_that_deepep_sends(mode: str, exchanges: int) -> None:
    """Dispatch and combine, and their gradients; full recomputation sends the forward's again."""
    cell = dataclasses.replace(on_gpus(8, ep_backend="deepep"), nodes=2)
    cell = with_options(cell, {EP: 16, MODE: mode})
    found = work(cell).bytes_per_gpu_step["ep/deepep"]
    # Dealt out evenly a token goes to 2 of 16 ranks and to 1.125 of 2 nodes.
    ranks, nodes = (destinations(model_of(cell), places, "round_robin") for places in (16, 2))
    assert (ranks, nodes) == (2, 1.125)
    size = MOE_LAYERS * exchanges * TOKENS * DIM * 2
    sent = (found.nvlink, found.infiniband)
    assert sent == pytest.approx((size * ranks * 7 / 8, size * nodes / 2))


@pytest.mark.parametrize(("mode", "again"), [("none", 0), ("full", 4)])
def test_bytes_that_tp_sends(mode: str, again: int) -> None:
    found = work(on_gpus(4, {**TP2, MODE: mode})).bytes_per_gpu_step["tp"]
    # Four exchanges a layer and direction, recomputation, and two around each end.
    one = TOKENS * DIM * 2 / 2
    assert found == Traffic(nvlink=(27 * (8 + again) + 4) * one)


def test_the_rank_that_sends_most_is_shown() -> None:
    cell = on_gpus(4)
    rank = rank_of(cell)
    few = rank_of(cell, dataclasses.replace(rank.parts[0], layers=rank.parts[0].layers[:5]))
    for ranks in ((rank, few), (few, rank)):
        assert count_work(cell, ranks).bytes_per_gpu_step == work(cell).bytes_per_gpu_step


@pytest.mark.parametrize(
    ("policy", "pp", "gathers"),
    [("default", 1, 2), ("always", 1, 2), ("never", 1, 1), ("default", 2, 1)],
)
def test_bytes_of_fsdp(policy: str, pp: int, gathers: int) -> None:
    cell = on_gpus(4 * pp, {"parallelism.fsdp_reshard_after_forward": policy, PP: pp, EP: 4})
    units = (Unit("layer", 4, 200, 800, 4), Unit("layer.moe.experts", 1, 4000, 4000, 4))
    rank = rank_of(cell, ModelPart((), head=units), gradient_accumulation_steps=3)
    # Rings of 4 ranks pass 3/4 on: parameters of 2 bytes, gradients of 4. Each of 4 EP ranks has
    # its experts for itself.
    sent = step_traffic(cell, rank)["fsdp"]
    assert sent == Traffic(nvlink=3 * (gathers * 800 * 2 + 800 * 4) * 3 / 4)


@pytest.mark.parametrize(("stages", "sends"), [([0], 1), ([1], 2), ([3], 1), ([0, 2], 3)])
@pytest.mark.parametrize("nodes", [1, 2])
def test_bytes_of_a_pipeline(stages: list[int], sends: int, nodes: int) -> None:
    options = {PP: 2, EP: 4 * nodes, BATCH: 8, "training.seq_len": 512}
    cell = cell_of("deepseek_v3_16b", options, nodes=nodes)
    rank = rank_of(cell, stages=stages, num_stages=4, num_microbatches=8)
    size = sends * 8 * 512 * DIM * 2
    # Stages of just one node's ranks are neighbours over the network.
    wanted = Traffic(nvlink=size) if nodes == 1 else Traffic(infiniband=size)
    assert step_traffic(cell, rank)["pp"] == wanted


@pytest.mark.parametrize(
    ("backend", "once", "again"),
    [
        # Two dispatches and two combines of 2 bytes; MXFP8 is a byte and a scale for 32.
        ("standard", 4 * 2.0, 2 * 2.0),
        ("mxfp8_a2a", 2 * 2.0 + 2 * (1 + 1 / 32), 2.0 + 1 + 1 / 32),
    ],
)
@pytest.mark.parametrize(("mode", "repeats"), [("none", 0), ("full", 1), ("selective", 0)])
def test_bytes_of_an_exchange(
    backend: str, once: float, again: float, mode: str, repeats: int
) -> None:
    """Recomputation repeats the forward's two; by operator it saves received rows."""
    by_operator = {"activation_checkpoint.selective_ac_option": "op"}
    cell = on_gpus(4, {MODE: mode, BATCH: 1, "training.seq_len": 256, **by_operator})
    layers = tuple(Layer(index, index > 0, mode != "none") for index in range(3))
    rank = rank_of(cell, ModelPart(layers), gradient_accumulation_steps=5)
    found = step_traffic(cell, rank)[f"ep/{backend}"].nvlink
    # 256 tokens to 6 experts each; two layers with experts, five times.
    rows = 256 * 6 * DIM * 3 / 4 * 2 * 5
    assert found == pytest.approx(rows * (once + repeats * again))


@pytest.mark.titan
def test_work_is_torchtitans_count_and_lies_where_the_ranks_do() -> None:
    large, node = work(cell_of("deepseek_v3_671b")), work(on_gpus(4))
    assert (large.parameters, large.active_parameters) == (671_026_404_352, 37_552_282_624)
    assert large.tokens_per_step == 64 * 64 * 8192
    assert large.bytes_per_gpu_step["tp"].infiniband == 0 < large.bytes_per_gpu_step["tp"].nvlink
    assert large.bytes_per_gpu_step["pp"].nvlink == 0 < large.bytes_per_gpu_step["pp"].infiniband
    sent = [large.bytes_per_gpu_step[f"ep/{name}"].infiniband for name in BACKENDS]
    assert sent[0] > max(sent[1:])
    assert all(one.infiniband == 0 for one in node.bytes_per_gpu_step.values())
    # 4096 tokens x 8 rows of 7168 in BF16, six times a layer; 30 such layers on the fuller rank.
    rows = 4096 * 8 * 7168 * 2 * 6 * 30 * 64
    assert sent[0] == pytest.approx(rows * 24 / 32)


# Experts of 3 x 4 x 10.
MODEL = replace(model_of(on_gpus(4)), dim=10, expert_hidden=4, num_experts=8)


@pytest.mark.parametrize(
    ("degrees", "shards", "gathered", "local"),
    [
        # Two experts of 120 on each of 4 ranks.
        ({"dp_shard": 4, "ep": 4}, 1, 240, 240),
        ({"dp_shard": 8, "ep": 4}, 2, 240, 120),
        # EP takes TP's ranks too.
        ({"dp_shard": 4, "tp": 2, "ep": 4}, 2, 240, 120),
        # But where experts are cut over TP: half of each.
        ({"dp_shard": 4, "tp": 2, "ep": 4, "etp": 2}, 1, 120, 120),
        # As many shards as experts cut the experts, more of them the next axis: 4 rows of 10
        # become one, 10 rows of 4 three.
        ({"dp_shard": 8, "ep": 2}, 4, 480, 120),
        ({"dp_shard": 16, "ep": 4}, 4, 240, 2 * (10 + 12 + 10)),
    ],
)
def test_experts_are_divided_over_ep_tp_and_fsdp(
    degrees: dict[str, int], shards: int, gathered: int, local: int
) -> None:
    ones = dict.fromkeys(("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp"), 1)
    layout = Layout(world=64, **(ones | degrees))
    units = fsdp_units(layer_operators(MODEL, True), layout, in_layer=True)
    (own,) = (unit for unit in units if unit.name == "layer.moe.experts")
    assert (own.shards, own.gathered, own.local) == (shards, gathered, local)


def test_without_fsdp_nothing_is_cast() -> None:
    degrees = {"parallelism.tensor_parallel_degree": 4, "parallelism.expert_parallel_degree": 1}
    assert not shapes_of(on_gpus(4, degrees)).mixed_precision
