"""Routed experts that multiply activations by the scores, and row kernels for two EP backends.

TorchTitan multiplies an expert's output by its routing score, so the score's gradient needs the
output. Here the score multiplies the activation, which is the input of the expert's last GEMM. The
result is the same up to rounding. No gradient needs the output, so it is not kept, and
recomputation skips the last GEMM. The option is `deepep.score_activations` for the EP backend
`deepep`, and `cookbook.row_kernels` for `standard` and `mxfp8_a2a`.

The row kernels group token rows by expert in one pass, and sum them back into tokens in another.
Without them, `standard` and `mxfp8_a2a` gather the rows by one index, scatter the outputs by
another, and multiply the outputs by their scores in a batched float32 GEMM.
"""

import functools
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn as nn
import torchtitan.models.moe.utils as moe_utils
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torchtitan.models.moe.moe import MoE

from cookbook.titan.common import fp8
from cookbook.titan.common.expert_groups import (
    GroupPlan,
    collect,
    plan_on_device,
    row_scores,
    scored_swiglu,
    spread,
)
from cookbook.titan.common.weight_copies import copy_of, joined, kept
from cookbook.titan.tt_0_2_2 import activity
from cookbook.titan.tt_0_2_2.float8 import expert_weights
from cookbook.titan.tt_0_2_2.mxfp8 import Precisions, exchange_counts
from cookbook.titan.tt_0_2_2.recomputation import in_recompute, last_product, not_saved
from cookbook.titan.tt_0_2_2.token_shard import shard_of, shard_tokens, sum_gradient_over_tp


class Groups(SimpleNamespace):
    """How the rows of a layer are grouped by expert.

    Not a tuple or a dataclass: FSDP would cast the tensors to BF16, but scores must stay float32.
    """

    scores: Tensor  # (rows, 1) float32
    plan: GroupPlan
    base: Tensor | None = None  # (tokens, features), added to the sums
    dtype: torch.dtype | None = None  # of the sums


class RowExperts(nn.Module):
    """A mixin that makes routed experts multiply their activations by the scores.

    With EP it also sends rows to their experts' ranks and back.
    """

    cookbook_ep: DeviceMesh | None
    cookbook_tp: DeviceMesh | None  # the ranks over which each expert is sharded
    cookbook_precisions: Precisions

    def forward(self, tokens: Tensor, groups: Groups) -> Tensor:
        """Return each token's sum of its experts' outputs, multiplied by the routing scores.

        With EP the tokens are rows that are ordered by expert, and so is the result. In
        recomputation the values may be undefined, because no gradient needs them.
        """
        if self.cookbook_ep is None:
            return sum_of_experts(self, tokens, groups)
        group, ranks = self.cookbook_ep.get_group(), self.cookbook_ep.size()
        if not self.cookbook_precisions.any:
            activity.dispatches.add("standard")
        with torch.no_grad():
            received, (there, here) = exchange_counts(groups.plan.sizes, group, ranks)
            # Rows arrive ordered by sending rank, then by expert.
            num_local = len(received) // ranks
            experts = torch.arange(num_local, device=tokens.device).repeat(ranks)
            experts = experts.repeat_interleave(received, output_size=sum(here))
            plan = plan_on_device(experts[:, None], num_local, moe_utils.TOKEN_GROUP_ALIGN_SIZE_M)
        arrived = self.cookbook_precisions.send(tokens, here, there, group)
        scores = all_to_all_single_autograd(groups.scores, here, there, group)
        out = sum_of_experts(self, arrived, Groups(scores=row_scores(scores, plan), plan=plan))
        with not_saved():
            if in_recompute():
                return torch.empty_like(tokens).requires_grad_()
            return self.cookbook_precisions.receive(out, there, here, group)


