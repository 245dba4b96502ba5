"""Random routing: uniform under the group limit, alike over TP ranks, other on each DP rank."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn

from tests.titan_ranks import run_ranks
from tests.titan_refusal import refusal
from tests.titan_run import BF16, DEEPEP, EP2, MXFP8, STANDARD, TP2, job, run, train

pytestmark = pytest.mark.titan

TOKENS, EXPERTS, GROUPS, OPEN, TOP_K = 4096, 32, 8, 4, 8


def routed(dp_rank: int, layers: int = 2, batch: int = 2) -> list[torch.Tensor]:
    from cookbook.titan.tt_0_2_2.routing import route_at_random

    model = nn.Module()
    model.layers = nn.ModuleDict()
    for layer in range(layers):
        block = nn.Module()
        block.moe_enabled, block.moe, block.moe.router = True, nn.Module(), nn.Module()
        router: Any = block.moe.router
        router.num_experts, router.top_k = EXPERTS, TOP_K
        router.num_expert_groups, router.num_limited_groups = GROUPS, OPEN
        model.layers[str(layer)] = block
    mesh = SimpleNamespace(get_local_rank=lambda: dp_rank)
    dims = SimpleNamespace(get_optional_mesh=lambda name: mesh, cp=1)
    training = SimpleNamespace(local_batch_size=batch, seq_len=TOKENS // 2)
    config = SimpleNamespace(training=training, debug=SimpleNamespace(seed=7))
    route_at_random(model, dims, config, torch.device("cpu"))
    scores = torch.rand(TOKENS, EXPERTS)
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
    load = torch.bincount(experts.flatten(), minlength=EXPERTS)
    share = TOP_K / EXPERTS
    sigma = (len(experts) * share * (1 - share)) ** 0.5
    assert ((load - len(experts) * share).abs() < 3 * sigma).all()
    assert (experts.sort(1).values.diff(dim=1) > 0).all()
    groups = experts // (EXPERTS // GROUPS)
    assert max(len(set(row)) for row in groups.tolist()) == OPEN
    assert not torch.equal(*ranks[0])


def test_ranks_of_other_tokens_deal_other_experts_and_tp_ranks_the_same() -> None:
    assert torch.equal(routed(0)[0], routed(0)[0])
    assert not torch.equal(routed(0)[0], routed(1)[0])
    # The second sequence of a batch, here and on a rank of its own.
    assert torch.equal(routed(0)[0][TOKENS // 2 :], routed(1, batch=1)[0][: TOKENS // 2])


def test_contradicting_options_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    from cookbook.titan.tt_0_2_2.routing import chosen_routing

    def config(forced: bool, routing: str) -> Any:
        debug = SimpleNamespace(moe_force_load_balance=forced, moe_routing=routing)
        return SimpleNamespace(debug=debug)

    assert chosen_routing(config(False, "random")) == "random"
    assert chosen_routing(config(True, "trained")) == "round_robin"
    assert "leave one of them out" in refusal(
        lambda: chosen_routing(config(True, "random")), caplog
    )


RANDOM = ("--debug.moe_routing=random",)


def test_cells_agree_with_one_another_and_recomputation_is_exact(
    assets: Path, tmp_path: Path
) -> None:
    def trained(name: str, *options: str) -> dict[str, Any]:
        return run(assets, tmp_path / name, 2, *EP2, *options, *RANDOM)

    mode = "--activation_checkpoint.mode"
    option = "--activation_checkpoint.selective_ac_option"
    standard = trained("standard", *STANDARD, *BF16)
    for name, recomputed in {
        "full": (f"{mode}=full",),
        "but one layer": (f"{mode}=full", "--activation_checkpoint.num_layers_kept=1"),
        "by operator": (f"{mode}=selective", f"{option}=op"),
        "every second layer": (f"{mode}=selective", f"{option}=2"),
    }.items():
        again = trained(name, *STANDARD, *BF16, *recomputed)
        assert all(again[key] == standard[key] for key in ("losses", "grad_norms")), name
    for name, options, bound in (
        ("deepep", (*DEEPEP, *BF16), 3e-4),
        ("mxfp8", (*STANDARD, *MXFP8), 3e-3),
    ):
        losses = trained(name, *options)["losses"]
        assert losses == pytest.approx(standard["losses"], rel=bound)


def choices(arguments: list[str]) -> list[Any]:
    """The experts of this rank's first MoE layer, as its router chose them in training."""
    from torchtitan.models.moe.moe import TokenChoiceTopKRouter

    found: list[Any] = []
    forward = TokenChoiceTopKRouter.forward

    def note(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = forward(self, *args, **kwargs)
        found.append(result[1].tolist())
        return result

    TokenChoiceTopKRouter.forward = note
    try:
        train(arguments)
    finally:
        TokenChoiceTopKRouter.forward = forward
    return found[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(("layout", "same"), [(TP2, True), (EP2, False)], ids=["tp2", "dp2"])
def test_tp_ranks_choose_alike_and_data_parallel_ranks_do_not(
    layout: tuple[str, ...], same: bool, assets: Path, tmp_path: Path
) -> None:
    argv = job(assets, tmp_path / "out", *layout, *BF16, *RANDOM, steps=1)
    first, second = run_ranks(choices, 2, argv, seconds=200)
    assert (first == second) is same
