"""Errors of moving tokens to their experts' groups and back, on one rank and between ranks.

Each test expert multiplies its rows by its own factor. So the reference is a weighted sum over a
token's experts, which needs no communication.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from cookbook.titan.common.expert_groups import (
    collect,
    join,
    plan_groups,
    plan_on_device,
    row_scores,
    scored_swiglu,
    spread,
)
from cookbook.titan.common.token_shard import shard_tokens
from cookbook.titan.self_check import (
    BF16,
    FP8_ONCE,
    Bound,
    Error,
    error_of,
    generator,
    random_routing,
    random_rows,
    uneven_values,
)

# A token's row is rounded to BF16 three or four times up to the expert, and three times back.
MOVED = Bound(0.006, 0.012)
# Gradients of scores, relative to the mean: dot products of two rows, whose terms nearly cancel.
# SCORES_FP8 is for rows sent in FP8.
SCORES = Bound(0.012, 0.04)
SCORES_FP8 = Bound(0.06, 0.25)
# Gradient of an expert's factor: a sum over its rows of products of either sign. On a rank with one
# expert it is a single number, so bounds are eight times the usual error: 0.0025, or 0.05 in FP8.
FACTOR = Bound(0.02, 0.04)
FACTOR_FP8 = Bound(0.4, 0.6)
_POISON = 1e4


class RowsShape(NamedTuple):
    """The tokens that a rank has received for its own experts."""

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
    """Return factors (experts,) float32 that differ between experts a power of two apart."""
    return 0.5 + (torch.arange(experts, device=device) * 5 % 13) / 8


def row_errors(
    shape: RowsShape, on_activations: bool, device: str, counted: bool = True
) -> Iterator[Error]:
    """Compare a round trip of tokens: to their groups, times each group's factor, and back.

    Padding rows are poisoned in between, so that a token that includes one shows. Scores multiply
    the groups' rows (`on_activations`), or else the rows on their way back. If `counted`, the host
    knows the counts, and a third of the copies belong to other ranks' experts, as with DeepEP.
    Otherwise all experts are local, and the tokens are float32.
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
    grouped = spread(x, plan, torch.bfloat16)
    factors = expert_factors(shape.experts, device)
    by_row = factors.repeat_interleave(plan.sizes.long())[:, None]
    sizes = zip(plan.sizes.tolist(), counts, strict=True)
    fill = torch.cat([torch.arange(size, device=device) >= count for size, count in sizes])[:, None]
    # Rows after the last group are unused.
    behind = len(grouped) - len(by_row)
    by_row, fill = (nn.functional.pad(one, (0, 0, 0, behind), value=1) for one in (by_row, fill))
    outputs = grouped.float() * by_row
    if on_activations:
        outputs = outputs * row_scores(scores, plan)
    outputs = outputs.bfloat16().masked_fill(fill, _POISON)
    base = None if counted else random_rows(shape.tokens, shape.features, device, 14)
    out = collect(outputs, None if on_activations else scores, plan, base=base)
    dx, ds = torch.autograd.grad(out, [x, scores], grad)

    filled = grouped.detach()[fill.squeeze(1)].float()
    if filled.any():  # true for NaN too
        raise ValueError("padding rows are not zero")
    # A copy for another rank's expert has index -1, which finds the factor 0.
    factor = torch.cat([factors, factors.new_zeros(1)])[experts]
    weights = (scores.detach() * factor).sum(1, keepdim=True)
    wanted = x.detach().float() * weights
    yield error_of("output", out.detach(), wanted if base is None else wanted + base, MOVED)
    yield error_of("gradient of the tokens", dx, grad.float() * weights, MOVED)
    products = (x.detach().float() * grad.float()).sum(1, keepdim=True)
    yield error_of("gradient of the scores", ds, products * factor, SCORES, floor=1.0)


def swiglu_errors(rows: int, hidden: int, device: str) -> Iterator[Error]:
    """Compare SwiGLU times a score, and its gradients, with PyTorch in float32."""
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
    """Compare two joined weights, and their gradients, with `torch.cat`."""
    rows, shape = experts * hidden, (experts, hidden, features)
    values = [uneven_values(rows, features, device, seed).view(shape) for seed in (24, 25)]
    weights = [(value.float() * 1.001).requires_grad_() for value in values]
    joined = join(torch.bfloat16, *weights)
    grad = uneven_values(experts * 2 * hidden, features, device, 26).view(joined.shape)
    grads = torch.autograd.grad(joined, weights, grad)
    exact = torch.cat([weight.detach() for weight in weights], 1)
    yield error_of("weights", joined.detach(), exact, BF16, [(0, 1)])
    yield error_of("gradient of the weights", torch.cat(grads, 1), grad.float(), BF16, [(0, 1)])


# --- Dispatch and combine between ranks: the cell's MoE layer with a test router and test experts.


