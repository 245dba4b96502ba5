"""Tests that move tokens to their experts and back, on one rank and between ranks.

Each test expert multiplies its rows by its own factor. So the reference need not move tokens: it
multiplies each token by the sum of its experts' factors, weighted by their scores.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from cookbook.titan.common.expert_groups import (
    collect,
    plan_groups,
    plan_on_device,
    row_scores,
    scored_swiglu,
    spread,
)
from cookbook.titan.common.weight_copies import join
from cookbook.titan.self_check import (
    BF16,
    FP8_ONCE,
    Bound,
    Error,
    error_of,
    generator,
    random_routing,
    random_rows,
    run_both,
    uneven_values,
    with_gradients,
)

# A row is rounded to BF16 three or four times on its way to the expert, and three on its way back.
MOVED = Bound(0.006, 0.012)
# A router score's gradient is a sum whose terms may nearly cancel. So the error of a row is divided
# by the row's norm or, if larger, by the root mean square of all rows' norms (`floor=1.0`).
SCORES = Bound(0.012, 0.04)
SCORES_FP8 = Bound(0.06, 0.25)
# Bounds for the gradient of the factor by which a test expert multiplies its rows. The usual error
# is 0.0025 (0.05 with FP8). Allow eight times that: it varies widely if a rank has one expert.
FACTOR = Bound(0.02, 0.04)
FACTOR_FP8 = Bound(0.4, 0.6)
_POISON = 1e4


def expert_factors(experts: int, device: str) -> Tensor:
    """Return the factor by which each test expert multiplies its rows, (experts,) float32."""
    return 0.5 + (torch.arange(experts, device=device) * 5 % 13) / 8


def weighted_sum(x: Tensor, scores: Tensor, factors: Tensor) -> Tensor:
    """Return the output of an MoE layer in which each expert multiplies its tokens by a factor.

    Shapes: `x` (..., features); `scores` and `factors` (..., top k), one for each chosen expert.
    """
    return x * (scores * factors).sum(-1, keepdim=True)


def row_errors(
    tokens: int,
    features: int,
    num_experts: int,
    top_k: int,
    alignment: int,
    on_activations: bool,
    counted: bool,
    device: str,
) -> Iterator[Error]:
    """Yield the errors of copying tokens to their experts' groups and of summing the copies again.

    Each expert multiplies its group by a factor. Padding rows get large values, so that a sum that
    includes padding is clearly wrong. With `on_activations`, copies are multiplied by their router
    scores before the sum, otherwise in it. With `counted`, test what DeepEP needs: the CPU knows
    the size of each group, and some of a token's experts are on other ranks.
    """
    others = num_experts // 2 + 1 if counted else 0
    experts, scores = random_routing(tokens, num_experts + others, top_k, device, 11)
    experts = experts.masked_fill(experts >= num_experts, -1)
    scores = scores.masked_fill(experts < 0, 0)
    x = random_rows(tokens, features, device, 12)
    grad = random_rows(tokens, features, device, 13)
    counts = torch.bincount(experts[experts >= 0], minlength=num_experts).tolist()
    base = None
    if counted:
        plan = plan_groups(experts, counts, alignment)
    else:
        plan = plan_on_device(experts, num_experts, alignment)
        x, base = x.float(), random_rows(tokens, features, device, 14)
    local_experts = FactorExperts(num_experts, device)

    def round_trip(x: Tensor, scores: Tensor) -> Tensor:
        grouped = spread(x, plan, torch.bfloat16)
        sizes = zip(plan.sizes.tolist(), counts, strict=True)
        fill = torch.cat([torch.arange(size, device=device) >= count for size, count in sizes])
        fill = nn.functional.pad(fill, (0, len(grouped) - len(fill)), value=True)
        if grouped.detach()[fill].any():  # true for NaN too
            raise ValueError("padding rows are not zero")
        outputs = local_experts(grouped.float(), plan.sizes)
        if on_activations:
            outputs = outputs * row_scores(scores, plan)
        outputs = outputs.bfloat16().masked_fill(fill[:, None], _POISON)
        return collect(outputs, None if on_activations else scores, plan, base=base)

    # An expert on another rank has index -1, which selects the zero appended to the factors.
    factor = nn.functional.pad(local_experts.factor.detach(), (0, 1))[experts]
    reference = partial(weighted_sum, factors=factor)
    (out, wanted), dx, ds = run_both(round_trip, reference, [x, scores], grad)
    yield error_of("output", out, wanted if base is None else wanted + base, MOVED)
    yield error_of("gradient of the tokens", *dx, MOVED)
    yield error_of("gradient of the scores", *ds, SCORES, floor=1.0)


def swiglu_errors(rows: int, hidden: int, device: str) -> Iterator[Error]:
    """Yield the errors of `scored_swiglu` and of its gradients."""

    def reference(both: Tensor, scores: Tensor) -> Tensor:
        gate, up = both.chunk(2, dim=1)
        return nn.functional.silu(gate) * up * scores

    both = random_rows(rows, 2 * hidden, device, 21)
    scores = torch.rand(rows, 1, device=device, generator=generator(device, 22))
    grad = uneven_values(rows, hidden, device, 23)
    out, dboth, dscores = run_both(scored_swiglu, reference, [both, scores], grad)
    yield error_of("output", *out, BF16, [(0,), (1,)])
    yield error_of("gradient of the projections", *dboth, BF16, [(0,), (1,)])
    yield error_of("gradient of the scores", *dscores, SCORES, floor=1.0)


def join_errors(experts: int, hidden: int, features: int, device: str) -> Iterator[Error]:
    """Compare `join` of two weights, and its gradients, with `torch.cat`."""
    rows, shape = experts * hidden, (experts, hidden, features)
    values = [uneven_values(rows, features, device, seed).view(shape) for seed in (24, 25)]
    weights = [value.float() * 1.001 for value in values]
    grad = uneven_values(2 * rows, features, device, 26).view(experts, 2 * hidden, features)
    joined, *grads = with_gradients(partial(join, torch.bfloat16), weights, grad)
    exact = torch.cat([weight.detach() for weight in weights], 1)
    yield error_of("weights", joined, exact, BF16, [(0, 1)])
    yield error_of("gradient of the weights", torch.cat(grads, 1), grad.float(), BF16, [(0, 1)])
    # The second of two microbatches adds to the gradients.
    for _ in range(2):
        join(torch.bfloat16, *weights).backward(grad)
    twice = torch.cat([weight.grad for weight in weights if weight.grad is not None], 1)
    yield error_of("gradient of two microbatches", twice, 2 * grad.float(), BF16, [(0, 1)])


# --- Dispatch and combine between ranks.


class FixedRouter(nn.Module):
    """A router with fixed scores and fixed expert indices, both given as (batch, length, top k)."""

    def __init__(self, scores: Tensor, experts: Tensor, num_experts: int) -> None:
        super().__init__()
        self.gate = nn.Identity()  # required by the TP plan
        self.scores, self.experts, self.num_experts = scores, experts, num_experts
        self.top_k = experts.shape[-1]

    def forward(self, x: Tensor, expert_bias: Any = None) -> tuple[Tensor, ...]:
        """Return the scores and experts of all tokens, and the number of tokens per expert."""
        counts = torch.bincount(self.experts.flatten(), minlength=self.num_experts)
        return self.scores.flatten(0, 1), self.experts.flatten(0, 1), counts.to(torch.float32)


def _local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class FactorExperts(nn.Module):
    """Experts that multiply their rows by a factor and round the result to the rows' dtype."""

    def __init__(self, num_experts: int, device: str) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.factor = nn.Parameter(expert_factors(num_experts, device))

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        """Multiply each row of `x` by its group's factor. Rows after the last group become zero."""
        ends = sizes.to(torch.int64).cumsum(0)
        rows = torch.arange(len(x), device=x.device)
        expert = torch.searchsorted(ends, rows, right=True)
        padded = nn.functional.pad(_local(self.factor), (0, 1))
        return (x.float() * padded[expert][:, None]).to(x.dtype)


