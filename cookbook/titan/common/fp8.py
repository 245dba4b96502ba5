"""Routed experts in FP8: every tensor is quantized once, where it is made.

    forward     tokens -> FP8 rows -> groups -> GEMM -> SwiGLU -> FP8 rows -> GEMM -> sums of tokens
    backward    the same way back; each weight gradient reads transposed copies of the FP8 rows

Rows have one scale each in the GEMMs that contract over features. In the weight gradients, which
contract over rows, all rows of an expert have one scale: see `fp8_kernels.py`. Routers, scores,
sums and everything outside the experts' GEMMs keep their precision.

A GPU runs the Triton kernels and `torch._scaled_grouped_mm`. A CPU computes the same from the same
FP8 values with PyTorch operations.
"""

from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cookbook.titan.common.expert_groups import GroupPlan, move_rows, sum_rows, take_at
from cookbook.titan.common.weight_copies import give

FP8 = torch.float8_e4m3fn
_LARGEST = 448.0


class Quantized(NamedTuple):
    """Rows in FP8: `values.float() * scales.unsqueeze(-1)` restores them.

    `group_scales` are the largest scales of each group of rows.
    """

    values: Tensor  # (..., rows, columns) float8_e4m3fn
    scales: Tensor  # (..., rows) float32, powers of two
    group_scales: Tensor  # (groups,) float32


def has_kernels() -> bool:
    """Return whether this device multiplies in FP8; elsewhere the same numbers are emulated."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


def _kernels() -> Any:
    return import_module("cookbook.titan.common.fp8_kernels")


def quantize(*parts: Tensor) -> Quantized:
    """Quantize tensors (groups, rows, columns), and join them along their rows."""
    groups, _, columns = parts[0].shape
    total = sum(part.shape[1] for part in parts)
    device = parts[0].device
    values = torch.empty(groups, total, columns, dtype=FP8, device=device)
    scales = torch.empty(groups, total, dtype=torch.float32, device=device)
    group_scales = torch.zeros(groups, dtype=torch.float32, device=device)
    first = 0
    for part in parts:
        if part.is_cuda:
            _kernels().quantize(part.contiguous(), values, scales, group_scales, first)
        else:
            end = first + part.shape[1]
            values[:, first:end], scales[:, first:end] = _quantized(part)
        first += part.shape[1]
    if device.type != "cuda":
        group_scales = scales.amax(1) if total else group_scales
    return Quantized(values, scales, group_scales)


def _quantized(rows: Tensor) -> tuple[Tensor, Tensor]:
    rows = rows.float()
    largest = rows.abs().amax(-1)
    # frexp's mantissa is in [0.5, 1); 448 = 0.875 * 2**9.
    mantissa, exponent = torch.frexp(largest)
    k = (9 - exponent - (mantissa > 0.875).int()).clamp(-100, 100)
    # A row of zeros must not raise the scale of its group.
    k = torch.where(largest > 0, k, 100)
    scales = torch.ldexp(torch.ones_like(largest), -k)
    scales = torch.where(largest.isfinite(), scales, torch.nan)
    values = torch.ldexp(rows, k.unsqueeze(-1)).clamp(-_LARGEST, _LARGEST)
    return values.to(FP8), scales


def group_maxima(scales: Tensor, groups: Tensor, count: int) -> Tensor:
    """Return the largest of the rows' scales in each of `count` groups; `count` is no group."""
    here = groups < count
    maxima = scales.new_zeros(count)
    return maxima.scatter_reduce_(0, groups[here].long(), scales[here], "amax")


def activate(gate_up: Tensor, scores: Tensor, groups: Tensor, count: int) -> Quantized:
    """Return SwiGLU of `gate_up` (rows, 2 * hidden) times scores (rows, 1), quantized.

    `groups` (rows,) int32 are the rows' experts, `count` for rows that are not used.
    """
    if gate_up.is_cuda:
        group_scales = torch.zeros(count, dtype=torch.float32, device=gate_up.device)
        values, scales = _kernels().activate(gate_up, scores, groups, group_scales)
        return Quantized(values, scales, group_scales)
    gate, up = gate_up.float().chunk(2, dim=1)
    values, scales = _quantized(torch.nn.functional.silu(gate) * up * scores)
    return Quantized(values, scales, group_maxima(scales, groups, count))


