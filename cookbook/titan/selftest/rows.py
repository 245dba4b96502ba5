"""Proofs of what moves tokens' rows: to their experts' groups, weighted and back, on one rank.

In each group every row is multiplied by a factor of that expert, which tells the experts apart.
Nothing else happens to a row, so the reference is a sum over a token's experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from cookbook.titan.common.expert_groups import collect, plan_groups, row_scores, spread
from cookbook.titan.selftest.inputs import generator, random_routing
from cookbook.titan.selftest.proof import Bound, Error, error_of

# A token's row is rounded to BF16 at every hand: three or four times there, and three times back.
MOVED = Bound(0.006, 0.012)
# Products of two rows, which nearly cancel: of the mean product.
SCORES = Bound(0.012, 0.04)
_POISON = 1e4


@dataclass(frozen=True)
class RowsShape:
    """Tokens that a rank has received, for its own experts."""

    tokens: int
    features: int
    experts: int
    top_k: int
    alignment: int

    def __str__(self) -> str:
        return (
            f"{self.tokens:,} tokens of {self.features}, {self.experts} experts, top {self.top_k}"
        )


def expert_factors(experts: int, device: str) -> torch.Tensor:
    """(experts,), float32: neighbours, and experts that lie a power of two apart, differ."""
    numbers = torch.arange(experts, device=device)
    return 0.5 + (numbers * 5 % 13) / 8


def random_rows(rows: int, columns: int, device: str, seed: int) -> torch.Tensor:
    """(rows, columns), BF16, all of one size."""
    values = torch.randn(rows, columns, device=device, generator=generator(device, seed))
    return values.bfloat16()


def row_errors(
    shape: RowsShape, scored: Literal["before", "between", "after"], device: str
) -> Iterator[Error]:
    """Compare a round trip with scores: tokens to groups, each group's factor, and back.

    The scores weight rows on their way to the groups, in these, or on their way back.

    A third of the copies belong to experts of other ranks. The rows that fill groups up are
    poisoned in between, where nothing of them may reach a token.
    """
    experts, scores = random_routing(
        shape.tokens, shape.experts * 3 // 2 + 1, shape.top_k, device, 11
    )
    experts = experts.masked_fill(experts >= shape.experts, -1)
    scores = scores.masked_fill(experts < 0, 0).requires_grad_()
    x = random_rows(shape.tokens, shape.features, device, 12).requires_grad_()
    grad = random_rows(shape.tokens, shape.features, device, 13)
    counts = torch.bincount(experts[experts >= 0], minlength=shape.experts).tolist()

    plan = plan_groups(experts, counts, shape.alignment)
    grouped = spread(x, scores if scored == "before" else None, plan)
    factors = expert_factors(shape.experts, device)
    by_row = factors.repeat_interleave(plan.sizes.long())[:, None]
    fill = torch.cat(
        [
            torch.arange(size, device=device) >= count
            for size, count in zip(plan.sizes.tolist(), counts, strict=True)
        ]
    )[:, None]
    outputs = grouped.float() * by_row
    if scored == "between":
        outputs = outputs * row_scores(scores, plan)
    outputs = outputs.bfloat16().masked_fill(fill, _POISON)
    out = collect(outputs, scores if scored == "after" else None, plan)
    dx, ds = torch.autograd.grad(out, [x, scores], grad)

    # What is not there has the factor 0.
    factor = torch.cat([factors, factors.new_zeros(1)])[experts]
    weights = (scores.detach() * factor).sum(1, keepdim=True)
    filled = grouped.detach()[fill.squeeze(1)].float()
    if filled.any():  # so is NaN
        raise ValueError("rows that fill groups up are not zero")
    yield error_of("output", out.detach(), x.detach().float() * weights, MOVED)
    yield error_of("gradient of the tokens", dx, grad.float() * weights, MOVED)
    products = (x.detach().float() * grad.float()).sum(1, keepdim=True)
    yield error_of("gradient of the scores", ds, products * factor, SCORES, floor=1.0)
