"""DeepEP's exchanges are under way while the shared experts compute, in both passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.titan_ranks import run_ranks

pytestmark = pytest.mark.titan

RANKS, TOKENS, DIM = 2, 12, 32


def order_of_work(recomputed: bool) -> tuple[list[str], bool]:
    """What one layer did, in order; and whether all gradients were there in the end."""
    from types import SimpleNamespace

    from deep_ep import Buffer, utils
    from torch.utils.checkpoint import checkpoint
    from torchtitan.distributed import ParallelDims
    from torchtitan.models.moe.moe import MoEArgs, build_moe

    from cookbook.titan.stack_2026_02.expert_parallel import apply_moe_ep_tp
    from cookbook.titan.stack_2026_02.quantized_a2a import Precisions

    dims = ParallelDims(
        dp_replicate=1, dp_shard=RANKS, cp=1, tp=1, pp=1, ep=RANKS, etp=1, world_size=RANKS
    )
    dims.build_mesh()
    args = MoEArgs(num_experts=4, num_shared_experts=1, top_k=2, use_grouped_mm=False)
    layer: Any = build_moe(args, DIM, 16, "deepep")
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.3)
        layer.expert_bias.zero_()
        layer.tokens_per_expert.zero_()
    apply_moe_ep_tp(
        Precisions(dispatch_forward=False, combine_backward=False),
        SimpleNamespace(layers={"0": SimpleNamespace(moe=layer, moe_enabled=True)}),
        tp_mesh=None,
        ep_mesh=dims.get_optional_mesh("ep"),
        etp_mesh=None,
        ep_etp_mesh=None,
        use_deepep=True,
    )
    done: list[str] = []

    def noted(owner: Any, name: str, word: str) -> None:
        function = getattr(owner, name)

        def call(self: Any, *arguments: Any, **options: Any) -> Any:
            # An event that nothing was sent before is none that is waited for.
            if word != "wait" or self.arrivals:
                done.append(word)
            return function(self, *arguments, **options)

        setattr(owner, name, call)

    noted(Buffer, "dispatch", "dispatch")
    noted(Buffer, "combine", "combine")
    noted(utils.EventOverlap, "current_stream_wait", "wait")
    shared = layer.shared_experts
    for name, half in (("w3", "first half"), ("w2", "second half")):
        linear = getattr(shared, name)
        linear.register_forward_hook(lambda *_, half=half: done.append(half))
        linear.weight.register_post_accumulate_grad_hook(
            lambda _, half=half: done.append(f"gradients of the {half}")
        )
    layer.experts.w2.register_post_accumulate_grad_hook(
        lambda _: done.append("gradients of the experts")
    )
    x = torch.randn(1, TOKENS, DIM, requires_grad=True)
    out = checkpoint(layer, x, use_reentrant=False) if recomputed else layer(x)
    done.append("backward")
    out.square().sum().backward()
    assert x.grad is not None
    gradients = [x.grad, *(parameter.grad for parameter in layer.parameters())]
    return done, all(
        gradient is not None and bool(gradient.isfinite().all()) for gradient in gradients
    )


FORWARD = ["first half", "dispatch", "wait", "combine", "second half", "wait"]
BACKWARD = [
    "dispatch",
    "gradients of the second half",
    "wait",
    "gradients of the experts",
    "combine",
    "gradients of the first half",
    "wait",
]


def test_shared_experts_compute_while_rows_and_gradients_are_sent() -> None:
    for done, whole in run_ranks(order_of_work, RANKS, False):
        assert done == [*FORWARD, "backward", *BACKWARD]
        assert whole


def test_a_recomputed_layer_sends_gradients_before_it_computes_again() -> None:
    for done, whole in run_ranks(order_of_work, RANKS, True):
        # Which ends where all is there that the backward reads.
        assert done == [*FORWARD, "backward", BACKWARD[0], *FORWARD[:4], *BACKWARD[1:]]
        assert whole
