"""Triton kernels that move, weight and sum the rows of a group plan on a GPU, in one pass each.

`expert_groups` does the same with PyTorch operations on a CPU. Sums run in float32, in a fixed
order and without atomics, so every run has the same ones.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]


@triton.jit
def _spread_kernel(  # type: ignore[no-untyped-def]
    tokens, rows, scores, grouped, features, has_scores: tl.constexpr, block: tl.constexpr
):
    slot = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    row = tl.load(rows + slot).to(tl.int64)
    inside = column < features
    # Padding (row -1) reads nothing and writes zeros.
    value = tl.load(tokens + row * features + column, mask=inside & (row >= 0), other=0.0)
    if has_scores:
        value = value.to(tl.float32) * tl.load(scores + slot)
    tl.store(grouped + slot * features + column, value, mask=inside)


@triton.jit
def _collect_kernel(  # type: ignore[no-untyped-def]
    grouped,
    slots,
    scores,
    tokens,
    features,
    has_scores: tl.constexpr,
    top_k: tl.constexpr,
    block: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < features
    total = tl.zeros((block,), dtype=tl.float32)
    for k in tl.static_range(top_k):
        slot = tl.load(slots + token * top_k + k).to(tl.int64)
        value = tl.load(grouped + slot * features + column, mask=inside & (slot >= 0), other=0.0)
        if has_scores:
            total += value.to(tl.float32) * tl.load(scores + token * top_k + k)
        else:
            total += value.to(tl.float32)
    tl.store(tokens + token * features + column, total, mask=inside)


@triton.jit
def _dot_kernel(  # type: ignore[no-untyped-def]
    tokens,
    grouped,
    slots,
    products,
    features: tl.constexpr,
    top_k: tl.constexpr,
    block: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    for k in tl.static_range(top_k):
        slot = tl.load(slots + token * top_k + k).to(tl.int64)
        total = tl.zeros((block,), dtype=tl.float32)
        if slot >= 0:
            for start in range(0, features, block):
                column = start + tl.arange(0, block)
                inside = column < features
                left = tl.load(tokens + token * features + column, mask=inside, other=0.0)
                right = tl.load(grouped + slot * features + column, mask=inside, other=0.0)
                total += left.to(tl.float32) * right.to(tl.float32)
        tl.store(products + token * top_k + k, tl.sum(total))


def _block(features: int, limit: int) -> int:
    return min(int(triton.next_power_of_2(features)), limit)


def spread(
    tokens: torch.Tensor, scores: torch.Tensor | None, rows: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """(rows, features): tokens at their rows, times their scores; zero for padding."""
    features = tokens.shape[1]
    grouped = tokens.new_empty(rows.numel(), features)
    if not grouped.numel():
        return grouped
    by_row: Any = None
    if scores is not None:
        # The additional last place takes the scores of copies for other ranks.
        by_row = scores.new_zeros(rows.numel() + 1, dtype=torch.float32)
        places = torch.where(slots >= 0, slots, rows.numel()).view(-1).long()
        by_row.scatter_(0, places, scores.float().reshape(-1))
    block = _block(features, 2048)
    _spread_kernel[(rows.numel(), triton.cdiv(features, block))](
        tokens.contiguous(), rows, by_row, grouped, features, by_row is not None, block
    )
    return grouped


def collect(
    grouped: torch.Tensor, scores: torch.Tensor | None, slots: torch.Tensor
) -> torch.Tensor:
    """(tokens, features): the sum of each token's rows, times their scores."""
    num_tokens, top_k = slots.shape
    features = grouped.shape[1]
    tokens = grouped.new_empty(num_tokens, features)
    if not tokens.numel():
        return tokens
    block = _block(features, 2048)
    _collect_kernel[(num_tokens, triton.cdiv(features, block))](
        grouped.contiguous(),
        slots,
        None if scores is None else scores.float().contiguous(),
        tokens,
        features,
        scores is not None,
        top_k,
        block,
    )
    return tokens


def dot(tokens: torch.Tensor, grouped: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """(tokens, top k) float32: each token times the row of each of its copies."""
    num_tokens, top_k = slots.shape
    products = torch.empty(num_tokens, top_k, dtype=torch.float32, device=tokens.device)
    if not products.numel():
        return products
    features = tokens.shape[1]
    _dot_kernel[(num_tokens,)](
        tokens.contiguous(),
        grouped.contiguous(),
        slots,
        products,
        features,
        top_k,
        _block(features, 1024),
    )
    return products
