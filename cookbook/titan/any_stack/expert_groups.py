"""Groups received tokens by expert, pads the groups, and brings the rows back to their tokens.

A grouped GEMM reads one group of rows per expert. MXFP8 scales run over 32 elements, and the weight
gradient contracts over a group's rows. So every group, also an empty one, is filled with zero rows
up to a multiple of 32 (of 8 for BF16, as in TorchTitan's standard path).

DeepEP returns the sizes of the groups on the host. All shapes follow from them, and nothing here
waits for the device. Moving rows to their groups and back is one pass over the data each; the
routing score is applied and the sum is taken in float32 in the same pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class GroupPlan:
    """Where each row of the padded groups comes from, and where each token's copies went.

    Attributes:
        rows: (padded rows,) int32, the token of each row, -1 for padding.
        slots: (tokens, top k) int32, the row of each of a token's copies, -1 for experts elsewhere.
        sizes: (local experts,) int32 on the device, padded.
        order: (padded rows,) int64, the copy in each row, from tokens x top k on for padding.
        num_padding: how many rows are padding.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    sizes: torch.Tensor
    order: torch.Tensor
    num_padding: int


def padded_sizes(counts: list[int], alignment: int) -> list[int]:
    """Group sizes rounded up to `alignment`; an empty group gets one full block.

    A group without rows would leave its weight gradient unwritten.
    """
    return [max(1, -(-count // alignment)) * alignment for count in counts]


def plan_groups(experts: torch.Tensor, counts: list[int], alignment: int) -> GroupPlan:
    """Sort the copies of tokens by expert, each group followed by its padding.

    Args:
        experts: (tokens, top k) int, local expert of each copy, -1 for an expert on another rank.
        counts: tokens per local expert, on the host.
    """
    num_tokens, top_k = experts.shape
    num_copies, num_experts = num_tokens * top_k, len(counts)
    sizes = padded_sizes(counts, alignment)
    padding = [
        expert
        for expert, (size, count) in enumerate(zip(sizes, counts, strict=True))
        for _ in range(size - count)
    ]
    # One small copy to the device carries both lists.
    host = torch.tensor(sizes + padding, dtype=torch.int32)
    if experts.is_cuda:
        host = host.pin_memory()
    on_device = host.to(experts.device, non_blocking=True)

    copies = experts.reshape(-1).to(torch.int16)
    copies = copies.masked_fill(copies < 0, num_experts)
    # Padding rows take part in the sort as further copies of their expert, behind the real ones.
    keys = torch.cat([copies, on_device[num_experts:].to(torch.int16)])
    total = sum(sizes)
    order = torch.argsort(keys, stable=True)[:total]

    rows = torch.where(order < num_copies, order // max(top_k, 1), -1).to(torch.int32)
    slots = torch.full((keys.numel(),), -1, dtype=torch.int32, device=keys.device)
    slots.scatter_(0, order, torch.arange(total, dtype=torch.int32, device=keys.device))
    slots = slots[:num_copies].view(num_tokens, top_k)
    return GroupPlan(rows, slots, on_device[:num_experts], order, len(padding))


def _spread(
    tokens: torch.Tensor, scores: torch.Tensor | None, rows: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """Each row of the groups: its token, times the score of that copy; zero for padding."""
    if tokens.is_cuda:
        from cookbook.titan.any_stack import group_kernels

        return group_kernels.spread(tokens, scores, rows, slots)
    real = rows >= 0
    grouped = tokens.new_zeros(rows.numel(), tokens.shape[1])
    values = tokens[rows[real].long()]
    if scores is not None:
        values = (values * _scores_by_row(scores, rows, slots)[real]).to(tokens.dtype)
    grouped[real] = values
    return grouped


def _collect(
    grouped: torch.Tensor, scores: torch.Tensor | None, rows: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """Each token: the sum of its copies' rows, times their scores."""
    if grouped.is_cuda:
        from cookbook.titan.any_stack import group_kernels

        return group_kernels.collect(grouped, scores, slots)
    real = rows >= 0
    values = grouped[real].to(torch.promote_types(grouped.dtype, torch.float32))
    if scores is not None:
        values = values * _scores_by_row(scores, rows, slots)[real]
    tokens = values.new_zeros(slots.shape[0], grouped.shape[1])
    tokens.index_add_(0, rows[real].long(), values)
    return tokens.to(grouped.dtype)


def _dot(tokens: torch.Tensor, grouped: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """(tokens, top k): each token times the row of each of its copies; 0 for experts elsewhere."""
    if tokens.is_cuda:
        from cookbook.titan.any_stack import group_kernels

        return group_kernels.dot(tokens, grouped, slots)
    exact = torch.promote_types(grouped.dtype, torch.float32)
    copies = grouped[slots.clamp_min(0).long()].to(exact)
    products = (copies * tokens.to(exact).unsqueeze(1)).sum(-1)
    return products.masked_fill(slots < 0, 0)


def _scores_by_row(scores: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    here = slots >= 0
    by_row = scores.new_zeros(rows.numel(), 1)
    by_row[slots[here].long(), 0] = scores[here]
    return by_row


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tokens: torch.Tensor,
        scores: torch.Tensor | None,
        rows: torch.Tensor,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        # Without scores the backward needs no token.
        ctx.save_for_backward(rows, slots, *(() if scores is None else (tokens, scores)))
        return _spread(tokens, scores, rows, slots)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        rows, slots, *weighted = ctx.saved_tensors
        grad = grad.contiguous()
        if not weighted:
            return _collect(grad, None, rows, slots), None, None, None
        tokens, scores = weighted
        return _collect(grad, scores, rows, slots), _dot(tokens, grad, slots), None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        grouped: torch.Tensor,
        scores: torch.Tensor | None,
        rows: torch.Tensor,
        slots: torch.Tensor,
        is_needed: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, slots, *(() if scores is None else (grouped, scores)))
        if not is_needed:
            return grouped.new_empty(slots.shape[0], grouped.shape[1])
        return _collect(grouped, scores, rows, slots)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        rows, slots, *weighted = ctx.saved_tensors
        grad = grad.contiguous()
        if not weighted:
            return _spread(grad, None, rows, slots), None, None, None, None
        grouped, scores = weighted
        return _spread(grad, scores, rows, slots), _dot(grad, grouped, slots), None, None, None


class _RowScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scores: torch.Tensor, slots: torch.Tensor, order: torch.Tensor, num_padding: int
    ) -> torch.Tensor:
        ctx.save_for_backward(slots)
        return torch.cat([scores.reshape(-1), scores.new_zeros(num_padding)])[order].unsqueeze(1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        (slots,) = ctx.saved_tensors
        by_copy = grad.squeeze(1)[slots.clamp_min(0).long()]
        return by_copy.masked_fill(slots < 0, 0), None, None, None


def spread(tokens: torch.Tensor, scores: torch.Tensor | None, plan: GroupPlan) -> torch.Tensor:
    """Tokens (received, features) to padded groups (rows, features), differentiable.

    Args:
        scores: (received, top k) float32 to multiply with, or None.
    """
    return _Spread.apply(tokens, scores, plan.rows, plan.slots)


def collect(
    grouped: torch.Tensor, scores: torch.Tensor | None, plan: GroupPlan, is_needed: bool = True
) -> torch.Tensor:
    """Padded groups (rows, features) back to tokens (received, features), differentiable.

    Args:
        is_needed: whether the sums are; where not, they are memory as it is found.
    """
    tokens: torch.Tensor = _Collect.apply(grouped, scores, plan.rows, plan.slots, is_needed)
    return tokens


def row_scores(scores: torch.Tensor, plan: GroupPlan) -> torch.Tensor:
    """Scores (received, top k) by row of the padded groups (rows, 1), 0 for padding."""
    by_row: torch.Tensor = _RowScores.apply(scores, plan.slots, plan.order, plan.num_padding)
    return by_row