def gradient(
    grad: Tensor, gate_up: Tensor, scores: Tensor, groups: Tensor, count: int
) -> tuple[Quantized, Tensor]:
    """Return the gradients of `gate_up`, quantized, and of `scores`, from that of `activate`."""
    if grad.is_cuda:
        group_scales = torch.zeros(count, dtype=torch.float32, device=grad.device)
        values, scales, by_score = _kernels().gradient(grad, gate_up, scores, groups, group_scales)
        return Quantized(values, scales, group_scales), by_score
    gate, up = gate_up.float().chunk(2, dim=1)
    grad = grad.float()
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    scored = grad * scores
    by_gate = scored * up * sigmoid * (1 + gate * (1 - sigmoid))
    values, scales = _quantized(torch.cat([by_gate, scored * silu], dim=1))
    found = Quantized(values, scales, group_maxima(scales, groups, count))
    here = (groups < count).unsqueeze(1)
    return found, (grad * silu * up).sum(1, keepdim=True).where(here, 0)


def transpose(
    rows: Quantized, groups: Tensor | None = None, copies: Tensor | None = None, top_k: int = 1
) -> Tensor:
    """Return FP8 rows (parts, rows, columns) as (parts, columns, rows) under one scale a group.

    The group of a row is its part, or `groups` (rows,). With `copies` (rows,), row i is row
    `copies[i] // top_k`; -1 stands for zeros.
    """
    values, scales, group_scales = rows
    if values.dim() == 2:
        values, scales = values.unsqueeze(0), scales.unsqueeze(0)
    if values.is_cuda:
        return _kernels().transpose(values, scales, group_scales, groups, copies, top_k)
    restored = values.float() * scales.unsqueeze(-1)
    if copies is not None:
        source = (copies // top_k).clamp_min(0).long()
        restored = restored[:, source] * (copies >= 0).unsqueeze(1)
    if groups is None:
        divisor = group_scales.view(-1, 1, 1)
    else:
        divisor = torch.cat([group_scales, group_scales.new_ones(1)])[groups.long()].view(1, -1, 1)
        restored = restored * (groups < len(group_scales)).view(1, -1, 1)
    divisor = torch.where(divisor > 0, divisor, 1)
    return (restored / divisor).to(FP8).transpose(1, 2).contiguous()


def products(rows: Quantized, weights: Tensor, scales: Tensor, ends: Tensor) -> Tensor:
    """Multiply each group of rows by its expert's weights (experts, out, in), in BF16.

    `scales` are (experts, out).
    """
    if rows.values.is_cuda:
        return torch._scaled_grouped_mm(
            rows.values, weights.transpose(1, 2), rows.scales, scales, offs=ends,
            out_dtype=torch.bfloat16, use_fast_accum=True,
        )  # fmt: skip
    restored = rows.values.float() * rows.scales.unsqueeze(1)
    matrices = weights.float() * scales.unsqueeze(2)
    out = restored.new_zeros(len(restored), weights.shape[1])
    start = 0
    for matrix, end in zip(matrices, ends.tolist(), strict=True):
        out[start:end] = restored[start:end] @ matrix.T
        start = end
    return out.bfloat16()


def weight_gradients(
    grads: Tensor, grad_scales: Tensor, rows: Tensor, row_scales: Tensor, ends: Tensor
) -> Tensor:
    """Return each expert's weight gradient, (experts, out, in) in BF16.

    `grads` (out, rows) and `rows` (in, rows) are transposed copies; the scales are (experts,).
    """
    if grads.is_cuda:
        out, inner = len(grads), len(rows)
        return torch._scaled_grouped_mm(
            grads,
            rows.t(),
            grad_scales.repeat_interleave(out),
            row_scales.repeat_interleave(inner),
            offs=ends,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
    found, start = [], 0
    for expert, end in enumerate(ends.tolist()):
        product = grads[:, start:end].float() @ rows[:, start:end].float().T
        found.append(product * grad_scales[expert] * row_scales[expert])
        start = end
    return torch.stack(found).bfloat16()


class Weights(NamedTuple):
    """The FP8 weights of all experts: as they are, and transposed for their inputs' gradient."""

    gate_up: Quantized  # (experts, 2 * hidden, features)
    down: Quantized  # (experts, features, hidden)
    gate_up_t: Tensor  # (experts, features, 2 * hidden) under an expert's scale
    down_t: Tensor  # (experts, hidden, features)


def quantize_weights(gate: Tensor, up: Tensor, down: Tensor) -> Weights:
    """Quantize the experts' weights, of any floating-point type."""
    gate_up, down = quantize(gate, up), quantize(down)
    return Weights(gate_up, down, transpose(gate_up), transpose(down))


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        scores: Tensor,
        base: Tensor | None,
        gate: Tensor,
        down: Tensor,
        up: Tensor,
        plan: GroupPlan,
        weights: Weights,
        last: AbstractContextManager[None] | None,
        dtype: torch.dtype,
    ) -> Tensor:
        count, top_k = len(plan.sizes), plan.slots.shape[1]
        groups = torch.bucketize(
            torch.arange(len(plan.copies), device=tokens.device, dtype=torch.int32),
            plan.ends, right=True, out_int32=True,
        )  # fmt: skip
        quantized = quantize(tokens.unsqueeze(0))
        rows = spread(quantized, plan)
        gate_up = products(rows, weights.gate_up.values, weights.gate_up.scales, plan.ends)
        activations = activate(gate_up, scores, groups, count)
        ctx.save_for_backward(
            *quantized, gate_up, scores, groups, *activations, *plan,
            weights.gate_up.group_scales, weights.down.group_scales,
            weights.gate_up_t, weights.down_t,
        )  # fmt: skip
        ctx.top_k, ctx.dtype, ctx.weights = top_k, tokens.dtype, (gate, down, up)
        ctx.base_dtype = None if base is None else base.dtype
        if last is None:
            return tokens.new_empty(len(plan.slots), tokens.shape[1], dtype=dtype)
        with last:
            out = products(activations, weights.down.values, weights.down.scales, plan.ends)
        return sum_rows(out, None, plan, dtype, base)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        tokens, (gate_up, scores, groups) = Quantized(*saved[:3]), saved[3:6]
        activations, plan = Quantized(*saved[6:9]), GroupPlan(*saved[9:13])
        gate_up_scales, down_scales, gate_up_t, down_t = saved[13:]
        count = len(plan.sizes)
        grad = grad.contiguous()
        quantized = quantize(grad.unsqueeze(0))

        def of_experts(scales: Tensor, width: int) -> Tensor:
            return scales.unsqueeze(1).expand(-1, width).contiguous()

        features, hidden = down_t.shape[2], down_t.shape[1]
        rows = spread(quantized, plan)
        grad_h = products(rows, down_t, of_experts(down_scales, hidden), plan.ends)
        given, by_scores = gradient(grad_h, gate_up, scores, groups, count)
        del grad_h, rows
        grad_t = transpose(quantized, copies=plan.copies, top_k=ctx.top_k)[0]
        rows_t = transpose(activations, groups)[0]
        one = quantized.group_scales.expand(count)
        by_down = weight_gradients(grad_t, one, rows_t, activations.group_scales, plan.ends)
        del grad_t, rows_t
        grad_rows = products(given, gate_up_t, of_experts(gate_up_scales, features), plan.ends)
        by_tokens = sum_rows(grad_rows, None, plan, ctx.dtype, None)
        del grad_rows
        grad_t = transpose(given, groups)[0]
        rows_t = transpose(tokens, copies=plan.copies, top_k=ctx.top_k)[0]
        one = tokens.group_scales.expand(count)
        by_gate_up = weight_gradients(grad_t, given.group_scales, rows_t, one, plan.ends)
        by_gate, by_up = by_gate_up.chunk(2, dim=1)
        by_base = None if ctx.base_dtype is None else grad.to(ctx.base_dtype)
        found = zip((by_gate, by_down, by_up), ctx.weights, strict=True)
        of_weights = (give(grad, weight) for grad, weight in found)
        return by_tokens, by_scores, by_base, *of_weights, None, None, None, None


def spread(rows: Quantized, plan: GroupPlan) -> Quantized:
    """Copy quantized tokens (1, tokens, features) to their groups' rows; padding becomes zeros."""
    tokens = plan.copies // plan.slots.shape[1]
    values = move_rows(rows.values[0].view(torch.int32), None, plan, torch.int32).view(FP8)
    return Quantized(values, take_at(rows.scales[0], tokens), rows.group_scales)


_ALL_NEEDED = nullcontext()


def experts(
    tokens: Tensor,
    scores: Tensor,
    base: Tensor | None,
    weights: tuple[Tensor, Tensor, Tensor],
    quantized: Weights,
    plan: GroupPlan,
    last: AbstractContextManager[None] | None = _ALL_NEEDED,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return `base` plus the sum of each token's experts, weighted by their scores.

    `tokens` are (tokens, features), `scores` (rows, 1) those of the plan's rows, `weights` the
    experts' gate, down and up weights (experts, out, in), which get the gradients, and `quantized`
    the same in FP8. `last` is entered around the last GEMM; None skips it: the values are not used.
    """
    gate, down, up = weights
    return _Experts.apply(
        tokens, scores, base, gate, down, up, plan, quantized, last, dtype or tokens.dtype
    )
