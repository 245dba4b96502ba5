"""The order of DeepEP's steps in a layer, what it counts, and what must not be filled meanwhile."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn

from tests.titan_ranks import run_ranks

pytestmark = pytest.mark.titan

DIM, EXPERTS, TOP_K, TOKENS = 32, 4, 2, 12


def parallel_layer(tp: int) -> Any:
    """A DeepEP layer over two ranks, by TorchTitan's plan and the cookbook's."""
    from torchtitan.distributed import ParallelDims
    from torchtitan.models.moe.moe import MoEArgs, build_moe

    from cookbook.titan.stack_2026_02.expert_parallel import apply_moe_ep_tp
    from cookbook.titan.stack_2026_02.quantized_a2a import Precisions

    dims = ParallelDims(
        dp_replicate=1, dp_shard=2 // tp, cp=1, tp=tp, pp=1, ep=2, etp=1, world_size=2
    )
    args = MoEArgs(num_experts=EXPERTS, num_shared_experts=1, top_k=TOP_K, use_grouped_mm=False)
    torch.manual_seed(0)
    layer = build_moe(args, DIM, 16, "deepep").double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.3)
    layer.expert_bias = torch.zeros(EXPERTS, dtype=torch.float64)
    layer.tokens_per_expert = torch.zeros(EXPERTS, dtype=torch.float64)
    block = nn.Module()
    block.moe, block.moe_enabled = layer, True
    model: Any = SimpleNamespace(layers={"0": block})
    meshes = {
        "tp_mesh": dims.get_optional_mesh("tp"),
        "ep_mesh": dims.get_optional_mesh("ep"),
        "etp_mesh": None,
        "ep_etp_mesh": None,
    }
    apply_moe_ep_tp(Precisions(False, False), model, use_deepep=True, **meshes)
    return layer


def observe(tp: int) -> dict[str, Any]:
    """What happens in two forwards of the layer, in order."""
    import deep_ep
    from torch.utils import deterministic

    from cookbook.titan.stack_2026_02 import activity, deepep

    layer, events, fills = parallel_layer(tp), [], []
    layout = deep_ep.Buffer.get_dispatch_layout

    def noted_layout(*args: Any, **kwargs: Any) -> Any:
        fills.append(deterministic.fill_uninitialized_memory)
        return layout(*args, **kwargs)

    def noted(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            events.append(name)
            return function(*args, **kwargs)

        return call

    deep_ep.Buffer.get_dispatch_layout = noted_layout
    module: Any = deepep
    module.combine_tokens = noted("combine", module.combine_tokens)
    module.sync_combine = noted("wait", module.sync_combine)
    layer.shared_experts.register_forward_hook(lambda *_: events.append("shared experts"))
    deterministic.fill_uninitialized_memory = True
    counts = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        layer(torch.randn(1, TOKENS // tp, DIM, dtype=torch.float64))
        counts.append(layer.tokens_per_expert.clone())
    return {
        "events": events,
        "fills": fills,
        "filled afterwards": deterministic.fill_uninitialized_memory,
        "counts": counts,
        "corrections": sorted(activity.corrections),
    }


@functools.cache
def observed(tp: int) -> list[dict[str, Any]]:
    return run_ranks(observe, 2, tp)


def test_the_shared_experts_run_while_the_combine_is_under_way() -> None:
    for found in observed(1):
        assert found["events"] == ["combine", "shared experts", "wait"] * 2


def test_tokens_are_counted_from_step_to_step() -> None:
    for found in observed(1):
        first, second = found["counts"]
        assert int(first.sum()) == TOKENS * TOP_K
        # TorchTitan sets them back after each step; gradient accumulation adds to them.
        assert int(second.sum()) == 2 * TOKENS * TOP_K
        assert bool((second >= first).all())


def test_nothing_is_filled_while_deepep_counts() -> None:
    for found in observed(1):
        assert found["fills"] == [False, False] and found["filled afterwards"] is True


def test_corrections_have_their_names() -> None:
    for found in observed(1):
        assert found["corrections"] == ["deepep-padded-groups"]
    for found in observed(2):
        assert found["corrections"] == [
            "deepep-padded-groups",
            "deepep-tokens-split-over-tp",
            "router-gradients-summed-over-tp",
            "shared-expert-gradients-not-summed-over-tp",
        ]


def send_with_zero_scores() -> tuple[int, list[int]]:
    import torch.distributed as dist

    from cookbook.titan.stack_2026_02.deepep import dispatch_tokens

    group: Any = dist.group.WORLD
    experts = torch.tensor([[0, 2], [1, 3], [0, 3]])
    scores = torch.tensor([[0.5, 0.0], [0.0, 0.5], [0.5, 0.5]])
    x = torch.ones(3, DIM, dtype=torch.bfloat16)
    _, _, state = dispatch_tokens(x, experts, scores, EXPERTS, group)
    return int((state.plan.rows >= 0).sum()), (state.plan.slots >= 0).sum(1).tolist()


def test_a_copy_without_a_score_is_not_sent() -> None:
    # Each rank has experts 0, 1 or 2, 3; of each rank's six copies two count for nothing.
    (first, _), (second, _) = run_ranks(send_with_zero_scores, 2)
    assert (first, second) == (2 * 2, 2 * 2)
