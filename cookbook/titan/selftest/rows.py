"""Proofs of what moves tokens' rows: to their experts' groups, weighted and back, on one rank.

In each group every row is multiplied by a factor of that expert, which tells the experts apart.
Nothing else happens to a row, so the reference is a sum over a token's experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn as nn

from cookbook.titan.common.expert_groups import (
    collect,
    join,
    plan_groups,
    plan_on_device,
    row_scores,
    scored_swiglu,
    spread,
)
from cookbook.titan.selftest.cases import BF16, Bound, Error, error_of
from cookbook.titan.selftest.inputs import generator, random_routing, uneven_values

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
    shape: RowsShape,
    scored: Literal["before", "between", "after"],
    device: str,
    counted: bool = True,
) -> Iterator[Error]:
    """Compare a round trip with scores: tokens to groups, each group's factor, and back.

    The scores weight rows on their way to the groups, in these, or on their way back.

    A third of the copies belong to experts of other ranks. The rows that fill groups up are
    poisoned in between, where nothing of them may reach a token.

    Args:
        counted: whether the host knows how many copies each expert gets, as it does of DeepEP's;
            else all copies belong to experts of this rank, and the tokens are in float32.
    """
    others = shape.experts // 2 + 1 if counted else 0
    experts, scores = random_routing(shape.tokens, shape.experts + others, shape.top_k, device, 11)
    experts = experts.masked_fill(experts >= shape.experts, -1)
    scores = scores.masked_fill(experts < 0, 0).requires_grad_()
    x = random_rows(shape.tokens, shape.features, device, 12)
    x = (x if counted else x.float()).requires_grad_()
    grad = random_rows(shape.tokens, shape.features, device, 13)
    counts = torch.bincount(experts[experts >= 0], minlength=shape.experts).tolist()

    if counted:
        plan = plan_groups(experts, counts, shape.alignment)
    else:
        plan = plan_on_device(experts, shape.experts, shape.alignment)
    grouped = spread(x, scores if scored == "before" else None, plan, torch.bfloat16)
    factors = expert_factors(shape.experts, device)
    by_row = factors.repeat_interleave(plan.sizes.long())[:, None]
    fill = torch.cat(
        [
            torch.arange(size, device=device) >= count
            for size, count in zip(plan.sizes.tolist(), counts, strict=True)
        ]
    )[:, None]
    # Rows behind the last group belong to nobody.
    behind = len(grouped) - len(by_row)
    by_row, fill = (nn.functional.pad(one, (0, 0, 0, behind), value=1) for one in (by_row, fill))
    outputs = grouped.float() * by_row
    if scored == "between":
        outputs = outputs * row_scores(scores, plan)
    outputs = outputs.bfloat16().masked_fill(fill, _POISON)
    base = None if counted else random_rows(shape.tokens, shape.features, device, 14)
    out = collect(outputs, scores if scored == "after" else None, plan, base=base)
    dx, ds = torch.autograd.grad(out, [x, scores], grad)

    # What is not there has the factor 0.
    factor = torch.cat([factors, factors.new_zeros(1)])[experts]
    weights = (scores.detach() * factor).sum(1, keepdim=True)
    filled = grouped.detach()[fill.squeeze(1)].float()
    if filled.any():  # so is NaN
        raise ValueError("rows that fill groups up are not zero")
    wanted = x.detach().float() * weights
    yield error_of("output", out.detach(), wanted if base is None else wanted + base, MOVED)
    yield error_of("gradient of the tokens", dx, grad.float() * weights, MOVED)
    products = (x.detach().float() * grad.float()).sum(1, keepdim=True)
    yield error_of("gradient of the scores", ds, products * factor, SCORES, floor=1.0)


def swiglu_errors(rows: int, hidden: int, device: str) -> Iterator[Error]:
    """Compare SwiGLU times a score, and its gradients, with PyTorch's in float32."""
    both = random_rows(rows, 2 * hidden, device, 21).requires_grad_()
    scores = torch.rand(rows, 1, device=device, generator=generator(device, 22)).requires_grad_()
    grad = uneven_values(rows, hidden, device, 23)
    found = scored_swiglu(both, scores)
    found_grads = torch.autograd.grad(found, [both, scores], grad)
    exact = both.detach().float().requires_grad_()
    gate, up = exact.chunk(2, dim=1)
    wanted = nn.functional.silu(gate) * up * scores
    grads = torch.autograd.grad(wanted, [exact, scores], grad.float())
    parts = [(0,), (1,)]
    yield error_of("output", found.detach(), wanted.detach(), BF16, parts)
    yield error_of("gradient of the projections", found_grads[0], grads[0], BF16, parts)
    yield error_of("gradient of the scores", found_grads[1], grads[1], SCORES, floor=1.0)


def join_errors(experts: int, hidden: int, features: int, device: str) -> Iterator[Error]:
    """Compare two weights side by side, and their gradients, with PyTorch's own."""
    shape = (experts, hidden, features)
    weights = [
        uneven_values(experts * hidden, features, device, seed).view(shape).float() * 1.001
        for seed in (24, 25)
    ]
    for weight in weights:
        weight.requires_grad_()
    joined = join(torch.bfloat16, *weights)
    grad = uneven_values(experts * 2 * hidden, features, device, 26).view(joined.shape)
    grads = torch.autograd.grad(joined, weights, grad)
    exact = torch.cat([weight.detach() for weight in weights], 1)
    yield error_of("weights", joined.detach(), exact, BF16, [(0, 1)])
    yield error_of("gradient of the weights", torch.cat(grads, 1), grad.float(), BF16, [(0, 1)])
