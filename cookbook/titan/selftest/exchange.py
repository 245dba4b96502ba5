"""Proofs of an MoE layer's dispatch and combine, over all ranks of its mesh.

The layer is the cell's own, with two parts replaced: a router that routes as it is told, and
experts that multiply each row by a factor of their own. What a token comes back with is then a sum
over its experts, whichever way it went, and the reference needs no communication.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from cookbook.titan.common.token_shard import TokenShard, shard_tokens
from cookbook.titan.selftest.cases import FP8_ONCE, Bound, Error, error_of
from cookbook.titan.selftest.inputs import random_routing
from cookbook.titan.selftest.rows import MOVED, SCORES, expert_factors, random_rows

# Of an expert's factor: a sum of products of either sign over its rows. On a rank with one expert
# the error is one random number, which may be some times as large as usual; so the bound of the
# whole is six times 0.0025, of rows that were sent in FP8 six times 0.05, and a third more.
FACTOR = Bound(0.02, 0.04)
FACTOR_FP8 = Bound(0.4, 0.6)
# Of a score, from rows that were sent in FP8.
SCORES_FP8 = Bound(0.06, 0.25)


@dataclass(frozen=True)
class ExchangeShape:
    """Sequences of one data-parallel rank, all experts of the mesh."""

    batch: int
    length: int
    features: int
    experts: int
    top_k: int
    ep: int
    tp: int

    def __str__(self) -> str:
        return (
            f"{self.batch} x {self.length:,} tokens of {self.features} a rank, {self.experts} "
            f"experts over {self.ep} ranks, top {self.top_k}, TP {self.tp}"
        )


class FixedRouter(nn.Module):
    """Routes as it is told; the stand-in for a gate takes the plan that TP has for it."""

    def __init__(self, scores: torch.Tensor, experts: torch.Tensor, num_experts: int) -> None:
        super().__init__()
        self.gate = nn.Identity()
        self.scores, self.experts, self.num_experts = scores, experts, num_experts
        self.top_k = experts.shape[1]

    def forward(self, x: torch.Tensor, expert_bias: Any = None) -> tuple[torch.Tensor, ...]:
        """Scores and experts of all tokens, and how many each expert gets."""
        counts = torch.bincount(self.experts.flatten(), minlength=self.num_experts)
        return self.scores, self.experts, counts.to(torch.float32)


class FactorExperts(nn.Module):
    """Experts that multiply each of their rows by their factor, rounded to the row's type."""

    def __init__(self, num_experts: int, device: str) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.factor = nn.Parameter(expert_factors(num_experts, device))

    def forward(self, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        """Rows (rows, features), in groups of `sizes`; what lies behind the groups becomes zero."""
        factor = self.factor.to_local() if hasattr(self.factor, "to_local") else self.factor
        ends = sizes.to(torch.int64).cumsum(0)
        rows = torch.arange(len(x), device=x.device)
        expert = torch.searchsorted(ends, rows, right=True)
        padded = torch.cat([factor, factor.new_zeros(1)])
        return (x.float() * padded[expert][:, None]).to(x.dtype)


@dataclass(frozen=True)
class Exchanged:
    """What one rank of a data-parallel group puts in, and what it must get."""

    x: torch.Tensor
    grad: torch.Tensor
    scores: torch.Tensor
    experts: torch.Tensor


def inputs_of(shape: ExchangeShape, dp_rank: int, device: str) -> Exchanged:
    """Of all tokens of a data-parallel rank, the same on all its TP ranks."""
    tokens = shape.batch * shape.length
    experts, scores = random_routing(tokens, shape.experts, shape.top_k, device, 31 + 10 * dp_rank)
    return Exchanged(
        random_rows(tokens, shape.features, device, 32 + 10 * dp_rank),
        random_rows(tokens, shape.features, device, 33 + 10 * dp_rank),
        scores.requires_grad_(),
        experts,
    )


def exchange_errors(
    shape: ExchangeShape,
    given: Exchanged,
    layer: nn.Module,
    share: TokenShard | None,
    group: dist.ProcessGroup,
    quantized: tuple[bool, bool],
) -> Iterator[Error]:
    """Compare what the layer returns for `given`, forward and gradients.

    Args:
        layer: with `FixedRouter(given.scores, ...)` and `FactorExperts`, parallelized.
        share: this TP rank's part of every sequence; None without TP.
        group: of the ranks that the experts are divided among, in their order.
        quantized: whether the dispatch of tokens and that of the output's gradients are in FP8.
    """
    whole = (given.x, given.grad)
    mine = [value if share is None else shard_tokens(value, share) for value in whole]
    x, grad = (value.view(shape.batch, -1, shape.features) for value in mine)
    x = x.detach().requires_grad_()
    factor: Any = layer.experts.factor
    out = layer(x)
    out = out.to_local() if hasattr(out, "to_local") else out
    dx, ds, df = torch.autograd.grad(out, [x, given.scores, factor], grad)
    df = df.to_local() if hasattr(df, "to_local") else df

    device = given.x.device
    factors = expert_factors(shape.experts, str(device))
    scores = given.scores.detach()
    weights = (scores * factors[given.experts]).sum(1, keepdim=True)
    wanted, wanted_dx = (value.float() * weights for value in whole)
    products = (given.x.float() * given.grad.float()).sum(1, keepdim=True)
    wanted_ds = products * factors[given.experts]
    by_copy, experts = scores * products, given.experts
    if share is not None:
        wanted, wanted_dx, by_copy, experts = (
            shard_tokens(value, share) for value in (wanted, wanted_dx, by_copy, experts)
        )
    # Of each expert its products' sum and, as that is often close to zero, the root of the sum of
    # their squares, by which the error of the sum is measured.
    of_experts = torch.zeros(shape.experts, 2, device=device)
    by_copy = by_copy.flatten()
    of_experts.index_add_(0, experts.flatten(), torch.stack([by_copy, by_copy.square()], 1))
    dist.all_reduce(of_experts, group=group)
    wanted_df, squares = of_experts.chunk(shape.ep)[dist.get_rank(group)].unbind(1)
    sent, returned = quantized
    either = sent or returned
    rows = x.shape[0] * x.shape[1], shape.features
    yield error_of("output", out.detach().reshape(rows), wanted, FP8_ONCE if sent else MOVED)
    yield error_of(
        "gradient of the tokens", dx.reshape(rows), wanted_dx, FP8_ONCE if returned else MOVED
    )
    yield error_of(
        "gradient of the scores",
        ds,
        wanted_ds,
        SCORES_FP8 if either else SCORES,
        floor=1.0,
    )
    yield error_of(
        "gradient of the experts",
        df,
        wanted_df,
        FACTOR_FP8 if either else FACTOR,
        floor=1.0,
        sizes=squares.sqrt(),
    )
