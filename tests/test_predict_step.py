"""What a step adds up: rounds, FSDP, texts, the slowest rank and a pipeline; one fact at a time."""

import dataclasses
from typing import Any

import pytest

from cookbook.config.cell import Cell
from cookbook.predict import rank
from cookbook.predict.hardware import C4, LOCAL, Documents, Hardware
from cookbook.predict.hardware import slowest_attended_tokens as slowest
from cookbook.predict.rank import describe_ranks
from cookbook.predict.step import StepTime, predict_step
from tests.predict_machine import on_gpus, only

EP = "parallelism.expert_parallel_degree"
NONE = {"activation_checkpoint.mode": "none"}


def terms(
    cell: Cell, hardware: Hardware, documents: Documents = LOCAL, released: bool = False
) -> dict[str, float]:
    return dict(predict_step(cell, None, documents, hardware, released=released).terms_ms)


def test_the_terms_of_a_step_say_what_is_exposed() -> None:
    named = {"EP, exposed": 1.0, "dense GEMMs": 64.0, "TP, exposed": 2.0, "FSDP, exposed": 4.0}
    step = StepTime(0, named, 3.0, tokens_per_gpu=142.0, documents=C4)
    assert (step.exposed_ms, step.step_ms, step.largest) == (7.0, 71.0, "dense GEMMs")
    assert step.tokens_per_second_per_gpu == 2000.0
    assert step.as_mapping()["recompute_ms"] == 3.0


def gathered(prefix: str) -> int:
    """Elements of the 16B's FSDP modules of four ranks; each rank's experts are its own."""
    (one,) = describe_ranks(on_gpus(4))
    return sum(u.gathered for u in one.units if u.name.startswith(prefix) and u.shards > 1)


# Attention takes seconds in each layer.
SLOW_ATTENTION = {"flex_attention_forward_tflops": 0.001, "flex_attention_backward_tflops": 0.001}


def test_compute_beside_fsdp_loses_a_share_of_what_is_hidden() -> None:
    """All but the first gather and the last reduction is hidden; beside compute NCCL takes longer,
    and so does compute.
    """
    layers = gathered("layer") * 3 / 4 / 1e6
    first = gathered("tok_embeddings") * 3 / 4 / 1e6
    slow = only(
        nvlink_gb_per_s=1.0,
        nccl_beside_compute_share=0.5,
        compute_beside_nccl_share=0.75,
        **SLOW_ATTENTION,
    )
    found = terms(on_gpus(4), slow)
    assert found["FSDP, exposed"] == pytest.approx(first * (2 + 4))
    hidden = layers * (2 + 2 + 4) / 0.5
    assert found["compute beside FSDP"] == pytest.approx(0.25 * hidden)
    # The backward computes nothing: the gathers of the forward alone are hidden.
    half = dataclasses.replace(slow, flex_attention_backward_tflops=1e30)
    found = terms(on_gpus(4, NONE), half)
    assert found["compute beside FSDP"] == pytest.approx(0.25 * layers * 2 / 0.5)
    assert found["FSDP, exposed"] == pytest.approx(layers * (2 + 4) / 0.5 + first * (2 + 4))


def test_the_slowest_rank_is_one_of_those_that_exchange_tokens() -> None:
    """An EP group waits for its slowest rank; without EP all data-parallel ranks do."""
    facts = only(flex_attention_forward_tflops=1.0, flex_attention_backward_tflops=1.0)
    ep2, ep8, ep1 = (terms(on_gpus(8, {EP: ep}), facts)["attention"] for ep in (2, 8, 1))
    assert ep2 < 0.95 * ep8
    assert ep8 == ep1
    wanted = slowest(LOCAL, 8192, 4, 2) / slowest(LOCAL, 8192, 4, 8)
    assert ep2 / ep8 == pytest.approx(wanted)


# Two pipeline ranks, a stage each; what each does in order.
PIPELINES: dict[str, Any] = {
    "two microbatches": (
        [[0, "F", 0], [0, "F", 1], [0, "B", 0], [0, "B", 1]],
        [[1, "F", 0], [1, "B", 0], [1, "F", 1], [1, "B", 1]],
    ),
    "backward in halves": (
        [[0, "F", 0], [0, "I", 0], [0, "W", 0]],
        [[1, "F", 0], [1, "I", 0], [1, "W", 0]],
    ),
}


def pipelined(
    name: str, monkeypatch: pytest.MonkeyPatch, hardware: Hardware, **options: Any
) -> StepTime:
    actions = PIPELINES[name]
    count = 1 + max(microbatch for *_, microbatch in actions[0])
    answer = [
        {"stages": [stage], "in_flight": [[1]], "actions": own} for stage, own in enumerate(actions)
    ]
    monkeypatch.setattr(rank, "schedule_of", lambda *_: answer)
    cell = on_gpus(
        4,
        {
            EP: 2,
            "parallelism.pipeline_parallel_degree": 2,
            "parallelism.pipeline_parallel_schedule": "1F1B",
            "training.local_batch_size": count,
            **options,
        },
    )
    return predict_step(cell, None, LOCAL, hardware)


# 14 layers on the first rank, 13 on the second; each layer's forward takes 1, and so does what is
# computed again in its backward.
FORWARD = only(flex_attention_forward_tflops=0.001)


def test_the_busiest_rank_waits_for_the_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    step = pipelined("two microbatches", monkeypatch, FORWARD)
    assert step.rank == 0
    one = step.terms_ms["attention"] / (2 * 2 * 14)
    assert step.recompute_ms == pytest.approx(2 * 14 * one)
    # The first forward comes to the second rank after 14, its backward is done after 14 + 26, and
    # the last one of the first rank 13 + 13 + 14 later.
    assert step.terms_ms["pipeline bubble"] == pytest.approx((14 + 26 + 26 + 14 - 2 * 28) * one)


def test_two_thirds_of_a_backward_are_for_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    step = pipelined("backward in halves", monkeypatch, FORWARD)
    one = step.terms_ms["attention"] / (2 * 14)
    # Both forwards, the second rank's gradients of inputs, and the whole backward of the first.
    end = 14 + 13 + 13 * 2 / 3 + 14
    assert step.terms_ms["pipeline bubble"] == pytest.approx((end - 2 * 14) * one)


def test_a_pipeline_adds_gradients_of_each_microbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = only(memory_bandwidth_gb_per_s=1.0)
    steps = [pipelined(name, monkeypatch, facts) for name in PIPELINES]
    copies = [step.terms_ms["copies and casts, FSDP's packing"] for step in steps]
    monkeypatch.undo()
    # The second stage, which has the output layer, is the busier one.
    assert {step.rank for step in steps} == {2}
    (whole,) = describe_ranks(on_gpus(4, {EP: 2}))
    # The second microbatch adds its own: 10 bytes for each element of the last 13 layers.
    last = dataclasses.replace(whole.parts[0], layers=tuple(whole.layers[14:]), embedding=())
    sizes = [unit.gathered for unit in last.units]
    assert copies[0] - copies[1] == pytest.approx(10 * sum(sizes) / 1e6)