def sum_of_experts(experts: Any, tokens: Tensor, groups: Groups) -> Tensor:
    """Return `base` plus each token's sum of its local experts' outputs, (tokens, features).

    Outputs are multiplied by the routing scores, by way of the activations. In recomputation the
    values may be undefined, because no gradient needs them.
    """
    plan, base, dtype = groups.plan, groups.base, groups.dtype
    needed = not in_recompute()
    if getattr(experts, "cookbook_fp8", False):
        w1, w2, w3 = weights = local_weights(experts)
        last = last_product() if needed else None
        return fp8.experts(
            tokens, groups.scores, base, (w1, w2, w3), expert_weights(experts, weights), plan, last,
            dtype,
        )  # fmt: skip
    use_grouped = getattr(experts, "use_grouped_mm", True)
    rows = spread(tokens, plan, torch.bfloat16 if use_grouped else tokens.dtype)
    out = _compute(experts, rows, groups.scores, plan)
    with not_saved():
        return collect(out, None, plan, needed, base, dtype or rows.dtype)


def _compute(experts: Any, rows: Tensor, scores: Tensor, plan: GroupPlan) -> Tensor:
    if not hasattr(experts, "w1"):
        # The self-check's experts have no `w1`, which the code below needs: use their forward.
        return super(RowExperts, experts).forward(rows, plan.sizes) * scores.to(rows.dtype)
    w1, w2, w3 = local_weights(experts)
    ends, grouped, dtype = plan.ends, experts.use_grouped_mm, rows.dtype
    if grouped and type(w1) not in (Tensor, nn.Parameter):
        # Use the compiled path for quantized weights: it fuses the steps of TorchAO's casts.
        return experts_with_probs(experts, rows, scores, ends)
    gate_up = group_products(rows, _copy(experts, "gate_up", dtype, w1, w3), ends, grouped)
    if w2.dtype != dtype:
        w2 = _copy(experts, "down", dtype, w2)
    activations = scored_swiglu(gate_up, scores)
    with last_product():
        return group_products(activations, w2, ends, grouped)


def _copy(experts: Any, name: str, dtype: torch.dtype, *weights: Tensor) -> Tensor:
    copy = kept(experts, f"cookbook_{name}", weights, lambda: joined(dtype, *weights))
    return copy_of(copy, *weights)


