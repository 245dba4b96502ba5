"""The counted ranks of a model small enough to follow, and pipelines played through by hand.

`test_titan_views.py` holds the same to what TorchTitan builds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cookbook.base.family import Model
from cookbook.config.options import Layout
from cookbook.predict import rank
from cookbook.predict.operators import Unit, fsdp_units, layer_operators
from cookbook.predict.rank import Actions, describe_ranks, play, stage_layers
from tests.check_cells import cell_of, with_options
from tests.predict_machine import on_gpus

EP = "parallelism.expert_parallel_degree"
MODEL = Model(
    dim=10,
    heads=2,
    kv_heads=2,
    qk_norm=False,
    q_lora=0,
    kv_lora=6,
    nope=5,
    rope=3,
    v_head=7,
    dense_hidden=30,
    expert_hidden=4,
    shared_hidden=8,
    num_experts=8,
    top_k=2,
    vocab=1000,
    gate_bias=False,
    n_layers=3,
    n_dense_layers=1,
    num_expert_groups=None,
    num_limited_groups=None,
    attn_type="sdpa",
    by_document=False,
)
# Queries of 2 heads of 8; the latent of 6 and 3 for RoPE, its norm; keys and values of 2 heads of
# 5 + 7; the output of 2 x 7; and both of the layer's norms.
ATTENTION = 2 * 8 * 10 + (6 + 3) * 10 + 6 + 2 * (5 + 7) * 6 + 10 * 2 * 7 + 10 + 10
DENSE = ATTENTION + 3 * 30 * 10
# The router, and two shared experts as one.
ROUTED = ATTENTION + 8 * 10 + 3 * (2 * 4) * 10
EXPERTS = 8 * 3 * 4 * 10


def test_parameters_and_flops_of_a_small_model() -> None:
    cell = with_options(on_gpus(4), {"training.seq_len": 100})
    (one,) = describe_ranks(cell, MODEL)
    rest = DENSE + 2 * ROUTED + 10 + 1000 * 10
    assert one.parameters == rest + 10_000 + 2 * EXPERTS
    # Two of eight experts see a token.
    active = rest + 2 * EXPERTS // 4
    assert one.active_parameters == active + 10_000
    # TorchTitan's count: 6 a parameter but for the embedding's, and 6 for every pair's dimensions.
    assert one.flops_per_token == 6 * active + 6 * 3 * 2 * (5 + 3 + 7) * 100


def test_low_rank_queries_and_a_gates_bias_are_counted() -> None:
    models = (MODEL, replace(MODEL, q_lora=9), replace(MODEL, gate_bias=True))
    sizes = [sum(one.numel for one in layer_operators(model, True)) for model in models]
    assert sizes[0] == ROUTED + EXPERTS
    # 160 become 9 x 10, a norm of 9, and 16 x 9.
    assert sizes[1] - sizes[0] == 9 * 10 + 9 + 16 * 9 - 160
    assert sizes[2] - sizes[0] == 8


def units(**degrees: int) -> list[Unit]:
    ones = dict.fromkeys(("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp"), 1)
    return fsdp_units(layer_operators(MODEL, True), Layout(world=64, **(ones | degrees)), 1)


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
    (own,) = (unit for unit in units(**degrees) if unit.name == "layers.1.moe.experts")
    assert (own.shards, own.gathered, own.local) == (shards, gathered, local)


def test_without_ep_a_layer_and_its_experts_are_one_module() -> None:
    # The latent's 9 rows of 10 are cut into 5 and 4.
    local = (ROUTED + EXPERTS) // 2 + 5
    assert units(dp_shard=2) == [Unit("layers.1", 2, local, ROUTED + EXPERTS, 4)]
    # TP halves all but the latent, the norms and the router.
    (cut,) = units(tp=2)
    whole = 90 + 6 + 10 + 10 + 80
    assert cut.gathered == (ROUTED + EXPERTS - whole) // 2 + whole


@pytest.mark.parametrize(
    ("arguments", "stages"),
    [
        ((1, 3), [[0, 1, 2]]),
        # Embedding and output count as a layer each; those at the front get the rest.
        ((2, 6), [[0, 1, 2], [3, 4, 5]]),
        ((2, 7), [[0, 1, 2, 3], [4, 5, 6]]),
        ((2, 6, 3, 0), [[0, 1], [2, 3, 4, 5]]),
        ((3, 7, 0, 2), [[0, 1, 2], [3, 4, 5], [6]]),
    ],
)
def test_layers_of_stages(arguments: tuple[int, ...], stages: list[list[int]]) -> None:
    assert stage_layers(*arguments) == stages


def recomputed(**options: Any) -> list[bool]:
    settings = {f"activation_checkpoint.{name}": value for name, value in options.items()}
    (one,) = describe_ranks(with_options(on_gpus(4), settings), replace(MODEL, n_layers=4))
    return [layer.recomputed for layer in one.layers]


def test_which_layers_are_computed_again() -> None:
    assert recomputed(mode="none") == recomputed(mode="memory_budget") == [False] * 4
    assert recomputed(mode="full") == [True] * 4
    assert recomputed(mode="selective", selective_ac_option="op") == [True] * 4
    # Every second one: the second, not the first.
    assert recomputed(mode="selective", selective_ac_option="2") == [False, True, False, True]
    assert recomputed(mode="selective", selective_ac_option="0") == [True] * 4
    # The last ones may be kept.
    assert recomputed(mode="full", num_layers_kept=1) == [True] * 3 + [False]
    every = {"mode": "selective", "selective_ac_option": "2"}
    assert recomputed(**every, num_layers_kept=1) == [False, True, False, False]
    assert recomputed(mode="full", num_layers_kept=4) == [False] * 4
    assert recomputed(mode="full", num_layers_kept=9) == [False] * 4


def test_replicas_count_in_the_rounds_of_a_step() -> None:
    options = {"parallelism.data_parallel_replicate_degree": 2, EP: 2}
    for total, rounds in ((-1, 1), (16, 1), (48, 3)):
        cell = with_options(on_gpus(4, options), {"training.global_batch_size": total})
        (one,) = describe_ranks(cell, MODEL)
        assert one.gradient_accumulation_steps == rounds


def test_parameters_are_cast_where_there_is_fsdp() -> None:
    tp, etp = ("parallelism.tensor_parallel_degree", "parallelism.expert_tensor_parallel_degree")
    cells = (on_gpus(4, {tp: 4, EP: 1}), on_gpus(4, {EP: 1}), on_gpus(4))
    found = [describe_ranks(cell, MODEL)[0] for cell in cells]
    assert [one.mixed_precision for one in found] == [False, True, True]
    assert found[2].groups == {"batch": 4, "loss": 4, "fsdp": 4, "ep": 4}
    (cut,) = describe_ranks(on_gpus(8, {EP: 2, tp: 2, etp: 2}), MODEL)
    twos = dict.fromkeys(("tp", "ep", "efsdp", "etp"), 2)
    assert cut.groups == dict.fromkeys(("batch", "loss", "fsdp"), 4) | twos


def test_stored_elements_have_the_training_precision() -> None:
    cell = with_options(on_gpus(4), {"training.dtype": "bfloat16"})
    assert {unit.bytes for unit in describe_ranks(cell, MODEL)[0].units} == {2}


def test_stages_by_layers_and_microbatches_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def actions_of(schedule: str, ranks: int, per_rank: int, count: int) -> Actions:
        asked.append((schedule, ranks, per_rank, count))
        stages = tuple([rank + turn * ranks for turn in range(per_rank)] for rank in range(ranks))
        return Actions(stages, ([[1]],) * ranks, ([],) * ranks, range(count))

    monkeypatch.setattr(rank, "actions_of", actions_of)
    options = {
        "parallelism.pipeline_parallel_degree": 2,
        "parallelism.pipeline_parallel_schedule": "interleaved1f1b",
        "parallelism.pipeline_parallel_microbatch_size": 2,
        "training.local_batch_size": 8,
        EP: 8,
    }
    cell = cell_of("deepseek_v3_16b", options, nodes=2)
    small = replace(MODEL, n_layers=6)
    first, second = describe_ranks(cell, small)
    # Four stages of the schedule's own two a rank: 6 layers and both ends.
    assert asked == [("Interleaved1F1B", 2, 2, 4)]
    assert [[len(part.layers) for part in one.parts] for one in (first, second)] == [[1, 2], [2, 1]]
    assert (first.rank, second.rank) == (0, 8)
    assert first.parts[0].embedding and second.parts[1].head
    assert first.num_microbatches == 4
    # At two a stage the ends count too.
    for layers, stages in ((2, 4), (1, 8)):
        by_layers = {"parallelism.pipeline_parallel_layers_per_stage": layers}
        assert describe_ranks(with_options(cell, by_layers), small)[0].num_stages == stages


def played(actions: Any, transfer_ms: float = 0.0, **times_ms: float) -> Any:
    times = {(int(name[1:]), name[0]): time for name, time in times_ms.items()}
    return play(actions, times, max(stage for stage, _ in times), transfer_ms)


def test_a_transfer_takes_time_between_ranks_alone() -> None:
    two = [[[0, "F", 0], [0, "B", 0]], [[1, "F", 0], [1, "B", 0]]]
    times = {"F0": 1.0, "F1": 2.0, "B1": 4.0, "B0": 3.0}
    there_and_back = played(two, 10.0, **times)
    assert there_and_back.end_ms == 1 + 10 + 2 + 4 + 10 + 3
    assert there_and_back.busy_ms == (4, 6)
    assert (there_and_back.busiest, there_and_back.bubble_ms) == (1, 24)
    one = [[[0, "F", 0], [1, "F", 0], [1, "B", 0], [0, "B", 0]]]
    assert played(one, 10.0, **times).end_ms == 10


def test_what_is_late_is_waited_for_and_what_is_early_is_not() -> None:
    actions = [[[0, "F", 0], [0, "F", 1]], [[1, "F", 0], [1, "F", 1]]]
    # The second rank is faster than the first, and then slower.
    assert played(actions, F0=3.0, F1=1.0).end_ms == 3 + 3 + 1
    assert played(actions, F0=1.0, F1=3.0).end_ms == 1 + 3 + 3
    assert played(actions, F0=3.0, F1=1.0).bubble_ms == 1


def test_a_gradient_is_handed_on_before_that_of_the_weights_is_there() -> None:
    halves = [[[0, "F", 0], [0, "I", 0], [0, "W", 0]], [[1, "F", 0], [1, "I", 0], [1, "W", 0]]]
    found = played(halves, F0=1.0, F1=1.0, I1=2.0, I0=2.0, W1=5.0, W0=1.0)
    # The second rank's W ends at 9; the first one's at 1 + 1 + 2 + 2 + 1.
    assert found.end_ms == 9
    assert found.busy_ms == (4, 8)
