"""The stand-in for DeepEP's buffer against an all-to-all written out, in real processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.titan_ranks import run_ranks

pytestmark = pytest.mark.titan

RANKS, EXPERTS, TOP_K, FEATURES = 4, 8, 3, 6
# One rank sends nothing, and no token chooses the experts of one rank.
TOKENS = (5, 0, 9, 2)
UNCHOSEN = (4, 5)


def tokens_of(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    count = TOKENS[rank]
    values = torch.randn(count, FEATURES, generator=generator)
    open_experts = torch.tensor([e for e in range(EXPERTS) if e not in UNCHOSEN])
    order = torch.rand(count, len(open_experts), generator=generator).argsort(1)
    experts = open_experts[order[:, :TOP_K]]
    if count:
        experts[0, 1] = -1  # DeepEP takes -1 for no choice
    return values, experts, torch.rand(count, TOP_K, generator=generator)


def exchange() -> dict[str, Any]:
    from deep_ep import Buffer

    rank = dist.get_rank()
    buffer = Buffer(dist.group.WORLD)
    values, experts, weights = tokens_of(rank)
    per_rank, per_rdma_rank, per_expert, in_rank, _ = buffer.get_dispatch_layout(experts, EXPERTS)
    received, local, local_weights, counts, handle, _ = buffer.dispatch(
        values,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_rdma_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=experts,
        topk_weights=weights,
    )
    doubled, back_weights, _ = buffer.combine(2 * received, handle, topk_weights=local_weights)
    again, *_ = buffer.dispatch(values, handle=handle)
    return {
        "received": received, "local": local, "weights": local_weights, "counts": counts,
        "doubled": doubled, "back_weights": back_weights, "again": again,
        "per_rank": per_rank, "per_expert": per_expert,
    }  # fmt: skip


def test_stand_in_is_an_all_to_all() -> None:
    found = run_ranks(exchange, RANKS)
    per_rank = EXPERTS // RANKS
    everything = [tokens_of(rank) for rank in range(RANKS)]
    for rank in range(RANKS):
        rows, local, local_weights = [], [], []
        counts = [0] * per_rank
        # Every token with an expert here, once, ordered by source rank and position.
        for values, experts, weights in everything:
            for token in range(len(values)):
                here = [e // per_rank == rank and e >= 0 for e in experts[token].tolist()]
                if not any(here):
                    continue
                rows.append(values[token])
                chosen = experts[token].tolist()
                local.append([e % per_rank if h else -1 for e, h in zip(chosen, here, strict=True)])
                local_weights.append(weights[token] * torch.tensor(here))
                for expert in local[-1]:
                    if expert >= 0:
                        counts[expert] += 1
        result = found[rank]
        assert result["counts"] == counts
        assert result["local"].tolist() == local
        empty = torch.empty(0, FEATURES)
        torch.testing.assert_close(result["received"], torch.stack(rows) if rows else empty)
        torch.testing.assert_close(result["again"], result["received"])
        if rows:
            torch.testing.assert_close(result["weights"], torch.stack(local_weights))
        # Combined without weights: as many copies as there are ranks that got the token.
        values, experts, weights = everything[rank]
        copies = [len({e // per_rank for e in row if e >= 0}) for row in experts.tolist()]
        expected = 2 * values * torch.tensor(copies).view(-1, 1)
        torch.testing.assert_close(result["doubled"], expected)
        torch.testing.assert_close(result["back_weights"], weights * (experts >= 0))
        assert result["per_rank"].sum() == sum(copies)
        assert result["per_expert"].sum() == (experts >= 0).sum()
