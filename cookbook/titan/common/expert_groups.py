"""Group rows by their routed expert, pad the groups, apply SwiGLU, and sum each token's rows.

A grouped GEMM reads one group of rows per expert. An MXFP8 scale covers 32 elements; in the weight
gradient's GEMM these are 32 rows of one group. So every group, even an empty one, is padded with
zero rows to a positive multiple of 32 (8 for BF16, as in TorchTitan's standard path).

Nothing here waits for the device. Moving rows to their groups takes one pass, and moving them back
another. A GPU runs the kernels of `triton_kernels.py`, a CPU runs PyTorch operations.
"""

import itertools
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor


class GroupPlan(NamedTuple):
    """Maps token copies to rows of the padded groups, and rows to copies.

    The copy of token `i` for its `k`-th expert has index `i * top_k + k`. All tensors are int32.
    """

    copies: Tensor  # (padded rows,): index of the token copy in each row; -1 for padding
    slots: Tensor  # (tokens, top k): row of each token copy; -1 if another rank has the expert
    sizes: Tensor  # (local experts,): rows per group, including padding
    ends: Tensor  # (local experts,): cumulative sum of `sizes`


def _triton() -> Any:
    return import_module("cookbook.titan.common.triton_kernels")


def padded_sizes(counts: list[int], alignment: int) -> list[int]:
    """Round counts up to positive multiples of `alignment`."""
    # Pad even an empty group: without rows, a grouped GEMM would not write its weight gradient.
    return [max(1, -(-count // alignment)) * alignment for count in counts]


def plan_groups(experts: Tensor, counts: list[int], alignment: int) -> GroupPlan:
    """Sort token copies by expert, with padding after each group.

    `experts` (tokens, top k) are local expert indices, -1 for an expert of another rank; `counts`
    are the tokens per local expert, on the host.
    """
    sizes = padded_sizes(counts, alignment)
    ends = list(itertools.accumulate(sizes))
    host = torch.tensor([sizes, ends], dtype=torch.int32, pin_memory=experts.is_cuda)
    sizes_there, ends_there = host.to(experts.device, non_blocking=True)
    return GroupPlan(*_place(experts, sizes_there, ends_there, ends[-1]), sizes_there, ends_there)


def _place(
    experts: Tensor, sizes: Tensor, ends: Tensor, num_rows: int, sums: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    if experts.is_cuda:
        sums = _triton().count(experts, len(sizes)) if sums is None else sums
        return _triton().place(experts, sums, sizes, ends, num_rows)
    chosen, order = experts.reshape(-1).sort(stable=True)
    order, chosen = order[chosen >= 0], chosen[chosen >= 0]
    here = torch.bincount(chosen, minlength=len(sizes))
    before = torch.arange(len(chosen)) - (here.cumsum(0) - here)[chosen]
    rows = (ends - sizes)[chosen] + before
    copies = torch.full((num_rows,), -1, dtype=torch.int32)
    slots = torch.full((experts.numel(),), -1, dtype=torch.int32)
    copies[rows], slots[order] = order.int(), rows.int()
    return copies, slots.view(experts.shape)


def plan_on_device(experts: Tensor, num_experts: int, alignment: int) -> GroupPlan:
    """Compute a GroupPlan on the device, so that the host need not wait for the token counts.

    `experts` (tokens, top k) are the indices of each token's experts. If `alignment` is above 1,
    each group, even an empty one, is padded to a positive multiple of it. The plan has enough rows
    for the worst case; rows after the end of the last group are unused.
    """
    if experts.is_cuda:
        sums = _triton().count(experts, num_experts)
        counts = sums[:, -1]
    else:
        sums, counts = None, torch.bincount(experts.reshape(-1), minlength=num_experts)
    num_rows = experts.numel()
    if alignment > 1:
        counts = counts.clamp_min(1)
        num_rows = (-(-num_rows // alignment) + num_experts) * alignment
    sizes = (counts + alignment - 1) // alignment * alignment
    sizes, ends = sizes.int(), sizes.cumsum(0, dtype=torch.int32)
    return GroupPlan(*_place(experts, sizes, ends, num_rows, sums), sizes, ends)


def move_rows(tokens: Tensor, scores: Tensor | None, plan: GroupPlan, dtype: torch.dtype) -> Tensor:
    copies, slots = plan.copies, plan.slots
    if tokens.is_cuda:
        return _triton().spread(tokens, scores, copies, slots, dtype)
    real = copies >= 0
    grouped = tokens.new_zeros(copies.numel(), tokens.shape[1], dtype=dtype)
    values = tokens[copies[real].long() // slots.shape[1]]
    if scores is not None:
        values = values * take_at(scores, copies[real]).unsqueeze(1)
    grouped[real] = values.to(dtype)
    return grouped


def sum_rows(
    grouped: Tensor,
    scores: Tensor | None,
    plan: GroupPlan,
    dtype: torch.dtype,
    base: Tensor | None = None,
) -> Tensor:
    copies, slots = plan.copies, plan.slots
    if grouped.is_cuda:
        return _triton().collect(grouped, scores, slots, dtype, base)
    real = copies >= 0
    values = _exact(grouped[real])
    if scores is not None:
        values = values * take_at(scores, copies[real]).unsqueeze(1)
    tokens = values.new_zeros(slots.shape[0], grouped.shape[1])
    if base is not None:
        tokens += base
    tokens.index_add_(0, copies[real].long() // slots.shape[1], values)
    return tokens.to(dtype)


def _dot(tokens: Tensor, grouped: Tensor, slots: Tensor) -> Tensor:
    if tokens.is_cuda:
        return _triton().dot(tokens, grouped, slots)
    copies = _exact(grouped[slots.clamp_min(0).long()])
    products = (copies * tokens.to(copies.dtype).unsqueeze(1)).sum(-1)
    return products.masked_fill(slots < 0, 0)


def take_at(values: Tensor, places: Tensor) -> Tensor:
    if values.is_cuda:
        return _triton().take(values, places)
    flat = values.reshape(-1)
    return torch.cat([flat, flat.new_zeros(1)])[places.long()]


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, plan: GroupPlan, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(*plan)
        ctx.dtype = tokens.dtype
        return move_rows(tokens, None, plan, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        plan = GroupPlan(*ctx.saved_tensors)
        return sum_rows(grad.contiguous(), None, plan, ctx.dtype), None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        grouped: Tensor,
        scores: Tensor | None,
        plan: GroupPlan,
        is_needed: bool,
        base: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.save_for_backward(None if scores is None else grouped, scores, *plan)
        ctx.dtype, ctx.base_dtype = grouped.dtype, None if base is None else base.dtype
        if not is_needed:
            return grouped.new_empty(plan.slots.shape[0], grouped.shape[1], dtype=dtype)
        return sum_rows(grouped, scores, plan, dtype, base)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        grouped, scores, *of_plan = ctx.saved_tensors
        plan = GroupPlan(*of_plan)
        grad = grad.contiguous()
        grad_rows = move_rows(grad, scores, plan, ctx.dtype)
        grad_scores = None if scores is None else _dot(grad, grouped, plan.slots)
        grad_base = None if ctx.base_dtype is None else grad.to(ctx.base_dtype)
        return grad_rows, grad_scores, None, None, grad_base, None


class _RowScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, plan: GroupPlan) -> Tensor:
        ctx.save_for_backward(plan.slots)
        return take_at(scores, plan.copies).unsqueeze(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (slots,) = ctx.saved_tensors
        return take_at(grad, slots), None


def spread(tokens: Tensor, plan: GroupPlan, dtype: torch.dtype | None = None) -> Tensor:
    """Copy tokens (tokens, features) to the padded groups, (rows, features) in `dtype`."""
    return _Spread.apply(tokens, plan, dtype or tokens.dtype)


def collect(
    grouped: Tensor,
    scores: Tensor | None,  # (tokens, top k) float32, weights of the experts in a token's sum
    plan: GroupPlan,
    is_needed: bool = True,  # false: the caller only needs a tensor of that shape, not its values
    base: Tensor | None = None,  # (tokens, features), added to the sums
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Sum, for each token, its rows in the padded groups; return (tokens, features) in `dtype`."""
    return _Collect.apply(grouped, scores, plan, is_needed, base, dtype or grouped.dtype)


def row_scores(scores: Tensor, plan: GroupPlan) -> Tensor:
    """Return the score of each row of the padded groups, (rows, 1); 0 for padding."""
    return _RowScores.apply(scores, plan)


def _exact(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


class _ScoredSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, scores: Tensor) -> Tensor:
        gate_up, scores = gate_up.contiguous(), scores.contiguous()
        ctx.save_for_backward(gate_up, scores)
        if gate_up.is_cuda:
            return _triton().activate(gate_up, scores)
        gate, up = _exact(gate_up).chunk(2, dim=1)
        return (torch.nn.functional.silu(gate) * up * scores).to(gate_up.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate_up, scores = ctx.saved_tensors
        grad = grad.contiguous()
        if gate_up.is_cuda:
            return _triton().gradient(grad, gate_up, scores)
        gate, up = _exact(gate_up).chunk(2, dim=1)
        grad = _exact(grad)
        sigmoid = gate.sigmoid()
        silu = gate * sigmoid
        by_gate = grad * scores * up * sigmoid * (1 + gate * (1 - sigmoid))
        grad_gate_up = torch.cat([by_gate, grad * scores * silu], dim=1).to(gate_up.dtype)
        return grad_gate_up, (grad * silu * up).sum(1, keepdim=True).to(scores.dtype)


def scored_swiglu(gate_up: Tensor, scores: Tensor) -> Tensor:
    """Compute silu(gate) * up * score, (rows, hidden), rounded once.

    `gate_up` is (rows, 2 * hidden), the gate's columns first; scores are (rows, 1) float32.
    """
    return _ScoredSwiGLU.apply(gate_up, scores)


def cast(
    source: Tensor, target: Tensor, factor: Tensor | None = None, base: Tensor | None = None
) -> None:
    """Write `source * factor + base` to `target` in its dtype, all (..., rows, columns)."""
    if source.is_cuda:
        _triton().cast(source, target, factor, base)
        return
    scaled = source if factor is None else source * factor
    target.copy_(scaled if base is None else base.to(target.dtype) + scaled)
