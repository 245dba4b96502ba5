"""FLOPs of a step, and how experts are divided, by hand."""

from dataclasses import replace

import pytest

from cookbook.config.cell import Cell
from cookbook.config.facts import Layout
from cookbook.predict import operators
from cookbook.predict.rank import Work, count_work, describe_ranks, model_of
from cookbook.predict.shapes import shapes_of
from tests.check_cells import cell_of
from tests.predict_machine import on_gpus

TOKENS = 4 * 8192
TP2 = {"parallelism.tensor_parallel_degree": 2}


def work(cell: Cell) -> Work:
    return count_work(cell, describe_ranks(cell))


def test_flops_and_tokens_of_a_step() -> None:
    one, halves = work(on_gpus(4)), work(on_gpus(4, TP2))
    assert one.tokens_per_step == 4 * TOKENS
    assert one.flops_per_gpu_step == one.flops_per_token * TOKENS
    assert halves.tokens_per_step == 2 * TOKENS
    assert halves.flops_per_gpu_step == one.flops_per_gpu_step / 2


@pytest.mark.titan
def test_work_is_torchtitans_count() -> None:
    large = work(cell_of("deepseek_v3_671b"))
    assert (large.parameters, large.active_parameters) == (671_026_404_352, 37_552_282_624)
    assert large.tokens_per_step == 64 * 64 * 8192


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
    units = operators.fsdp_units(operators.layer(MODEL, True), layout, in_layer=True)
    (own,) = (unit for unit in units if unit.name == "layer.moe.experts")
    assert (own.shards, own.gathered, own.local) == (shards, gathered, local)


def test_without_fsdp_nothing_is_cast() -> None:
    degrees = {"parallelism.tensor_parallel_degree": 4, "parallelism.expert_parallel_degree": 1}
    assert not shapes_of(on_gpus(4, degrees)).mixed_precision
