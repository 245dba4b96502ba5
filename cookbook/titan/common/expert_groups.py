"""Groups received tokens by expert, pads the groups, and brings the rows back to their tokens.

A grouped GEMM reads one group of rows per expert. MXFP8 scales run over 32 elements, and the weight
gradient contracts over a group's rows. So every group, also an empty one, is filled with zero rows
up to a multiple of 32 (of 8 for BF16, as in TorchTitan's standard path).

DeepEP returns the sizes of the groups on the host. All shapes follow from them, and nothing here
waits for the device. Moving rows to their groups and back is one pass over the data each; the
routing score is applied and the sum is taken in float32 in the same pass.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class GroupPlan:
    """Which copy of a token lies in each row of the padded groups, and where each copy went.

    Copy `i * top_k + k` is that of token `i` for the `k`-th of its experts.

    Attributes:
        copies: (padded rows,) int32, the copy in each row, -1 for padding.
        slots: (tokens, top k) int32, the row of each copy, -1 for experts elsewhere.
        sizes: (local experts,) int32 on the device, padded.
        ends: (local experts,) int32 on the device, where each padded group ends.
    """

    copies: torch.Tensor
    slots: torch.Tensor
    sizes: torch.Tensor
    ends: torch.Tensor


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
    sizes = padded_sizes(counts, alignment)
    ends = list(itertools.accumulate(sizes))
    # One small copy to the device carries both lists.
    host = torch.tensor([ends, sizes], dtype=torch.int32)
    if experts.is_cuda:
        host = host.pin_memory()
    ends_there, sizes_there = host.to(experts.device, non_blocking=True)
    copies, slots = _place(experts, sizes_there, ends_there, ends[-1])
    return GroupPlan(copies, slots, sizes_there, ends_there)


def _place(
    experts: torch.Tensor, sizes: torch.Tensor, ends: torch.Tensor, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The copies and slots of a plan."""
    if experts.is_cuda:
        from cookbook.titan.common import group_kernels

        return group_kernels.place(experts, sizes, ends, num_rows)
    chosen, order = experts.reshape(-1).sort(stable=True)
    order, chosen = order[chosen >= 0], chosen[chosen >= 0]
    here = torch.bincount(chosen, minlength=len(sizes))
    # A copy's row: where its group starts, and how many of that group come before it.
    before = torch.arange(len(chosen)) - (here.cumsum(0) - here)[chosen]
    rows = (ends - sizes)[chosen] + before
    copies = torch.full((num_rows,), -1, dtype=torch.int32)
    slots = torch.full((experts.numel(),), -1, dtype=torch.int32)
    copies[rows], slots[order] = order.int(), rows.int()
    return copies, slots.view(experts.shape)


def _spread(
    tokens: torch.Tensor, scores: torch.Tensor | None, copies: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """Each row of the groups: its token, times the score of that copy; zero for padding."""
    top_k = slots.shape[1]
    if tokens.is_cuda:
        from cookbook.titan.common import group_kernels

        return group_kernels.spread(tokens, scores, copies, top_k)
    real = copies >= 0
    grouped = tokens.new_zeros(copies.numel(), tokens.shape[1])
    values = tokens[copies[real].long() // top_k]
    if scores is not None:
        values = (values * _at(scores, copies[real]).unsqueeze(1)).to(tokens.dtype)
    grouped[real] = values
    return grouped


def _collect(
    grouped: torch.Tensor, scores: torch.Tensor | None, copies: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """Each token: the sum of its copies' rows, times their scores."""
    if grouped.is_cuda:
        from cookbook.titan.common import group_kernels

        return group_kernels.collect(grouped, scores, slots)
    real = copies >= 0
    values = grouped[real].to(torch.promote_types(grouped.dtype, torch.float32))
    if scores is not None:
        values = values * _at(scores, copies[real]).unsqueeze(1)
    tokens = values.new_zeros(slots.shape[0], grouped.shape[1])
    tokens.index_add_(0, copies[real].long() // slots.shape[1], values)
    return tokens.to(grouped.dtype)


def _dot(tokens: torch.Tensor, grouped: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """(tokens, top k): each token times the row of each of its copies; 0 for experts elsewhere."""
    if tokens.is_cuda:
        from cookbook.titan.common import group_kernels

        return group_kernels.dot(tokens, grouped, slots)
    exact = torch.promote_types(grouped.dtype, torch.float32)
    copies = grouped[slots.clamp_min(0).long()].to(exact)
    products = (copies * tokens.to(exact).unsqueeze(1)).sum(-1)
    return products.masked_fill(slots < 0, 0)


def _at(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """`values`, all in one row, at each of `places`, in their shape; 0 at -1."""
    if values.is_cuda:
        from cookbook.titan.common import group_kernels

        return group_kernels.take(values, places)
    flat = values.reshape(-1)
    return torch.cat([flat, flat.new_zeros(1)])[places.long()]


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tokens: torch.Tensor,
        scores: torch.Tensor | None,
        copies: torch.Tensor,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        # Without scores the backward needs no token.
        ctx.save_for_backward(copies, slots, *(() if scores is None else (tokens, scores)))
        return _spread(tokens, scores, copies, slots)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        copies, slots, *weighted = ctx.saved_tensors
        grad = grad.contiguous()
        if not weighted:
            return _collect(grad, None, copies, slots), None, None, None
        tokens, scores = weighted
        return _collect(grad, scores, copies, slots), _dot(tokens, grad, slots), None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        grouped: torch.Tensor,
        scores: torch.Tensor | None,
        copies: torch.Tensor,
        slots: torch.Tensor,
        is_needed: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(copies, slots, *(() if scores is None else (grouped, scores)))
        if not is_needed:
            return grouped.new_empty(slots.shape[0], grouped.shape[1])
        return _collect(grouped, scores, copies, slots)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        copies, slots, *weighted = ctx.saved_tensors
        grad = grad.contiguous()
        if not weighted:
            return _spread(grad, None, copies, slots), None, None, None, None
        grouped, scores = weighted
        return _spread(grad, scores, copies, slots), _dot(grad, grouped, slots), None, None, None


class _RowScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scores: torch.Tensor, copies: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(slots)
        return _at(scores, copies).unsqueeze(1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        (slots,) = ctx.saved_tensors
        return _at(grad, slots), None, None


def spread(tokens: torch.Tensor, scores: torch.Tensor | None, plan: GroupPlan) -> torch.Tensor:
    """Tokens (received, features) to padded groups (rows, features), differentiable.

    Args:
        scores: (received, top k) float32 to multiply with, or None.
    """
    return _Spread.apply(tokens, scores, plan.copies, plan.slots)


def collect(
    grouped: torch.Tensor, scores: torch.Tensor | None, plan: GroupPlan, is_needed: bool = True
) -> torch.Tensor:
    """Padded groups (rows, features) back to tokens (received, features), differentiable.

    Args:
        is_needed: whether the sums are; where not, they are memory as it is found.
    """
    tokens: torch.Tensor = _Collect.apply(grouped, scores, plan.copies, plan.slots, is_needed)
    return tokens


def row_scores(scores: torch.Tensor, plan: GroupPlan) -> torch.Tensor:
    """Scores (received, top k) by row of the padded groups (rows, 1), 0 for padding."""
    by_row: torch.Tensor = _RowScores.apply(scores, plan.copies, plan.slots)
    return by_row
