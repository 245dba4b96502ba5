"""TorchTitan's own kinds of attention for folded q, k and v, as proofs and benchmarks call them."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention
from torchtitan.models.attention import (
    FlexAttentionWrapper,
    ScaledDotProductAttentionWrapper,
    get_causal_mask_mod,
    get_document_mask_mod,
)

from cookbook.titan.selftest.attention import Attend, AttentionShape


def flex(shape: AttentionShape, ends: torch.Tensor) -> Attend:
    """FlexAttention with TorchTitan's mask and options; on a CPU it is not compiled.

    Args:
        ends: (batch, length), bool, the last token of each document.
    """
    mask = and_masks(get_causal_mask_mod(), get_document_mask_mod(ends.int(), 1))
    device = ends.device.type
    blocks = create_block_mask(mask, shape.batch, None, shape.length, shape.length, device=device)
    attention: Any = FlexAttentionWrapper() if device == "cuda" else flex_attention

    def attend(*folded: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.unflatten(0, (shape.batch, -1)).transpose(1, 2) for x in folded)
        out: torch.Tensor = attention(q, k, v, block_mask=blocks, scale=shape.scale)
        return out.transpose(1, 2).flatten(0, 1)

    return attend


def sdpa(shape: AttentionShape, ends: torch.Tensor) -> Attend:
    """Scaled dot product attention, which knows no documents: `ends` are those of sequences."""
    attention: Any = ScaledDotProductAttentionWrapper()

    def attend(*folded: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.unflatten(0, (shape.batch, -1)).transpose(1, 2) for x in folded)
        out: torch.Tensor = attention(q, k, v, scale=shape.scale)
        return out.transpose(1, 2).flatten(0, 1)

    return attend