class ExchangeShape(NamedTuple):
    """The sequences of one data-parallel rank, and all experts of the mesh."""

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
    """A router with a fixed routing; the TP plan needs a module `gate`."""

    def __init__(self, scores: torch.Tensor, experts: torch.Tensor, num_experts: int) -> None:
        super().__init__()
        self.gate = nn.Identity()
        self.scores, self.experts, self.num_experts = scores, experts, num_experts
        self.top_k = experts.shape[1]

    def forward(self, x: torch.Tensor, expert_bias: Any = None) -> tuple[torch.Tensor, ...]:
        """Return the scores and experts of all tokens, and the number of tokens per expert."""
        counts = torch.bincount(self.experts.flatten(), minlength=self.num_experts)
        return self.scores, self.experts, counts.to(torch.float32)


def _local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class FactorExperts(nn.Module):
    """Experts that multiply their rows by a factor and round the result to the rows' dtype."""

    def __init__(self, num_experts: int, device: str) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.factor = nn.Parameter(expert_factors(num_experts, device))

    def forward(self, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        """Scale rows (rows, features) in groups of `sizes`; rows after the last group become 0."""
        factor = _local(self.factor)
        ends = sizes.to(torch.int64).cumsum(0)
        rows = torch.arange(len(x), device=x.device)
        expert = torch.searchsorted(ends, rows, right=True)
        padded = torch.cat([factor, factor.new_zeros(1)])
        return (x.float() * padded[expert][:, None]).to(x.dtype)


class Exchanged(NamedTuple):
    """The tokens, the output's gradient, and the routing of one data-parallel rank."""

    x: torch.Tensor
    grad: torch.Tensor
    scores: torch.Tensor
    experts: torch.Tensor


def inputs_of(shape: ExchangeShape, dp_rank: int, device: str) -> Exchanged:
    """Return the inputs of a data-parallel rank, the same on all its TP ranks."""
    tokens = shape.batch * shape.length
    experts, scores = random_routing(tokens, shape.experts, shape.top_k, device, 31 + 10 * dp_rank)
    x, grad = (random_rows(tokens, shape.features, device, 10 * dp_rank + n) for n in (32, 33))
    return Exchanged(x, grad, scores.requires_grad_(), experts)


def exchange_errors(
    shape: ExchangeShape,
    given: Exchanged,
    layer: nn.Module,  # with `FixedRouter(given.scores, ...)` and `FactorExperts`, parallelized
    tp_mesh: DeviceMesh | None,  # the ranks that share the sequences; None without TP
    group: dist.ProcessGroup,  # the EP ranks, in the order of their experts
    quantized: tuple[bool, bool],  # whether the forward's and the backward's dispatch use FP8
) -> Iterator[Error]:
    """Compare the layer's output and gradients for `given`."""

    def mine(*values: torch.Tensor) -> list[torch.Tensor]:
        if tp_mesh is None:
            return [*values]
        return [shard_tokens(value, shape.length, tp_mesh) for value in values]

    x, grad = (value.view(shape.batch, -1, shape.features) for value in mine(given.x, given.grad))
    x = x.detach().requires_grad_()
    factor: Any = layer.experts.factor
    out = _local(layer(x))
    dx, ds, df = torch.autograd.grad(out, [x, given.scores, factor], grad)

    device = given.x.device
    factors = expert_factors(shape.experts, str(device))[given.experts]
    scores = given.scores.detach()
    weights = (scores * factors).sum(1, keepdim=True)
    products = (given.x.float() * given.grad.float()).sum(1, keepdim=True)
    wanted, wanted_dx, by_copy, experts = mine(
        given.x.float() * weights, given.grad.float() * weights, scores * products, given.experts
    )
    # The gradient of an expert's factor is often close to zero, because its terms cancel: divide
    # its error by the root of the sum of squared terms.
    of_experts = torch.zeros(shape.experts, 2, device=device)
    by_copy = by_copy.flatten()
    of_experts.index_add_(0, experts.flatten(), torch.stack([by_copy, by_copy.square()], 1))
    dist.all_reduce(of_experts, group=group)
    wanted_df, squares = of_experts.chunk(shape.ep)[dist.get_rank(group)].unbind(1)
    sent, returned = (FP8_ONCE if one else MOVED for one in quantized)
    of_scores, of_factor = (SCORES_FP8, FACTOR_FP8) if any(quantized) else (SCORES, FACTOR)
    out, dx, df, sizes = out.detach().flatten(0, 1), dx.flatten(0, 1), _local(df), squares.sqrt()
    yield error_of("output", out, wanted, sent)
    yield error_of("gradient of the tokens", dx, wanted_dx, returned)
    yield error_of("gradient of the scores", ds, products * factors, of_scores, floor=1.0)
    yield error_of("gradient of the experts", df, wanted_df, of_factor, floor=1.0, sizes=sizes)