class RowMoE(MoE):
    """TorchTitan's MoE layer with `RowExperts` and the row kernels."""

    # Set if EP also spans the TP ranks; each TP rank then sends only its shard of the tokens.
    cookbook_shard_mesh: DeviceMesh | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output for `x` (batch, length, features)."""
        length, features = x.shape[1:]
        tokens = x.view(-1, features)
        scores, chosen, counts = self.router(tokens, self.expert_bias)
        with torch.no_grad():
            self.tokens_per_expert.add_(counts)
        mine, experts, tp_mesh = tokens, self.experts, self.cookbook_shard_mesh
        if tp_mesh is not None:
            whole = tokens, scores, chosen
            mine, scores, chosen = (shard_tokens(one, length, tp_mesh) for one in whole)
        if experts.cookbook_tp is not None:
            mine = sum_gradient_over_tp(mine, experts.cookbook_tp)
        # Pad groups only without EP; with EP the receiving rank pads them before its GEMMs.
        alignment = moe_utils.TOKEN_GROUP_ALIGN_SIZE_M if experts.cookbook_ep is None else 1
        plan = plan_on_device(chosen, self.router.num_experts, alignment)
        # FP8 is quantized from the tokens as they are; the other grouped GEMMs read BF16.
        is_fp8 = getattr(experts, "cookbook_fp8", False)
        is_bf16 = getattr(experts, "use_grouped_mm", True) and not is_fp8
        dtype = torch.bfloat16 if is_bf16 else x.dtype
        groups = Groups(scores=row_scores(scores, plan), plan=plan, dtype=x.dtype)
        activity.rows.add("kernels")
        if experts.cookbook_ep is None:
            groups.base = None if self.shared_experts is None else self.shared_experts(tokens)
            return experts(mine, groups).view(x.shape)
        routed = experts(spread(mine, plan, dtype), groups)
        # Run the shared experts before anything waits for the routed rows.
        out = None if self.shared_experts is None else self.shared_experts(tokens)
        needed = not in_recompute()
        if tp_mesh is None:
            return collect(routed, None, plan, needed, out, x.dtype).view(x.shape)
        sums = collect(routed, None, plan, needed, None, x.dtype).view(len(x), -1, features)
        total = torch.zeros_like(x) if out is None else out.view(x.shape).clone()
        total[:, shard_of(length, tp_mesh)] += sums
        return total


@functools.cache
def _mixed(mixin: type[nn.Module], experts: type[nn.Module]) -> type[nn.Module]:
    return type(f"{mixin.__name__}Of{experts.__name__}", (mixin, experts), {})


def mix_in(mixin: Any, experts: Any) -> None:
    """Give the object `experts` a new class that inherits from `mixin` and from the old class."""
    experts.__class__ = _mixed(mixin, experts.__class__)


def use_row_kernels(
    moe: Any,
    precisions: Precisions,
    ep_mesh: DeviceMesh | None = None,
    tp_mesh: DeviceMesh | None = None,
) -> None:
    """Turn an MoE layer into a `RowMoE` whose `RowExperts` are sharded over the meshes, if any."""
    moe.__class__ = RowMoE
    mix_in(RowExperts, moe.experts)
    moe.experts.cookbook_precisions = precisions
    moe.experts.cookbook_ep, moe.experts.cookbook_tp = ep_mesh, tp_mesh


class ProbsOnActivations:
    """`GroupedExperts.forward` that multiplies hidden activations by the router's scores."""

    def __init__(self) -> None:
        self._activate, self._project = _activate, group_products

    def compile(self, backend: str) -> None:
        """Compile the activation and the last GEMM; further calls have no effect."""
        if self._activate is _activate:
            self._activate = torch.compile(_activate, backend=backend, fullgraph=True)
            self._project = torch.compile(group_products, backend=backend, fullgraph=True)

    def __call__(self, experts: Any, rows: Tensor, scores: Tensor, ends: Tensor) -> Tensor:
        """Return the experts' outputs (rows, features), multiplied by `scores`.

        Each expert has one padded group of rows, ending at `ends`. `scores` (rows, 1) are float32.
        In recomputation the outputs may be undefined, because no gradient needs them.
        """
        w1, w2, w3 = local_weights(experts)
        if not experts.use_grouped_mm:
            activations = _activate(w1, w3, rows, scores, ends, grouped=False)
            return group_products(activations, w2, ends, grouped=False)
        # Compile once for any number of rows, which differs between layers and steps.
        torch._dynamo.mark_dynamic(rows, 0)
        torch._dynamo.mark_dynamic(scores, 0)
        activations = self._activate(w1, w3, rows, scores, ends)
        torch._dynamo.mark_dynamic(activations, 0)
        with last_product():
            return self._project(activations, w2, ends).type_as(rows)


def _activate(
    w1: Tensor, w3: Tensor, rows: Tensor, scores: Tensor, ends: Tensor, grouped: bool = True
) -> Tensor:
    # Grouped GEMMs take BF16 only. Cast once, so that autograd keeps one copy for both GEMMs.
    rows = rows.bfloat16() if grouped else rows
    activations = nn.functional.silu(group_products(rows, w1, ends, grouped))
    activations = activations * group_products(rows, w3, ends, grouped)
    return (activations * scores).type_as(activations)


def group_products(rows: Tensor, weights: Tensor, ends: Tensor, grouped: bool = True) -> Tensor:
    """Multiply each group of rows by its expert's weights (experts, out, in)."""
    if grouped:
        return torch._grouped_mm(rows, weights.bfloat16().transpose(-2, -1), offs=ends)
    *parts, rest = rows.tensor_split(ends.tolist())
    products = [part @ weight.T for part, weight in zip(parts, weights, strict=True)]
    return torch.cat([*products, rest.new_zeros(len(rest), weights.shape[1])])


def local_weights(experts: Any) -> list[Tensor]:
    """Return this rank's shards of the three weights of `GroupedExperts`."""
    weights = (experts.w1, experts.w2, experts.w3)
    return [w.to_local() if isinstance(w, DTensor) else w for w in weights]


experts_with_probs = ProbsOnActivations()
