"""Keeps what attention gets in training, for `bench.gpu_attention --activations`.

    KEEP_ATTENTION=kept.pt KEEP_ATTENTION_CALLS=3,500 torchrun ... -m torchtitan.train ... \
        --experimental.custom_import=bench.keep_attention --model.attention=flash_attention_4

Imported in the place of the cookbook's hooks, which it imports. Rank 0 writes q, k, v and the
gradient of the output at those calls of the backward, counted from 1, as kept-3.pt and kept-500.pt.
A step of the 16B model has 27, from the last layer to the first. For runs without compile and
recomputation: it holds on to q, k and v of every layer.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

import cookbook.titan.tt_0_2_2  # noqa: F401
from cookbook.titan.common import varlen_attention as varlen


def keep_calls(path: Path, calls: set[int]) -> None:
    """Save what these calls of the backward get."""
    count = 0
    attend = varlen.varlen_attention

    def attend_and_keep(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
        scale: float,
    ) -> torch.Tensor:
        out = attend(q, k, v, cu_seqlens, max_seqlen, scale)

        def keep(grad: torch.Tensor) -> None:
            nonlocal count
            count += 1
            if count in calls:
                kept = {
                    "inputs": [x.detach().contiguous().cpu() for x in (q, k, v, grad)],
                    "cu_seqlens": cu_seqlens.cpu(),
                    "length": max_seqlen,
                    "scale": scale,
                }
                torch.save(kept, path.with_stem(f"{path.stem}-{count}"))

        if out.requires_grad:
            out.register_hook(keep)
        return out

    varlen.varlen_attention = attend_and_keep


if os.environ.get("KEEP_ATTENTION") and os.environ.get("RANK", "0") == "0":
    keep_calls(
        Path(os.environ["KEEP_ATTENTION"]),
        {int(call) for call in os.environ["KEEP_ATTENTION_CALLS"].split(",")},
    )
