"""The router's load that a training logs: every token counts once, whatever the layout."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.titan_run import DEEPEP, EP2, EP4, NUM_LAYERS, PP2, SEQ_LEN, TP2, run

pytestmark = pytest.mark.titan

FULL = ("--activation_checkpoint.mode=full",)
SELECTIVE = (
    "--activation_checkpoint.mode=selective",
    "--activation_checkpoint.selective_ac_option=op",
)
# The first layer is dense.
LAYERS, EXPERTS, TOP_K = list(range(1, NUM_LAYERS)), 8, 3


def logged(assets: Path, tmp_path: Path, ranks: int, *options: str, **settings: Any) -> Any:
    """The lines of a training's file."""
    attempt = tmp_path / "attempt-0"
    attempt.mkdir(parents=True)
    run(assets, tmp_path / "out", ranks, *options, attempt=attempt, **settings)
    return [json.loads(line) for line in (attempt / "router_load.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("ranks", "options", "sequences"),
    [
        pytest.param(
            *(4, (*EP2, *PP2, *DEEPEP, *FULL), 4),
            id="deepep, pp 2, full",
            marks=pytest.mark.nightly,
        ),
        pytest.param(4, (*EP4, *TP2, *SELECTIVE), 4, id="tp 2, selective"),
        pytest.param(2, (*EP2, "--training.global_batch_size=8"), 8, id="accumulation"),
    ],
)
def test_counts_add_up_to_the_tokens_of_a_step(
    assets: Path, tmp_path: Path, ranks: int, options: tuple[str, ...], sequences: int
) -> None:
    lines = logged(assets, tmp_path, ranks, *options)
    assert [(line["counts_from"], line["step"]) for line in lines] == [(1, 1), (2, 2)]
    for line in lines:
        assert line["layers"] == LAYERS and line["forced"] is False
        for layer, counts in enumerate(line["counts"]):
            assert len(counts) == EXPERTS
            assert sum(counts) == sequences * SEQ_LEN * TOP_K
            mean = sum(counts) / EXPERTS
            assert line["busiest_over_mean"][layer] == pytest.approx(max(counts) / mean, abs=1e-4)
            assert line["starved_experts"][layer] == sum(count < 0.1 * mean for count in counts)
    # Routing is real: no layer is balanced, and no two are alike.
    assert len({tuple(counts) for counts in lines[0]["counts"]}) == len(LAYERS)


def test_what_is_shown_is_the_sum_since_the_last_logged_step(assets: Path, tmp_path: Path) -> None:
    every = logged(assets, tmp_path / "a", 2, *EP2, steps=4)
    # Of 4 steps the first and each second one is logged.
    folder = tmp_path / "b"
    options = (
        "--metrics.log_freq=2",
        "--metrics.enable_tensorboard",
        "--metrics.save_tb_folder=tb",
    )
    lines = logged(assets, folder, 2, *EP2, *options, steps=4)
    assert [(line["first_step"], line["step"]) for line in lines] == [(1, 1), (2, 2), (3, 4)]
    summed = [
        [one + other for one, other in zip(*rows, strict=True)]
        for rows in zip(every[2]["counts"], every[3]["counts"], strict=True)
    ]
    assert lines[2]["counts"] == summed
    (events,) = folder.glob("out/tb/**/events*")
    shown = EventAccumulator(str(events))
    shown.Reload()
    busiest = lines[2]["busiest_over_mean"]
    for name, value in {
        "router_load/busiest_over_mean": max(busiest),
        "router_load/starved_experts": sum(lines[2]["starved_experts"]),
        **{
            f"router_load/busiest_over_mean/layer_{layer:02}": found
            for layer, found in zip(LAYERS, busiest, strict=True)
        },
    }.items():
        last = shown.Scalars(name)[-1]
        assert (last.step, last.value) == (4, pytest.approx(value)), name


def test_forced_balance_is_said_and_is_even(assets: Path, tmp_path: Path) -> None:
    lines = logged(assets, tmp_path, 2, *EP2, "--debug.moe_force_load_balance")
    for line in lines:
        assert line["forced"] is True
        assert line["busiest_over_mean"] == [1.0] * len(LAYERS)
        assert line["starved_experts"] == [0] * len(LAYERS)


class Counting(nn.Module):
    """What stands for an MoE layer: it counts as TorchTitan's does, three tokens to each expert."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("tokens_per_expert", torch.zeros(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.tokens_per_expert.add_(3)
        return x * self.weight


def test_of_many_logged_steps_the_counts_of_few_are_kept_and_none_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cookbook.titan.tt_0_2_2.routing import RouterLoad, count_load

    model, block = nn.Module(), nn.Module()
    block.moe_enabled, block.moe = True, Counting()
    model.layers = nn.ModuleDict({"1": block})
    count_load(model)
    monkeypatch.setenv("COOKBOOK_ATTEMPT_DIR", str(tmp_path))
    load = RouterLoad(
        [model],
        SimpleNamespace(n_layers=2, moe_args=SimpleNamespace(num_experts=EXPERTS)),
        SimpleNamespace(get_optional_mesh=lambda name: None),
        SimpleNamespace(
            debug=SimpleNamespace(moe_force_load_balance=False, moe_routing="trained"),
            training=SimpleNamespace(steps=1000),
            metrics=SimpleNamespace(log_freq=10),
        ),
        writes=True,
    )
    for logged_step in range(10, 1001, 10):
        for _ in range(10):
            block.moe(torch.ones(1)).backward()
            block.moe.tokens_per_expert.zero_()
        load.log(logged_step - 9, logged_step)
    lines = [json.loads(line) for line in (tmp_path / "router_load.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(10, 1001, 10))
    kept = [line for line in lines if "counts" in line]
    # No more than fifty times.
    assert [(line["counts_from"], line["step"]) for line in kept] == [
        (first, first + 19) for first in range(1, 1001, 20)
    ]
    assert all(line["counts"] == [[60] * EXPERTS] for line in kept)


def test_a_file_that_cannot_be_written_ends_no_training(assets: Path, tmp_path: Path) -> None:
    attempt = tmp_path / "attempt-0"
    (attempt / "router_load.jsonl").mkdir(parents=True)
    found = run(assets, tmp_path / "out", 1, attempt=attempt)
    assert len(found["losses"]) == 2
    (said,) = [text for text in found["said"] if "no more router load" in text]
    assert "Is a directory" in said
