"""The MoE layer and the expert parallelism of the EP backend `deepep`, corrected.

Communication is TorchTitan's own pair of operations on `deep_ep.Buffer`; what differs from its
classes is said at each of these. TorchTitan's modules raise where DeepEP is not installed, and so
does this one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torchtitan.models.moe.utils as moe_utils
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import deterministic
from torchtitan.distributed.deepep import deepep, sync_combine
from torchtitan.distributed.expert_parallel import DeepEPExpertParallel
from torchtitan.models.moe.moe_deepep import DeepEPMoE

from cookbook.titan.any_stack.expert_groups import GroupPlan, collect, plan_groups, spread
from cookbook.titan.any_stack.token_split import (
    Share,
    gather_sequence,
    sum_to_shares,
    take_share,
)
from cookbook.titan.stack_2026_02 import activity


@dataclass
class DispatchState:
    """What combine needs of the dispatch before it."""

    handle_id: torch.Tensor
    plan: GroupPlan
    scores: torch.Tensor | None


@contextmanager
def _uninitialized_memory() -> Iterator[None]:
    """Keep PyTorch from filling fresh tensors while DeepEP allocates them.

    With `--debug.deterministic` every `empty` is filled with the largest value. DeepEP's
    get_dispatch_layout allocates its counters on the compute stream and writes them on its own
    stream, behind an event that was recorded before. So the fill runs at the same time as the
    kernel and overwrites counts with 2**31 - 1; the kernels that read those end in device-side
    asserts. Every counter is written in full, so the fill makes nothing reproducible here.

    No door: PyTorch has this switch for the process alone. It is set back at once.
    """
    filled = deterministic.fill_uninitialized_memory
    deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        deterministic.fill_uninitialized_memory = filled


def dispatch_tokens(
    hidden_states: torch.Tensor,
    selected_experts_indices: torch.Tensor,
    top_scores: torch.Tensor,
    num_experts: int,
    group: ProcessGroup,
    score_before_experts: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, DispatchState]:
    """Send tokens to their experts; differs from TorchTitan's in that the groups are padded.

    Args:
        hidden_states: (tokens, features) of this rank.
        selected_experts_indices: (tokens, top k).
        top_scores: (tokens, top k).

    Returns:
        Rows grouped by local expert (padded rows, features), padded group sizes (local experts,)
        int32 on the device, and the state for `combine_tokens`.
    """
    experts = selected_experts_indices.contiguous()
    scores = top_scores.contiguous().float()
    experts = experts.masked_fill(scores == 0, -1)
    hidden_states = hidden_states.contiguous()

    buffer = deepep.get_buffer(group, deepep.get_hidden_bytes(hidden_states))
    with _uninitialized_memory():
        per_rank, per_rdma_rank, per_expert, is_token_in_rank, _ = buffer.get_dispatch_layout(
            topk_idx=experts, num_experts=num_experts
        )
    received, local_experts, local_scores, counts, handle_id = torch.ops.deepep.dispatch(
        hidden_states, experts, scores, per_rank, per_rdma_rank, is_token_in_rank, per_expert
    )
    # The counts are on the host already: DeepEP had to know them to allocate `received`.
    plan = plan_groups(local_experts, counts.tolist(), moe_utils.TOKEN_GROUP_ALIGN_SIZE_M)
    grouped = spread(received, local_scores if score_before_experts else None, plan)
    activity.dispatches.add("deepep")
    activity.corrections.add("deepep-padded-groups")
    state = DispatchState(handle_id, plan, None if score_before_experts else local_scores)
    return grouped, plan.sizes, state


def combine_tokens(grouped: torch.Tensor, state: DispatchState) -> torch.Tensor:
    """Bring the experts' outputs (padded rows, features) back to their tokens' ranks, summed."""
    tokens = collect(grouped, state.scores, state.plan)
    return torch.ops.deepep.combine(tokens, state.handle_id)


class PaddedExpertParallel(DeepEPExpertParallel):
    """TorchTitan's DeepEP expert parallelism, with expert groups padded for the grouped GEMMs."""

    _state: DispatchState | None

    def _token_dispatch(
        self, mod: nn.Module, inputs: tuple[Any, ...], device_mesh: DeviceMesh
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden_states, _, selected_experts_indices, top_scores, num_experts = inputs
        grouped, sizes, self._state = dispatch_tokens(
            hidden_states,
            selected_experts_indices,
            top_scores,
            num_experts,
            device_mesh.get_group(),
            score_before_experts=self.score_before_experts,
        )
        return grouped, sizes

    def _token_combine(
        self, mod: nn.Module, routed_output: torch.Tensor, device_mesh: DeviceMesh
    ) -> torch.Tensor:
        state, self._state = self._state, None
        assert state is not None
        return combine_tokens(routed_output, state)


class SplitMoE(DeepEPMoE):
    """TorchTitan's DeepEP layer, which sends each token from one TP rank only."""

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
        routed = self.experts(rows, counts, experts, top_scores, self.experts.num_experts)
        # Both run while the combine, which has only been started, is under way.
        out = self.shared_experts(tokens) if self.shared_experts is not None else None
        if out is not None and tp_mesh is not None:
            out = sum_to_shares(out.view(whole.shape), tp_mesh)
        sync_combine()

        routed = routed.view(mine.shape)
        return routed if out is None else out.view(mine.shape) + routed
