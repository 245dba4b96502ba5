"""Triton kernels of the experts' activations: SwiGLU times the routing score, in one pass.

Gate and up projection lie beside each other in a row, (rows, 2 x hidden). Everything is computed in
float32 and rounded once.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

_BLOCK = 2048


@triton.jit
def _activate_kernel(  # type: ignore[no-untyped-def]
    gate_up, scores, activations, hidden: tl.constexpr, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    score = tl.load(scores + row)
    for start in tl.static_range(0, hidden, block):
        column = start + tl.arange(0, block)
        inside = column < hidden
        gate = tl.load(gate_up + row * 2 * hidden + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up + (row * 2 + 1) * hidden + column, mask=inside, other=0.0)
        value = gate * tl.sigmoid(gate) * up.to(tl.float32) * score
        tl.store(activations + row * hidden + column, value, mask=inside)


@triton.jit
def _gradient_kernel(  # type: ignore[no-untyped-def]
    grad, gate_up, scores, grad_gate_up, grad_scores, hidden: tl.constexpr, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    score = tl.load(scores + row)
    total = tl.zeros((block,), dtype=tl.float32)
    for start in tl.static_range(0, hidden, block):
        column = start + tl.arange(0, block)
        inside = column < hidden
        left = row * 2 * hidden + column
        gate = tl.load(gate_up + left, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up + left + hidden, mask=inside, other=0.0).to(tl.float32)
        upstream = tl.load(grad + row * hidden + column, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        total += upstream * silu * up
        scored = upstream * score
        slope = sigmoid * (1 + gate * (1 - sigmoid))
        tl.store(grad_gate_up + left, scored * up * slope, mask=inside)
        tl.store(grad_gate_up + left + hidden, scored * silu, mask=inside)
    tl.store(grad_scores + row, tl.sum(total))


@triton.jit
def _cast_kernel(  # type: ignore[no-untyped-def]
    source, target, size, source_stride, target_stride, block: tl.constexpr
):
    part = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * block + tl.arange(0, block)
    value = tl.load(source + part * source_stride + place, mask=place < size)
    tl.store(target + part * target_stride + place, value, mask=place < size)


def cast(source: torch.Tensor, target: torch.Tensor) -> None:
    """Write `source` (experts, rows, columns) to `target` in its type, both dense in an expert.

    PyTorch's copy to or from every second part of a tensor has half the speed.
    """
    experts, size = len(source), source[0].numel()
    if target.numel():
        _cast_kernel[(triton.cdiv(size, 4096), experts)](
            source, target, size, source.stride(0), target.stride(0), 4096
        )


def _block(hidden: int) -> int:
    return min(int(triton.next_power_of_2(hidden)), _BLOCK)


def activate(gate_up: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """(rows, hidden): SwiGLU of (rows, 2 x hidden), times scores (rows, 1) float32."""
    rows, hidden = len(gate_up), gate_up.shape[1] // 2
    activations = gate_up.new_empty(rows, hidden)
    if activations.numel():
        _activate_kernel[(rows,)](gate_up, scores, activations, hidden, _block(hidden))
    return activations


def gradient(
    grad: torch.Tensor, gate_up: torch.Tensor, scores: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of `gate_up` and `scores`, in their shapes."""
    rows, hidden = grad.shape
    grad_gate_up, grad_scores = torch.empty_like(gate_up), torch.empty_like(scores)
    if grad.numel():
        _gradient_kernel[(rows,)](
            grad, gate_up, scores, grad_gate_up, grad_scores, hidden, _block(hidden)
        )
    return grad_gate_up, grad_scores
