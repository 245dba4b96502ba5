"""Batches of packed documents, and TorchTitan's FlexAttention on them, for tests of attention."""

from collections.abc import Sequence
from typing import Any

import torch

EOS = 0
LENGTH = 20
HEADS, HEAD_DIM, V_HEAD_DIM = 2, 192, 128
SCALE = HEAD_DIM**-0.5

# For each batch, where the end-of-document tokens are in each of its sequences of LENGTH.
PACKINGS: dict[str, list[list[int]]] = {
    "uneven lengths": [[2, 3, 11, 16]],
    "documents of one token": [[4, 5, 6]],
    "no end": [[]],
    "end first": [[0, 9]],
    "end last": [[9, LENGTH - 1]],
    "all ends": [list(range(LENGTH))],
    # 17 documents, the last without an end; a sequence has room for 16 unless it needs more.
    "more than the usual room": [list(range(16)), [3]],
    "batch of 3": [[7], list(range(LENGTH)), []],
    "batch of 4": [[0, 7], [], [6, 13, LENGTH - 1], [18]],
}


def tokens_of(packing: list[list[int]]) -> torch.Tensor:
    tokens = torch.arange(1, LENGTH + 1).repeat(len(packing), 1)
    for row, ends in zip(tokens, packing, strict=True):
        row[ends] = EOS
    return tokens


def block_mask(tokens: torch.Tensor) -> Any:
    """TorchTitan's mask for `block_causal`; not compiled, and not on a GPU."""
    from torch.nn.attention.flex_attention import and_masks, create_block_mask
    from torchtitan.models.attention import get_causal_mask_mod, get_document_mask_mod

    mask = and_masks(get_causal_mask_mod(), get_document_mask_mod(tokens, EOS))
    batch, length = tokens.shape
    return create_block_mask(mask, batch, None, length, length, device="cpu")


def random_inputs(
    batch: int, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v and the gradient of the output, (batch, length, heads, head_dim)."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, LENGTH, HEADS, dim) for dim in (HEAD_DIM, HEAD_DIM, V_HEAD_DIM, V_HEAD_DIM)]
    q, k, v, grad = (torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), grad


def flex(
    inputs: Sequence[torch.Tensor], grad: torch.Tensor, tokens: torch.Tensor
) -> list[torch.Tensor]:
    """Output and gradients of q, k and v by FlexAttention, in the shapes of the inputs."""
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = (x.transpose(1, 2) for x in inputs)
    out = flex_attention(q, k, v, block_mask=block_mask(tokens), scale=SCALE).transpose(1, 2)
    return [out.detach(), *torch.autograd.grad(out, tuple(inputs), grad)]
