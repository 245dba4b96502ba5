"""The MoE layer and the expert parallelism of the EP backend `deepep`, corrected and overlapped.

What differs from TorchTitan's classes is said at each of these. TorchTitan's modules raise where
DeepEP is not installed, and so does this one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
import torchtitan.models.moe.utils as moe_utils
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torchtitan.distributed.expert_parallel import DeepEPExpertParallel
from torchtitan.models.moe.moe import FeedForward
from torchtitan.models.moe.moe_deepep import DeepEPMoE

from cookbook.titan.any_stack.expert_groups import GroupPlan, collect, plan_groups, spread
from cookbook.titan.any_stack.token_split import (
    Share,
    gather_sequence,
    sum_to_shares,
    take_share,
)
from cookbook.titan.stack_2026_02 import activity
from cookbook.titan.stack_2026_02.deepep_exchange import (
    Exchange,
    Routing,
    arrive,
    combine,
    dispatch,
    leave,
)


class PaddedExpertParallel(DeepEPExpertParallel):
    """TorchTitan's DeepEP expert parallelism, with expert groups padded for the grouped GEMMs.

    The experts' input is (rows, Routing), and nothing that FSDP, which stands before this, would
    cast: DeepEP no longer waits for that.
    """

    _state: tuple[Exchange, GroupPlan, torch.Tensor | None] | None

    def _token_dispatch(
        self, mod: nn.Module, inputs: tuple[Any, ...], device_mesh: DeviceMesh
    ) -> tuple[torch.Tensor, torch.Tensor]:
        routing: Routing
        rows, routing = inputs
        received, experts, scores, counts = dispatch(rows, routing, device_mesh.get_group())
        plan = plan_groups(experts, counts, moe_utils.TOKEN_GROUP_ALIGN_SIZE_M)
        before, after = (scores, None) if self.score_before_experts else (None, scores)
        self._state = routing.exchange, plan, after
        activity.dispatches.add("deepep")
        activity.corrections.add("deepep-padded-groups")
        return spread(received, before, plan), plan.sizes

    def _token_combine(
        self, mod: nn.Module, routed_output: torch.Tensor, device_mesh: DeviceMesh
    ) -> torch.Tensor:
        state, self._state = self._state, None
        assert state is not None
        exchange, plan, scores = state
        return combine(collect(routed_output, scores, plan), exchange)


class HalvedFeedForward(FeedForward):
    """TorchTitan's shared experts in two halves, each under one of DeepEP's exchanges."""

    def forward(
        self,
        x: torch.Tensor | None = None,
        halves: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> Any:
        """The first half of `x` (tokens, features): its gate and up projections; else the rest."""
        if x is not None:
            return self.w1(x), self.w3(x)
        assert halves is not None
        gate, up = halves
        return self.w2(nn.functional.silu(gate) * up)


class SplitMoE(DeepEPMoE):
    """TorchTitan's DeepEP layer, which sends each token from one TP rank only.

    Its shared experts are `HalvedFeedForward`.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output for this rank's tokens.

        Under TP `x` is this rank's share of every sequence, (batch, length / TP, features), and so
        is what is returned. The experts get the share itself, before any gather, and their output
        is added after the shared experts' output has been summed over TP: the split copies nothing.
        """
        tp_mesh = getattr(self, "cookbook_tp_mesh", None)
        mine = x.to_local() if isinstance(x, DTensor) else x
        whole = mine if tp_mesh is None else gather_sequence(mine, tp_mesh)
        length, features = whole.shape[1:]

        tokens = whole.view(-1, features)
        top_scores, experts, counts = self.router(tokens, self.expert_bias)
        # All tokens are counted, the same on every TP rank: the sum for the expert bias is taken
        # over other ranks only.
        if self.load_balance_coeff is not None:
            with torch.no_grad():
                self.tokens_per_expert.add_(counts)
        if tp_mesh is not None:
            share = Share.of_mesh(length, tp_mesh)
            top_scores, experts = take_share(top_scores, share), take_share(experts, share)
            activity.corrections.add("deepep-tokens-split-over-tp")

        rows = mine.reshape(-1, features)
        rows, routing = leave(rows, top_scores, experts, self.experts.num_experts)
        shared = self.shared_experts
        halves = None if shared is None else shared(tokens)
        routed = self.experts(rows, routing)
        out = None if shared is None else shared(halves=halves)
        if out is not None and tp_mesh is not None:
            out = sum_to_shares(out.view(whole.shape), tp_mesh)
        routed = arrive(routed, routing.exchange).view(mine.shape)
        return routed if out is None else out.view(mine.shape) + routed


def correct(moe: Any) -> None:
    """Make these of a layer and its shared experts: the instances alone, as FSDP does it."""
    moe.__class__ = SplitMoE
    if moe.shared_experts is not None:
        moe.shared_experts.__class__ = HalvedFeedForward
