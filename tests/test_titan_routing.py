"""The router: its load in the log, every token once in any layout; experts dealt at random."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn

from tests.titan_run import (
    BF16,
    DEEPEP,
    EP2,
    EP4,
    FULL,
    NUM_LAYERS,
    PP2,
    SELECTIVE,
    SEQ_LEN,
    STANDARD,
    TP2,
    active,
    refusal,
    run,
)

pytestmark = pytest.mark.titan

# The first layer is dense.
LAYERS, EXPERTS, TOP_K = list(range(1, NUM_LAYERS)), 8, 3


def logged(assets: Path, tmp_path: Path, ranks: int, *options: str, **settings: Any) -> Any:
    """The lines of a training's file."""
    attempt = tmp_path / "attempt-0"
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


def test_forced_balance_is_said_and_is_even(assets: Path, tmp_path: Path) -> None:
    lines = logged(assets, tmp_path, 2, *EP2, "--debug.moe_force_load_balance")
    assert len(lines) == 2
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
    from cookbook.titan.tt_0_2_2.routing import RouterLoad, count_tokens

    model, block = nn.Module(), nn.Module()
    block.moe_enabled, block.moe = True, Counting()
    model.layers = nn.ModuleDict({"1": block})
    count_tokens(model)
    monkeypatch.setenv("COOKBOOK_ATTEMPT_DIR", str(tmp_path))
    processor = SimpleNamespace(
        model_parts=[model],
        model_args=SimpleNamespace(n_layers=2, moe_args=SimpleNamespace(num_experts=EXPERTS)),
        parallel_dims=SimpleNamespace(get_optional_mesh=lambda name: None),
        job_config=SimpleNamespace(
            debug=SimpleNamespace(moe_force_load_balance=False, moe_routing="trained"),
            training=SimpleNamespace(steps=1000),
            # Each logs at 50 of the 100 steps below.
            metrics=SimpleNamespace(log_freq=20),
            validation=SimpleNamespace(enable=True, freq=20),
        ),
    )
    load = RouterLoad(processor, first_step=1, writes=True)
    for logged_step in range(10, 1001, 10):
        for _ in range(10):
            block.moe(torch.ones(1)).backward()
            block.moe.tokens_per_expert.zero_()
        shown = load.log(logged_step)
    busiest = "router_load/busiest_over_mean"
    assert shown == {busiest: 1, f"{busiest}/layer_01": 1, "router_load/starved_experts": 0}
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
    # Of a rank alone.
    assert active(found)["patches_applied"] == ["hidden-states-as-under-fsdp"]
    (said,) = [text for text in found["said"] if "no more router load" in text]
    assert "Is a directory" in said


TOKENS, DEALT, GROUPS, OPEN, CHOSEN = 4096, 32, 8, 4, 8


def routed(dp_rank: int, layers: int = 2, batch: int = 2) -> list[torch.Tensor]:
    from cookbook.titan.tt_0_2_2.routing import route_at_random

    model = nn.Module()
    model.layers = nn.ModuleDict()
    for layer in range(layers):
        block = nn.Module()
        block.moe_enabled, block.moe, block.moe.router = True, nn.Module(), nn.Module()
        router: Any = block.moe.router
        router.num_experts, router.top_k = DEALT, CHOSEN
        router.num_expert_groups, router.num_limited_groups = GROUPS, OPEN
        model.layers[str(layer)] = block
    # The mesh of ranks with other tokens; TP ranks share theirs.
    meshes = {"loss": SimpleNamespace(get_local_rank=lambda: dp_rank)}
    dims = SimpleNamespace(get_optional_mesh=meshes.__getitem__, cp=1)
    training = SimpleNamespace(local_batch_size=batch, seq_len=TOKENS // 2)
    config = SimpleNamespace(training=training, debug=SimpleNamespace(seed=7))
    route_at_random(model, dims, config, torch.device("cpu"))
    scores = torch.rand(TOKENS, DEALT)
    found = []
    for block in model.layers.values():
        router = block.moe.router
        experts, chosen = router._debug_force_load_balance_routing(scores)
        assert torch.equal(chosen, scores.gather(1, experts))
        assert torch.equal(router._debug_force_load_balance_routing(scores)[0], experts)
        found.append(experts)
    return found


def test_experts_are_dealt_uniformly_under_the_group_limit() -> None:
    ranks = [routed(rank) for rank in range(8)]
    experts = torch.cat([layer for rank in ranks for layer in rank])
    load = torch.bincount(experts.flatten(), minlength=DEALT)
    share = CHOSEN / DEALT
    sigma = (len(experts) * share * (1 - share)) ** 0.5
    assert ((load - len(experts) * share).abs() < 3 * sigma).all()
    assert (experts.sort(1).values.diff(dim=1) > 0).all()
    groups = experts // (DEALT // GROUPS)
    assert max(len(set(row)) for row in groups.tolist()) == OPEN
    assert not torch.equal(*ranks[0])


def test_ranks_of_other_tokens_deal_other_experts_and_tp_ranks_the_same() -> None:
    assert torch.equal(routed(0)[0], routed(0)[0])
    assert not torch.equal(routed(0)[0], routed(1)[0])
    # The second sequence of a batch, here and on a rank of its own.
    assert torch.equal(routed(0)[0][TOKENS // 2 :], routed(1, batch=1)[0][: TOKENS // 2])


def test_contradicting_options_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    from cookbook.titan.tt_0_2_2.routing import chosen_routing

    def chosen(forced: bool, routing: str) -> str:
        debug = SimpleNamespace(moe_force_load_balance=forced, moe_routing=routing)
        return chosen_routing(SimpleNamespace(debug=debug))

    assert (chosen(False, "random"), chosen(True, "trained")) == ("random", "round_robin")
    assert "leave one of them out" in refusal(lambda: chosen(True, "random"), caplog)


def test_recomputation_deals_the_same_experts(assets: Path, tmp_path: Path) -> None:
    options = (*EP2, *STANDARD, *BF16, "--debug.moe_routing=random")
    plain = run(assets, tmp_path / "plain", 2, *options)
    again = run(assets, tmp_path / "again", 2, *options, *SELECTIVE)
    assert active(again)["moe_routing"] == "random"
    assert all(again[key] == plain[key] for key in ("losses", "grad_norms"))
