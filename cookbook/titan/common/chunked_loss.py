"""Cross-entropy of the output layer, computed one chunk of tokens at a time.

A batch's logits, (tokens, vocabulary), are the largest tensor of a training step. Here only one
chunk's logits exist at a time. The forward computes a chunk's gradients while its logits exist; the
backward only scales these gradients, as in Liger-Kernel's fused linear cross-entropy.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cookbook.titan.common.expert_groups import cast
from cookbook.titan.common.weight_copies import give

IGNORE_INDEX = -100


@dataclass(frozen=True)
class VocabularyShard:
    """A TP rank's shard of the vocabulary: its first weight row belongs to token id `first`."""

    first: int
    group: dist.ProcessGroup


def chunked_cross_entropy(
    hidden: Tensor,  # (batch, length, dim)
    weight: Tensor,  # (vocabulary, dim), cast to the dtype of `hidden`; under TP this rank's rows
    labels: Tensor,  # (batch, length); tokens with the label -100 are ignored
    num_chunks: int,
    shard: VocabularyShard | None = None,  # this rank's shard, if TP shards the vocabulary
    backend: str | None = None,  # torch.compile backend for the passes over the logits
) -> Tensor:
    """Compute the cross-entropy of the logits `hidden @ weight.T`, summed over tokens.

    The loss is float32, or float64 if `hidden` is float64. Under TP all ranks have the same hidden
    states and loss, but partial gradients of `hidden`, which the caller must sum over TP ranks.
    """
    # This `reshape` also checks that there is one label per token.
    hidden, labels = hidden.flatten(0, -2), labels.reshape(hidden.shape[:-1].numel())
    chunks = _Chunks(-(-len(hidden) // num_chunks), shard, backend)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _ChunkedCrossEntropy.apply(hidden, weight, labels, chunks)
    return chunks.run(hidden, weight.to(hidden.dtype), labels)


def _precise(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True)
class _Chunks:
    size: int
    shard: VocabularyShard | None
    backend: str | None

    def run(self, hidden: Tensor, weight: Tensor, labels: Tensor, *grads: Tensor) -> Tensor:
        """Return the loss; write the gradients of `hidden` and `weight` to `grads`, if given."""
        statistics, turn_into_gradient = _passes(self.backend)
        columns = labels if self.shard is None else labels - self.shard.first
        loss = torch.zeros((), dtype=_precise(hidden.dtype), device=hidden.device)
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
                # An ignored token gets an infinite logsumexp: its probabilities and gradient are 0.
                turn_into_gradient(logits, columns[rows], lse.masked_fill(ignored, torch.inf))
                _multiply(grads[0][rows], logits, weight, add=False)
                _multiply(grads[1], logits.t(), chunk, add=start > 0)
        return loss

    def _over_ranks(self, statistics: Tensor) -> Tensor:
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
        # Gradients stay in float32 until the backward scales them, so they are rounded only once.
        grads = [
            torch.empty_like(x, dtype=_precise(x.dtype), memory_format=torch.contiguous_format)
            for x in (hidden, weight)
        ]
        ctx.inputs = hidden, weight
        ctx.save_for_backward(*grads)
        return chunks.run(hidden, weight.to(hidden.dtype), labels, *grads)

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        # Leave the saved tensors unchanged: with a retained graph, a second backward reads them.
        of_hidden, of_weight = ctx.saved_tensors
        hidden, weight = ctx.inputs
        hidden_grad = torch.empty_like(of_hidden, dtype=hidden.dtype)
        cast(of_hidden, hidden_grad, grad_loss)
        return hidden_grad, give(of_weight, weight, grad_loss), None, None


def _statistics(logits: Tensor, columns: Tensor) -> Tensor:
    """Return each token's logsumexp and its label's logit (0 if another rank has the label)."""
    words = logits.shape[-1]
    values = logits.to(_precise(logits.dtype))
    top = values.amax(-1, keepdim=True)
    lse = top.squeeze(-1) + (values - top).exp().sum(-1).log()
    target = values.gather(-1, columns.clamp(0, words - 1).unsqueeze(-1)).squeeze(-1)
    return torch.stack([lse, target.where((columns >= 0) & (columns < words), 0)])


def _turn_into_gradient(logits: Tensor, columns: Tensor, lse: Tensor) -> None:
    probabilities = (logits.to(_precise(logits.dtype)) - lse.unsqueeze(-1)).exp()
    # Find each label's column by comparison: torch.compile would not fuse a scatter.
    words = torch.arange(logits.shape[-1], device=logits.device)
    logits.copy_(probabilities - (words == columns.unsqueeze(-1)).to(probabilities.dtype))


@functools.cache
def _passes(backend: str | None) -> tuple[Callable[..., Tensor], Callable[..., None]]:
    if backend is None:
        return _statistics, _turn_into_gradient
    compiled = functools.partial(torch.compile, backend=backend, dynamic=False)
    return compiled(_statistics), compiled(_turn_into_gradient)


def _multiply(out: Tensor, left: Tensor, right: Tensor, add: bool) -> None:
    """Write `left @ right` to `out` or, with `add`, add it; accumulate in the dtype of `out`."""
    if left.is_cuda and left.dtype != out.dtype:
        # Only on CUDA does PyTorch multiply BF16 matrices into a float32 output.
        torch.addmm(out, left, right, beta=int(add), out_dtype=out.dtype, out=out)
    else:
        torch.addmm(out, left.to(out.dtype), right.to(out.dtype), beta=int(add), out=out)
