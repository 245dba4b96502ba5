"""Proofs of GEMMs, forward, input gradient and weight gradient: of linear layers and of experts.

The reference multiplies the same BF16 operands in float32. Every product is looked at row by row
and column by column, a weight gradient group by group besides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch

from cookbook.titan.common.expert_groups import padded_sizes
from cookbook.titan.selftest.cases import BF16, FP8, Bound, Error, error_of
from cookbook.titan.selftest.inputs import uneven_counts, uneven_values

Products = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

# What each format may make of output, input gradient and weight gradient.
BOUNDS: dict[str, tuple[Bound, Bound, Bound]] = {
    "bf16": (BF16, BF16, BF16),
    "mxfp8": (FP8, FP8, FP8),
    "mxfp8_wgrad_with_hp": (FP8, FP8, BF16),
    "fp8_rowwise": (FP8, FP8, FP8),
    # Linear layers. One of Float8's recipes multiplies the weight gradient in BF16.
    "mx": (FP8, FP8, FP8),
    "float8": (FP8, FP8, replace(FP8, least=0)),
    # One scale for a whole tensor, and E5M2 with 2 bits for gradients.
    "float8 tensorwise": (Bound(0.1, 0.5), Bound(0.1, 0.5), Bound(0.1, 0.5)),
}
NAMES = ("output", "input gradient", "weight gradient")


@dataclass(frozen=True)
class GroupedShape:
    """Groups of rows (experts), K of an input row, N of an output row."""

    experts: int
    rows: int
    n: int
    k: int
    alignment: int

    def __str__(self) -> str:
        return f"{self.experts} experts of {self.n} x {self.k}, about {self.rows:,} rows"


def grouped_errors(
    shape: GroupedShape,
    kind: str,
    multiply: Callable[..., Products],
    device: str,
) -> Iterator[Error]:
    """Compare the three products of experts with uneven groups.

    Args:
        multiply: takes x (rows, K), weights (experts, N, K), offsets (experts,) int32 and the
            output's gradient (rows, N), BF16; returns output, input and weight gradient.
    """
    counts = uneven_counts(shape.experts, shape.rows)
    sizes = padded_sizes(counts, shape.alignment)
    starts = [0, *accumulate(sizes)]
    x = uneven_values(sum(sizes), shape.k, device, 1)
    grad = uneven_values(sum(sizes), shape.n, device, 2)
    for start, count, size in zip(starts, counts, sizes, strict=False):
        # As in training: what fills a group up is zero, in the forward and in the backward.
        x[start + count : start + size] = 0
        grad[start + count : start + size] = 0
    weight = torch.cat(
        [uneven_values(shape.n, shape.k, device, 100 + e) for e in range(shape.experts)]
    ).view(shape.experts, shape.n, shape.k)
    offsets = torch.tensor(starts[1:], dtype=torch.int32, device=device)
    out, dx, dw = multiply(x, weight, offsets, grad)
    bounds = BOUNDS[kind]
    parts = [(0,), (1,)]
    expected = torch.empty(out.shape, device=device)
    for expert, (start, stop) in enumerate(pairwise(starts)):
        torch.mm(x[start:stop].float(), weight[expert].float().t(), out=expected[start:stop])
    yield error_of(NAMES[0], out, expected, bounds[0], parts)
    expected = torch.empty(dx.shape, device=device)
    for expert, (start, stop) in enumerate(pairwise(starts)):
        torch.mm(grad[start:stop].float(), weight[expert].float(), out=expected[start:stop])
    yield error_of(NAMES[1], dx, expected, bounds[1], parts)
    expected = torch.stack(
        [grad[start:stop].float().t() @ x[start:stop].float() for start, stop in pairwise(starts)]
    )
    yield error_of(NAMES[2], dw, expected, bounds[2], [(0, 1), (0, 2)], floor=0.01)


def linear_errors(
    layer: torch.nn.Module, rows: int, kind: str, device: str, grad_scale: float = 1.0
) -> Iterator[Error]:
    """Compare the three products of a linear layer without bias, whose weight this replaces."""
    weight = next(layer.parameters())
    n, k = weight.shape
    with torch.no_grad():
        weight.copy_(uneven_values(n, k, device, 3).to(weight.dtype))
    x = uneven_values(rows, k, device, 4).requires_grad_()
    grad = uneven_values(rows, n, device, 5) * grad_scale
    out = layer(x)
    dx, dw = torch.autograd.grad(out, [x, weight], grad)
    bounds = BOUNDS[kind]
    high = weight.detach().float()
    exact = (x.detach().float() @ high.t(), grad.float() @ high, grad.float().t() @ x.float())
    for name, found, expected, bound in zip(NAMES, (out, dx, dw), exact, bounds, strict=True):
        yield error_of(name, found.detach(), expected.detach(), bound, [(0,), (1,)])
