"""Proof of the loss in chunks: against the cross-entropy of whole logits in float32."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from cookbook.titan.common.chunked_loss import (
    IGNORE_INDEX,
    VocabularyShard,
    chunked_cross_entropy,
)
from cookbook.titan.selftest.cases import Bound, Error, error_of
from cookbook.titan.selftest.inputs import generator

# The sum of a few thousand losses; gradients from logits that were rounded to BF16.
LOSS = Bound(5e-4, 5e-4)
GRADIENT = Bound(0.012, 0.04)


def loss_errors(
    tokens: int,
    dim: int,
    vocabulary: int,
    num_chunks: int,
    group: dist.ProcessGroup | None,
    backend: str | None,
    device: str,
) -> Iterator[Error]:
    """Compare loss and gradients, with labels to ignore and chunks that do not divide the tokens.

    Args:
        group: of the TP ranks that the vocabulary is cut over; all of them get the same inputs.
    """
    random = generator(device, 21)
    hidden = torch.randn(tokens, dim, device=device, generator=random).bfloat16()
    # Logits of about 2, so that some words are likely.
    weight = torch.randn(vocabulary, dim, device=device, generator=random) * (2 / dim**0.5)
    weight = weight.bfloat16()
    labels = torch.randint(vocabulary, (tokens,), device=device, generator=random)
    labels[1::7] = IGNORE_INDEX
    labels[0], labels[-1] = 0, vocabulary - 1
    ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
    # As DTensor cuts: all parts of one size but the last.
    size = -(-vocabulary // ranks)
    words = slice(rank * size, min((rank + 1) * size, vocabulary))
    shard = None if group is None else VocabularyShard(words.start, group)
    x, w = hidden.clone().requires_grad_(), weight[words].clone().requires_grad_()
    loss = chunked_cross_entropy(x[None], w, labels[None], num_chunks, shard, backend)
    # As TorchTitan divides the sum by the tokens.
    dx, dw = torch.autograd.grad(loss / tokens, [x, w])

    exact = [hidden.float().requires_grad_(), weight.float().requires_grad_()]
    wanted = torch.nn.functional.cross_entropy(exact[0] @ exact[1].t(), labels, reduction="sum")
    wanted_dx, wanted_dw = torch.autograd.grad(wanted / tokens, exact)
    yield error_of("loss", loss.detach()[None], wanted.detach()[None], LOSS)
    yield error_of("gradient of the weight", dw, wanted_dw[words], GRADIENT, [(0,)], floor=0.1)
    if group is not None:
        # Each rank's is a term of a sum over them.
        total = dx.float()
        dist.all_reduce(total, group=group)
        dx = total
    yield error_of("gradient of the hidden states", dx, wanted_dx, GRADIENT)
