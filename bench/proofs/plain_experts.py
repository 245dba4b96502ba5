"""A reference for routed experts on one rank: plain PyTorch with a precision's rounding.

It replaces TorchTitan's loop over experts. MXFP8 is written out from its definition: a power of two
for each block of 32 values, E4M3 for the values. Products are summed in float32.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torchtitan.models.moe.moe as moe

BLOCK = 32
_LARGEST = 448  # of E4M3


def round_to_mxfp8(values: torch.Tensor) -> torch.Tensor:
    """The nearest MXFP8 values, in blocks along the last dimension; float32."""
    length = values.shape[-1]
    padded = torch.nn.functional.pad(values.float(), (0, -length % BLOCK))
    blocks = padded.unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True)
    exponent = torch.where(largest > 0, torch.ceil(torch.log2(largest / _LARGEST)), 0)
    scale = torch.exp2(exponent)
    rounded = (blocks / scale).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn).float() * scale
    return rounded.flatten(-2)[..., :length]


class _Product(torch.autograd.Function):
    """Rows (m, k) times a weight (n, k): BF16 in and out, each operand in MXFP8."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weight: torch.Tensor, rounds_weight_gradient: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.of_weight = round_to_mxfp8 if rounds_weight_gradient else torch.Tensor.float
        return (round_to_mxfp8(rows) @ round_to_mxfp8(weight).t()).bfloat16()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        rows, weight = ctx.saved_tensors
        of_rows = round_to_mxfp8(grad) @ round_to_mxfp8(weight.t()).t()
        of_weight = ctx.of_weight(grad.t()) @ ctx.of_weight(rows.t()).t()
        return of_rows.bfloat16(), of_weight.bfloat16(), None


class _Travels(torch.autograd.Function):
    """Rows sent in MXFP8 in the forward, or their gradients in the backward."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, rounds_forward: bool) -> torch.Tensor:
        ctx.rounds_backward = not rounds_forward
        return round_to_mxfp8(rows).to(rows.dtype) if rounds_forward else rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return round_to_mxfp8(grad).to(grad.dtype) if ctx.rounds_backward else grad, None


@contextmanager
def plain_experts(precision: str, backend: str) -> Iterator[None]:
    """Replace TorchTitan's experts inside the block.

    Args:
        precision: `mxfp8`, `mxfp8_linear` or `mxfp8_wgrad_hp` round, `bf16` does not.
        backend: `mxfp8_a2a` rounds what travels, the others do not.
    """
    travels, quantizes = backend == "mxfp8_a2a", precision != "bf16"

    def multiply(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if not quantizes:
            return rows @ weight.t()
        return _Product.apply(rows, weight, precision != "mxfp8_wgrad_hp")

    def run(w1: Any, w2: Any, w3: Any, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        rows = _Travels.apply(x, True) if travels else x
        weights = [w1, w2, w3]
        if quantizes:
            # TorchTitan computes its experts in BF16.
            rows, weights = rows.bfloat16(), [weight.bfloat16() for weight in weights]
        found = []
        for expert, mine in enumerate(rows.split(counts.tolist())):
            gate, down, up = (weight[expert] for weight in weights)
            hidden = torch.nn.functional.silu(multiply(mine, gate)) * multiply(mine, up)
            found.append(multiply(hidden, down))
        out = torch.cat(found).to(x.dtype)
        return _Travels.apply(out, False) if travels else out

    with patch.object(moe, "_run_experts_for_loop", run):
        yield
