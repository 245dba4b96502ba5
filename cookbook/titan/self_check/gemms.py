"""Errors of matrix products and their gradients: linear layers, experts, the loss in chunks.

The reference multiplies the same BF16 operands in float32. Every product is compared by rows and by
columns, the weight gradient of experts by groups too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist

from cookbook.titan.common.chunked_loss import IGNORE_INDEX, VocabularyShard, chunked_cross_entropy
from cookbook.titan.common.expert_groups import padded_sizes
from cookbook.titan.self_check.cases import (
    BF16,
    FP8,
    Bound,
    Error,
    error_of,
    generator,
    uneven_counts,
    uneven_values,
)

Products = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

# Of output, input gradient and weight gradient, by format.
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
# The sum of a few thousand losses; gradients from logits that were rounded to BF16.
LOSS = Bound(5e-4, 5e-4)
GRADIENT = Bound(0.012, 0.04)


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
    shape: GroupedShape, kind: str, multiply: Callable[..., Products], device: str
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
        # As in training: padding rows are zero, in the forward and in the backward.
        x[start + count : start + size] = 0
        grad[start + count : start + size] = 0
    by_expert = [uneven_values(shape.n, shape.k, device, 100 + e) for e in range(shape.experts)]
    weight = torch.stack(by_expert)
    offsets = torch.tensor(starts[1:], dtype=torch.int32, device=device)
    *rows, dw = multiply(x, weight, offsets, grad)
    groups, bounds = [*pairwise(starts)], BOUNDS[kind]
    by_row = zip(NAMES, rows, (x, grad), (weight.mT, weight), bounds, strict=False)
    for name, found, left, right, bound in by_row:
        expected = torch.empty(found.shape, device=device)
        for (start, stop), one in zip(groups, right, strict=True):
            torch.mm(left[start:stop].float(), one.float(), out=expected[start:stop])
        yield error_of(name, found, expected, bound, [(0,), (1,)])
    expected = torch.stack([grad[a:b].float().t() @ x[a:b].float() for a, b in groups])
    yield error_of(NAMES[2], dw, expected, bounds[2], [(0, 1), (0, 2)], floor=0.01)


def linear_errors(layer: torch.nn.Module, rows: int, kind: str, device: str) -> Iterator[Error]:
    """Compare the three products of a linear layer without bias, whose weight this replaces."""
    weight = next(layer.parameters())
    n, k = weight.shape
    with torch.no_grad():
        weight.copy_(uneven_values(n, k, device, 3).to(weight.dtype))
    x = uneven_values(rows, k, device, 4).requires_grad_()
    grad = uneven_values(rows, n, device, 5)
    out = layer(x)
    dx, dw = torch.autograd.grad(out, [x, weight], grad)
    high = weight.detach().float()
    exact = (x.detach().float() @ high.t(), grad.float() @ high, grad.float().t() @ x.float())
    for name, found, expected, bound in zip(NAMES, (out, dx, dw), exact, BOUNDS[kind], strict=True):
        yield error_of(name, found.detach(), expected.detach(), bound, [(0,), (1,)])


def loss_errors(
    tokens: int,
    dim: int,
    vocabulary: int,
    num_chunks: int,
    group: dist.ProcessGroup | None,
    backend: str | None,
    device: str,
) -> Iterator[Error]:
    """Compare the loss in chunks and its gradients with the cross-entropy of whole logits.

    Args:
        group: of the TP ranks that the vocabulary is cut over; all of them get the same inputs.
    """
    random = generator(device, 21)
    hidden = torch.randn(tokens, dim, device=device, generator=random).bfloat16()
    # Logits of about 2, so that some words are likely.
    weight = torch.randn(vocabulary, dim, device=device, generator=random) * (2 / dim**0.5)
    weight = weight.bfloat16()
    labels = torch.randint(vocabulary, (tokens,), device=device, generator=random)
    labels[1::7] = IGNORE_INDEX
    labels[0], labels[-1] = 0, vocabulary - 1
    ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
    # As DTensor cuts: all parts of one size but the last.
    size = -(-vocabulary // ranks)
    words = slice(rank * size, min((rank + 1) * size, vocabulary))
    shard = None if group is None else VocabularyShard(words.start, group)
    x, w = hidden.clone().requires_grad_(), weight[words].clone().requires_grad_()
    loss = chunked_cross_entropy(x[None], w, labels[None], num_chunks, shard, backend)
    # As TorchTitan divides the sum by the tokens.
    dx, dw = torch.autograd.grad(loss / tokens, [x, w])

    exact = [hidden.float().requires_grad_(), weight.float().requires_grad_()]
    wanted = torch.nn.functional.cross_entropy(exact[0] @ exact[1].t(), labels, reduction="sum")
    wanted_dx, wanted_dw = torch.autograd.grad(wanted / tokens, exact)
    yield error_of("loss", loss.detach()[None], wanted.detach()[None], LOSS)
    yield error_of("gradient of the weight", dw, wanted_dw[words], GRADIENT, [(0,)], floor=0.1)
    if group is not None:
        # Each rank's is a term of a sum over them.
        dx = dx.float()
        dist.all_reduce(dx, group=group)
    yield error_of("gradient of the hidden states", dx, wanted_dx, GRADIENT)
