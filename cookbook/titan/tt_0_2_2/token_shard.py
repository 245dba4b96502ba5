"""Split an MoE layer's tokens among the TP ranks, so that each token is dispatched only once.

With TP, every rank has all tokens of the layer's input, and the outputs of the ranks are summed. So
each rank dispatches only its own shard: `part` consecutive positions of every sequence.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard


def shard_of(length: int, tp_mesh: DeviceMesh) -> slice:
    """Return this rank's positions in each sequence of `length` tokens."""
    part, rest = divmod(length, tp_mesh.size())
    if rest:
        raise ValueError(f"sequence length {length} is not divisible by TP degree {tp_mesh.size()}")
    start = tp_mesh.get_local_rank() * part
    return slice(start, start + part)


def shard_tokens(folded: Tensor, length: int, tp_mesh: DeviceMesh) -> Tensor:
    """Select the tokens of this rank's shard.

    `folded` is (batch * length, features); the result is (batch * length / TP degree, features).
    """
    sequences = folded.view(-1, length, folded.shape[-1])
    return sequences[:, shard_of(length, tp_mesh)].flatten(0, 1)


def global_positions(local: Tensor, length: int, tp_mesh: DeviceMesh, per_token: int) -> Tensor:
    """Map each index in this rank's flattened shards to its index in the flattened batch."""
    start, part = shard_of(length, tp_mesh).start, length // tp_mesh.size()
    sequence = local // (part * per_token)
    return local + per_token * (sequence * (length - part) + start)


def gather_sequence(mine: Tensor, tp_mesh: DeviceMesh) -> Tensor:
    """Gather the shards (batch, part, features) of all TP ranks into (batch, length, features).

    The output's gradient must be the same on all TP ranks: each rank keeps only the slice for its
    own positions. If the ranks have partial sums of the gradient, use `with_partial_gradient`.
    """
    shards = DTensor.from_local(mine, tp_mesh, (Shard(1),), run_check=False)
    return shards.redistribute(placements=(Replicate(),)).to_local()


class _PartialGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, mine: Tensor, tp_mesh: DeviceMesh) -> Tensor:
        return DTensor.from_local(whole, tp_mesh, (Replicate(),), run_check=False)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[None, Tensor, None]:
        # Asynchronous, to overlap with other work: the first use of the result waits for it.
        shard = grad.redistribute(placements=(Shard(1),), async_op=True)
        return None, shard.to_local(), None


def with_partial_gradient(whole: Tensor, mine: Tensor, tp_mesh: DeviceMesh) -> Tensor:
    """Return `whole` as a DTensor whose gradient is reduce-scattered over TP in the backward.

    `whole` was gathered from the shards `mine`. Each column-wise parallel linear layer that reads
    `whole` computes, on each TP rank, a partial sum of its gradient. Autograd adds the partial sums
    of these layers locally. Then one reduce-scatter returns the gradient of `mine`.
    """
    return _PartialGradient.apply(whole.detach(), mine, tp_mesh)


def reduce_scatter_sequence(term: Tensor, tp_mesh: DeviceMesh) -> Tensor:
    """Sum `term` (batch, length, features) over TP; return this rank's shard of the sequence."""
    terms = DTensor.from_local(term, tp_mesh, (Partial(),), run_check=False)
    return terms.redistribute(placements=(Shard(1),)).to_local()


class _SumGradient(torch.autograd.Function):
    """All-reduces the gradient over TP; without DTensor, whose CPU overhead would take longer."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, tp_mesh: DeviceMesh) -> Tensor:
        ctx.tp_mesh = tp_mesh
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.tp_mesh.get_group())
        return total, None


def sum_gradient_over_tp(scores: Tensor, tp_mesh: DeviceMesh) -> Tensor:
    """Return the same `scores`, with their gradient summed over TP.

    Every TP rank scores all tokens, but computes only a part of the layer's output. So its gradient
    of the scores is a partial sum. TorchTitan 0.2.2 does not add up these partial sums, and the
    router gates of the TP ranks drift apart (pytorch/torchtitan#2416).
    """
    return _SumGradient.apply(scores, tp_mesh)
