"""The MoE layer and the expert parallelism of the EP backend `deepep`, corrected and overlapped.

Importable only where DeepEP is installed.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn as nn
import torchtitan.models.moe.utils as moe_utils
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_module
from torchtitan.distributed.expert_parallel import DeepEPExpertParallel
from torchtitan.models.moe.moe import FeedForward
from torchtitan.models.moe.moe_deepep import DeepEPMoE

from cookbook.titan.common.expert_groups import collect, plan_groups, row_scores, spread
from cookbook.titan.common.token_shard import (
    TokenShard,
    gather_sequence,
    reduce_scatter_sequence,
    shard_tokens,
    with_partial_gradient,
)
from cookbook.titan.tt_0_2_2 import activity
from cookbook.titan.tt_0_2_2.deepep_exchange import Routing, arrive, combine, dispatch, leave
from cookbook.titan.tt_0_2_2.probs_on_activations import experts_with_probs
from cookbook.titan.tt_0_2_2.recomputation import in_recompute, last_product, not_saved


class SendingExperts(nn.Module):
    """Mixed into the class of the routed experts, which then fetch tokens and send them back.

    A layer's tokens come in one or more parts. While the experts compute one part, the next is on
    its way to them and the previous one on its way back. One call takes all parts, so that FSDP
    gathers the weights once.
    """

    cookbook_group: ProcessGroup
    cookbook_score_activations: bool

    def forward(
        self, rows: tuple[torch.Tensor, ...], routings: tuple[Routing, ...]
    ) -> tuple[torch.Tensor, ...]:
        """Return the result of `combine` for each part of (tokens, features)."""
        returned: list[torch.Tensor] = []
        computed: torch.Tensor | None = None
        for index, (part, routing) in enumerate(zip(rows, routings, strict=True)):
            # First, because this part would have to wait for the previous one on its way back. The
            # host waits for DeepEP's counts while the GPU computes the previous part.
            arrived = dispatch(part, routing, self.cookbook_group)
            activity.dispatches.add("deepep")
            if computed is not None:
                returned.append(self._combine(computed, routings[index - 1]))
            computed = self._compute(*arrived)
        assert computed is not None
        return *returned, self._combine(computed, routings[-1])

    def _combine(self, computed: torch.Tensor, routing: Routing) -> torch.Tensor:
        if not self.cookbook_score_activations:
            return combine(computed, routing)
        with not_saved():
            return combine(computed, routing, is_needed=not in_recompute())

    def _compute(
        self, rows: torch.Tensor, experts: torch.Tensor, scores: torch.Tensor, counts: list[int]
    ) -> torch.Tensor:
        """Compute the experts' outputs, summed for each row over its local experts."""
        plan = plan_groups(experts, counts, moe_utils.TOKEN_GROUP_ALIGN_SIZE_M)
        activity.patches_applied.add("deepep-padded-groups")
        grouped = spread(rows, plan)
        if not self.cookbook_score_activations:
            return collect(super().forward(grouped, plan.sizes), scores, plan)
        out = experts_with_probs(self, grouped, row_scores(scores, plan), plan.ends)
        return collect(out, None, plan, is_needed=not in_recompute())


class ChunkedExpertParallel(DeepEPExpertParallel):
    """TorchTitan's DeepEP expert parallelism for `SendingExperts`."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        experts: Any = module
        experts.cookbook_group = device_mesh.get_group()
        return distribute_module(module, device_mesh, partition_fn=self._partition_fn)


class HalvedFeedForward(FeedForward):
    """TorchTitan's shared experts in two halves, each under one of DeepEP's exchanges."""

    def forward(
        self,
        x: torch.Tensor | None = None,
        halves: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> Any:
        """Compute gate and up projections of `x` (tokens, features), or the output of `halves`."""
        if x is not None:
            return self.w1(x), self.w3(x)
        assert halves is not None
        gate, up = halves
        return self.w2(nn.functional.silu(gate) * up)


def cut(values: torch.Tensor, chunks: int) -> tuple[torch.Tensor, ...]:
    """Cut (tokens, ...) into parts of almost equal length; their gradients are joined once."""
    if chunks == 1:
        return (values,)
    least, more = divmod(len(values), chunks)
    return values.split([least + (index < more) for index in range(chunks)])


class SplitMoE(DeepEPMoE):
    """TorchTitan's DeepEP layer, which sends each token from one TP rank only.

    Its experts are `SendingExperts`, its shared experts `HalvedFeedForward`.
    """

    cookbook_chunks: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output for this rank's tokens.

        Under TP, `x` and the output are this rank's shard of every sequence, (batch, length / TP,
        features). The experts get the shard itself, before any gather. The shared experts' gradient
        of the whole is summed over TP once, while the gradients of the rows are on their way.
        """
        tp_mesh = getattr(self, "cookbook_tp_mesh", None)
        mine = x.to_local() if isinstance(x, DTensor) else x
        whole = mine if tp_mesh is None else gather_sequence(mine, tp_mesh)
        length, features = whole.shape[1:]

        tokens = whole.view(-1, features)
        top_scores, experts, counts = self.router(tokens, self.expert_bias)
        # Count all tokens on every TP rank: the sum for the expert bias is over other ranks only.
        if self.load_balance_coeff is not None:
            with torch.no_grad():
                self.tokens_per_expert.add_(counts)
        if tp_mesh is not None:
            shard = TokenShard.of_mesh(length, tp_mesh)
            top_scores, experts = shard_tokens(top_scores, shard), shard_tokens(experts, shard)
            activity.patches_applied.add("deepep-tokens-split-over-tp")

        sent = (mine.reshape(-1, features), top_scores, experts)
        parts = zip(*(cut(values, self.cookbook_chunks) for values in sent), strict=True)
        count = self.experts.num_experts
        left = [leave(part, scores, chosen, count) for part, scores, chosen in parts]
        rows, routings = zip(*left, strict=True)
        shared = self.shared_experts
        if shared is not None and tp_mesh is not None:
            # After `leave`, so that in the backward its sum starts before `leave` waits.
            tokens = with_partial_gradient(whole, mine, tp_mesh).view(-1, features)
        halves = None if shared is None else shared(tokens)
        returned = self.experts(rows, routings)
        with last_product():
            out = None if shared is None else shared(halves=halves)
        if out is not None and tp_mesh is not None:
            out = reduce_scatter_sequence(out.view(whole.shape), tp_mesh)
        arrived = [
            arrive(part, routing.exchange) for part, routing in zip(returned, routings, strict=True)
        ]
        routed = (arrived[0] if len(arrived) == 1 else torch.cat(arrived)).view(mine.shape)
        return routed if out is None else out.view(mine.shape) + routed


@functools.cache
def _sending(experts: type[nn.Module]) -> type[nn.Module]:
    return type(f"Sending{experts.__name__}", (SendingExperts, experts), {})


def use_split_moe(moe: Any, chunks: int, score_activations: bool) -> None:
    """Change the classes of a layer, its experts and shared experts; the instances alone, as FSDP.

    Args:
        chunks, score_activations: the options of the section `deepep`.
    """
    moe.__class__ = SplitMoE
    moe.cookbook_chunks = chunks
    kind: Any = type(moe.experts)
    moe.experts.__class__ = _sending(kind)
    moe.experts.cookbook_score_activations = score_activations
    if moe.shared_experts is not None:
        moe.shared_experts.__class__ = HalvedFeedForward
