"""The cross-entropy of an output layer, computed for a chunk of tokens at a time.

The logits of a batch, tokens x vocabulary, are the largest tensor of a training step. Here they
exist for one chunk only. A chunk's gradients are taken while its logits are there; the backward of
the loss merely scales them, as in Liger-Kernel's fused linear cross-entropy.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

IGNORE_INDEX = -100


@dataclass(frozen=True)
class VocabularyShard:
    """A TP rank's part of the vocabulary: its rows of the weight begin with word `first`."""

    first: int
    group: dist.ProcessGroup


def chunked_cross_entropy(
    hidden: Tensor,  # (batch, length, dim)
    weight: Tensor,  # (vocabulary, dim), of the same type; under TP this rank's rows
    labels: Tensor,  # (batch, length); tokens with the label -100 are ignored
    num_chunks: int,
    shard: VocabularyShard | None = None,  # where the vocabulary is cut over TP ranks
    backend: str | None = None,  # of torch.compile, for the passes over the logits
) -> Tensor:
    """Compute the cross-entropy of the logits `hidden @ weight.T`, summed over tokens.

    Under TP all ranks have the same hidden states, whose gradient is this rank's term of a sum over
    them, and the same result. It is in float32, or float64 where `hidden` is.
    """
    if hidden.dtype != weight.dtype:
        raise TypeError(f"hidden states are {hidden.dtype}, the output layer is {weight.dtype}")
    hidden, labels = hidden.flatten(0, -2), labels.flatten()
    if len(hidden) != len(labels):
        raise ValueError(f"{len(hidden)} tokens have {len(labels)} labels")
    chunks = _Chunks(-(-len(hidden) // num_chunks), shard, backend)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _ChunkedCrossEntropy.apply(hidden, weight, labels, chunks)
    return chunks.run(hidden, weight, labels)


def precise(dtype: torch.dtype) -> torch.dtype:
    """Return the type of sums over numbers of `dtype`."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True)
class _Chunks:
    """The cut of the tokens into chunks of `size`, and the rest."""

    size: int
    shard: VocabularyShard | None
    backend: str | None

    def run(self, hidden: Tensor, weight: Tensor, labels: Tensor, *grads: Tensor) -> Tensor:
        """Return the loss; overwrite the gradients of `hidden` and `weight`, if given."""
        statistics, turn_into_gradient = _passes(self.backend)
        columns = labels if self.shard is None else labels - self.shard.first
        loss = torch.zeros((), dtype=precise(hidden.dtype), device=hidden.device)
        buffer = hidden.new_empty(min(self.size, len(hidden)), len(weight))
        for start in range(0, len(hidden), self.size):
            rows = slice(start, start + self.size)
            chunk = hidden[rows]
            logits = buffer[: len(chunk)]
            torch.mm(chunk, weight.t(), out=logits)
            lse, target = self._over_ranks(statistics(logits, columns[rows]))
            ignored = labels[rows] == IGNORE_INDEX
            loss += (lse - target).masked_fill(ignored, 0).sum()
            if grads:
                # Under an infinite sum all probabilities, and so the gradient, are zero.
                turn_into_gradient(logits, columns[rows], lse.masked_fill(ignored, torch.inf))
                _multiply(grads[0][rows], logits, weight, add=False)
                _multiply(grads[1], logits.t(), chunk, add=start > 0)
        return loss

    def _over_ranks(self, statistics: Tensor) -> Tensor:
        """Merge the statistics of each rank's part of the vocabulary."""
        if self.shard is None:
            return statistics
        tokens = statistics.shape[-1]
        parts = statistics.new_empty(2 * self.shard.group.size(), tokens)
        dist.all_gather_into_tensor(parts, statistics, group=self.shard.group)
        lse, target = parts.view(-1, 2, tokens).unbind(1)
        return torch.stack([lse.logsumexp(0), target.sum(0)])


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunks: _Chunks
    ) -> Tensor:
        # In float32 until they are scaled, so that they are rounded once.
        grads = [
            torch.empty_like(x, dtype=precise(x.dtype), memory_format=torch.contiguous_format)
            for x in (hidden, weight)
        ]
        ctx.dtype = hidden.dtype
        ctx.save_for_backward(*grads)
        return chunks.run(hidden, weight, labels, *grads)

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        # Into new tensors: a second backward of a retained graph finds the gradients unchanged.
        hidden_grad, weight_grad = (
            torch.mul(grad, grad_loss, out=torch.empty_like(grad, dtype=ctx.dtype))
            for grad in ctx.saved_tensors
        )
        return hidden_grad, weight_grad, None, None


def _statistics(logits: Tensor, columns: Tensor) -> Tensor:
    """Make the first pass over the logits of a chunk (tokens, words).

    `columns` are those of the labels, out of range if another rank has them. Return (2, tokens):
    logsumexp, and the label's logit or 0.
    """
    words = logits.shape[-1]
    values = logits.to(precise(logits.dtype))
    top = values.amax(-1, keepdim=True)
    lse = top.squeeze(-1) + (values - top).exp().sum(-1).log()
    target = values.gather(-1, columns.clamp(0, words - 1).unsqueeze(-1)).squeeze(-1)
    return torch.stack([lse, target.where((columns >= 0) & (columns < words), 0)])


def _turn_into_gradient(logits: Tensor, columns: Tensor, lse: Tensor) -> None:
    """Make the second pass: replace each logit by the derivative of the loss by it."""
    probabilities = (logits.to(precise(logits.dtype)) - lse.unsqueeze(-1)).exp()
    # A comparison and no scatter, which would not be fused.
    words = torch.arange(logits.shape[-1], device=logits.device)
    logits.copy_(probabilities - (words == columns.unsqueeze(-1)).to(probabilities.dtype))


@functools.cache
def _passes(backend: str | None) -> tuple[Callable[..., Tensor], Callable[..., None]]:
    """Return both passes, compiled for each shape; chunks have one or two shapes."""
    if backend is None:
        return _statistics, _turn_into_gradient
    compiled = functools.partial(torch.compile, backend=backend, dynamic=False)
    return compiled(_statistics), compiled(_turn_into_gradient)


def _multiply(out: Tensor, left: Tensor, right: Tensor, add: bool) -> None:
    """Write `left @ right` to `out`, or add it; summed in the type of `out`."""
    if left.is_cuda and left.dtype != out.dtype:
        # cuBLAS multiplies in BF16 and sums in float32; autograd and the CPU do not have this.
        torch.addmm(out, left, right, beta=int(add), out_dtype=out.dtype, out=out)
    else:
        torch.addmm(out, left.to(out.dtype), right.to(out.dtype), beta=int(add), out=out)
