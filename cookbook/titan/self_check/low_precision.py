"""Tests of the FP8 kernels of `common/fp8.py`: a grouped GEMM alone, and a layer of experts."""

from collections.abc import Iterator

import torch
import torch.nn as nn
from torch import Tensor

from cookbook.titan.common import fp8
from cookbook.titan.common.expert_groups import plan_on_device, row_scores
from cookbook.titan.common.fp8 import Quantized
from cookbook.titan.self_check import (
    Bound,
    Error,
    error_of,
    random_routing,
    random_rows,
    with_gradients,
)

# Three GEMMs of quantized tensors follow one another; the usual error is 0.068.
LAYER = Bound(0.09, 0.2, least=0.03)
# A score's gradient is a sum whose terms nearly cancel.
SCORES = Bound(0.15, 0.5)


def grouped_products(
    x: Tensor, weight: Tensor, ends: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a grouped GEMM in FP8, its input gradient and its weight gradient.

    `x` is (rows, in), `weight` (experts, out, in), `grad` (rows, out).
    """
    rows, given, weights = fp8.quantize(x[None]), fp8.quantize(grad[None]), fp8.quantize(weight)
    numbers = torch.arange(len(x), device=x.device, dtype=torch.int32)
    groups = torch.bucketize(numbers, ends, right=True, out_int32=True)

    def by_row(one: Quantized) -> Quantized:
        maxima = fp8.group_maxima(one.scales[0], groups, len(ends))
        return Quantized(one.values[0], one.scales[0], maxima)

    rows, given = by_row(rows), by_row(given)
    out = fp8.products(rows, weights.values, weights.scales, ends)
    transposed = fp8.transpose(weights)
    scales = weights.group_scales[:, None].expand(-1, weight.shape[2]).contiguous()
    by_x = fp8.products(given, transposed, scales, ends)
    by_weight = fp8.weight_gradients(
        fp8.transpose(given, groups)[0], given.group_scales,
        fp8.transpose(rows, groups)[0], rows.group_scales, ends,
    )  # fmt: skip
    return out, by_x, by_weight


def layer_errors(
    tokens: int, features: int, hidden: int, experts: int, top_k: int, alignment: int, device: str
) -> Iterator[Error]:
    """Yield the errors of a layer of routed experts in FP8, relative to float32."""
    chosen, scores = random_routing(tokens, experts, top_k, device, 41)
    plan = plan_on_device(chosen, experts, alignment)
    x, grad, base = (random_rows(tokens, features, device, seed) for seed in (42, 43, 44))
    shapes = (hidden, features), (features, hidden), (hidden, features)
    gate, down, up = (
        random_rows(experts * out, inner, device, seed).view(experts, out, inner) / inner**0.5
        for seed, (out, inner) in enumerate(shapes, 45)
    )

    def low(x: Tensor, scores: Tensor, gate: Tensor, down: Tensor, up: Tensor) -> Tensor:
        quantized = fp8.quantize_weights(gate.detach(), up.detach(), down.detach())
        given = x, row_scores(scores, plan), base, (gate, down, up), quantized, plan
        return fp8.experts(*given, dtype=torch.float32)

    def exact(x: Tensor, scores: Tensor, gate: Tensor, down: Tensor, up: Tensor) -> Tensor:
        out = base.float()
        for expert in range(experts):
            token, place = (chosen == expert).nonzero(as_tuple=True)
            rows = x[token]
            hidden = nn.functional.silu(rows @ gate[expert].T) * (rows @ up[expert].T)
            part = (hidden * scores[token, place].unsqueeze(1)) @ down[expert].T
            out = out.index_add(0, token, part)
        return out

    leaves = [x, scores, gate, down, up]
    found = with_gradients(low, [one.clone() for one in leaves], grad.float())
    wanted = with_gradients(exact, [one.float().clone() for one in leaves], grad.float())
    yield error_of("output", found[0] - base, wanted[0] - base, LAYER, floor=0.1)
    yield error_of("gradient of the tokens", found[1], wanted[1], LAYER, floor=0.1)
    yield error_of("gradient of the scores", found[2], wanted[2], SCORES, floor=1.0)
    for name, one, right in zip(("gate", "down", "up"), found[3:], wanted[3:], strict=True):
        yield error_of(f"gradient of the {name} weights", one, right, LAYER, [(0,)], floor=0.1)
