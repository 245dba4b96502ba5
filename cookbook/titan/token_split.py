"""In: tokens that every tensor-parallel rank holds. Out: each rank's own share of them, and back.

Under TP the input of an MoE layer is gathered along the sequence and its output is summed over the
TP ranks. Each token must reach the experts once, so each rank sends only its share. The share is
cut along the sequence, not along the folded batch x sequence: it then holds the very positions
whose gradient this rank keeps when the gather is undone, and nothing has to be exchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate


@dataclass(frozen=True)
class Share:
    """The positions `start` to `stop` of every sequence of `length` belong to this rank."""

    start: int
    stop: int
    length: int

    @classmethod
    def of_rank(cls, length: int, rank: int, ranks: int) -> Share:
        if length % ranks != 0:
            raise ValueError(f"sequence length {length} is not divisible by TP degree {ranks}")
        part = length // ranks
        return cls(rank * part, (rank + 1) * part, length)

    @classmethod
    def of_mesh(cls, length: int, tp_mesh: DeviceMesh) -> Share:
        return cls.of_rank(length, tp_mesh.get_local_rank(), tp_mesh.size())


def take_share(folded: torch.Tensor, share: Share) -> torch.Tensor:
    """This rank's rows of `folded` (batch * length, features), as (batch * part, features)."""
    features = folded.shape[-1]
    mine = folded.view(-1, share.length, features)[:, share.start : share.stop]
    return mine.reshape(-1, features)


def global_positions(local: torch.Tensor, share: Share, per_token: int = 1) -> torch.Tensor:
    """Positions in the whole folded batch of entries that are numbered inside this rank's share.

    Args:
        local: indices into (batch * part * per_token,).
        per_token: how many entries each token has (the router's top k).
    """
    part = share.stop - share.start
    sequence = local // (part * per_token)
    return local + per_token * (sequence * (share.length - part) + share.start)


class _AddShare(torch.autograd.Function):
    """`whole` plus `mine` at this rank's positions, without a zero-filled copy of `mine`."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, mine: torch.Tensor, share: Share) -> torch.Tensor:
        ctx.share = share
        total = whole.clone()
        total[:, share.start : share.stop] += mine
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return grad, grad[:, ctx.share.start : ctx.share.stop].contiguous(), None


class _PlaceShare(torch.autograd.Function):
    """`mine` at this rank's positions of a tensor of zeros."""

    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor, share: Share) -> torch.Tensor:
        ctx.share = share
        whole = mine.new_zeros(mine.shape[0], share.length, mine.shape[-1])
        whole[:, share.start : share.stop] = mine
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad[:, ctx.share.start : ctx.share.stop].contiguous(), None


def put_share(whole: torch.Tensor | None, mine: torch.Tensor, share: Share) -> torch.Tensor:
    """A term of the sum over TP ranks: `whole` (batch, length, features) and this rank's `mine`."""
    if whole is None:
        return _PlaceShare.apply(mine, share)
    return _AddShare.apply(whole, mine, share)


def sum_gradient_over_tp(scores: torch.Tensor, tp_mesh: DeviceMesh) -> torch.Tensor:
    """The same `scores`; their gradient, which each rank has for its own tokens only, is summed.

    Every TP rank scores every token with the same gate but uses the scores of its own share, so
    that its gradient of the gate is a part of the sum. Released TorchTitan 0.2.2 takes the part for
    the whole, and the gates of the TP ranks drift apart (mended later, pytorch/torchtitan#2416).
    The sum is taken here, where it is smallest: tokens x top k.
    """
    replicated = DTensor.from_local(scores, tp_mesh, (Replicate(),), run_check=False)
    return replicated.to_local(grad_placements=(Partial(),))