class Exchanged(NamedTuple):
    """The inputs of one data-parallel rank, including the gradient of the MoE layer's output."""

    x: Tensor  # (batch, length, features), like `grad`
    grad: Tensor
    scores: Tensor  # (batch, length, top k), like `experts`
    experts: Tensor


def exchange_inputs(
    batch: int, length: int, features: int, num_experts: int, top_k: int, dp_rank: int, device: str
) -> Exchanged:
    """Return the inputs of a data-parallel rank, the same on all its TP ranks."""
    tokens, seed = batch * length, 10 * dp_rank
    experts, scores = random_routing(tokens, num_experts, top_k, device, seed + 31)
    x, grad = (random_rows(tokens, features, device, seed + n) for n in (32, 33))
    return Exchanged(*(one.unflatten(0, (batch, length)) for one in (x, grad, scores, experts)))


def exchange_errors(
    given: Exchanged,
    layer: nn.Module,  # a parallelized MoE layer with `FactorExperts` and a `FixedRouter`
    part: slice,  # this TP rank's positions in every sequence
    group: dist.ProcessGroup,  # the EP ranks, in the order of their experts
    quantized: tuple[bool, bool],  # whether FP8 is used in (dispatch's forward, combine's backward)
) -> Iterator[Error]:
    """Yield the errors of an MoE layer's output and gradients, relative to a float32 reference."""
    num_experts = layer.router.num_experts
    x, grad, experts = (one[:, part].clone() for one in (given.x, given.grad, given.experts))
    leaves = [x, given.scores, layer.experts.factor]
    out, dx, ds, df = with_gradients(lambda x, *_: _local(layer(x)), leaves, grad)

    factors = expert_factors(num_experts, str(x.device))[given.experts]
    exact = [given.x.float(), given.scores, factors]
    wanted, wanted_dx, wanted_ds, by_copy = with_gradients(weighted_sum, exact, given.grad.float())
    # The gradient of an expert's factor is a sum of one term per token. The terms nearly cancel, so
    # divide the error by the square root of the terms' summed squares, not by the sum.
    terms = by_copy[:, part].flatten()
    of_experts = torch.zeros(num_experts, 2, device=x.device)
    of_experts.index_add_(0, experts.flatten(), torch.stack([terms, terms.square()], 1))
    dist.all_reduce(of_experts, group=group)
    wanted_df, squares = of_experts.chunk(group.size())[dist.get_rank(group)].unbind(1)
    sent, returned = (FP8_ONCE if one else MOVED for one in quantized)
    of_scores, of_factor = (SCORES_FP8, FACTOR_FP8) if any(quantized) else (SCORES, FACTOR)
    ds, wanted_ds = ds.flatten(0, 1), wanted_ds.flatten(0, 1)
    df, root = _local(df), squares.sqrt()
    yield error_of("output", out, wanted[:, part], sent, parts=[(0, 1)])
    yield error_of("gradient of the tokens", dx, wanted_dx[:, part], returned, parts=[(0, 1)])
    yield error_of("gradient of the scores", ds, wanted_ds, of_scores, floor=1.0)
    yield error_of("gradient of the experts", df, wanted_df, of_factor, floor=1.0, sizes=root)
