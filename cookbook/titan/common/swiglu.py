"""The experts' activations, SwiGLU times the routing score, and their two projections as one.

One GEMM computes gate and up projection, and one the gradient of both, which need not be added.
On a GPU the activation is one kernel in each direction, on a CPU PyTorch operations.
"""

from __future__ import annotations

from typing import Any

import torch


def _forward(gate_up: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    if gate_up.is_cuda:
        from cookbook.titan.common import swiglu_kernels

        return swiglu_kernels.activate(gate_up, scores)
    gate, up = gate_up.to(_exact(gate_up)).chunk(2, dim=1)
    return (torch.nn.functional.silu(gate) * up * scores).to(gate_up.dtype)


def _backward(
    grad: torch.Tensor, gate_up: torch.Tensor, scores: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    if gate_up.is_cuda:
        from cookbook.titan.common import swiglu_kernels

        return swiglu_kernels.gradient(grad, gate_up, scores)
    gate, up = gate_up.to(_exact(gate_up)).chunk(2, dim=1)
    grad = grad.to(_exact(gate_up))
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    by_gate = grad * scores * up * sigmoid * (1 + gate * (1 - sigmoid))
    grad_gate_up = torch.cat([by_gate, grad * scores * silu], dim=1).to(gate_up.dtype)
    return grad_gate_up, (grad * silu * up).sum(1, keepdim=True).to(scores.dtype)


def _exact(values: torch.Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)


class _ScoredSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        gate_up, scores = gate_up.contiguous(), scores.contiguous()
        ctx.save_for_backward(gate_up, scores)
        return _forward(gate_up, scores)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _backward(grad.contiguous(), *ctx.saved_tensors)


def scored_swiglu(gate_up: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """(rows, hidden): silu(gate) * up * score, rounded once.

    Args:
        gate_up: (rows, 2 * hidden), the gate's projection and the other one beside it.
        scores: (rows, 1) float32.
    """
    activations: torch.Tensor = _ScoredSwiGLU.apply(gate_up, scores)
    return activations


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: torch.Tensor) -> torch.Tensor:
        ctx.dtypes = [weight.dtype for weight in weights]
        experts, hidden, features = weights[0].shape
        joined = weights[0].new_empty(experts, len(weights) * hidden, features, dtype=dtype)
        for weight, part in zip(weights, joined.chunk(len(weights), dim=1), strict=True):
            _cast(weight.contiguous(), part)
        return joined

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        grads = []
        for dtype, part in zip(
            ctx.dtypes, grad.contiguous().chunk(len(ctx.dtypes), 1), strict=True
        ):
            # A copy, even of the same type: half of a gradient would keep all of its memory.
            grads.append(torch.empty(part.shape, dtype=dtype, device=part.device))
            _cast(part, grads[-1])
        return None, *grads


def _cast(source: torch.Tensor, target: torch.Tensor) -> None:
    if source.is_cuda:
        from cookbook.titan.common import swiglu_kernels

        swiglu_kernels.cast(source, target)
    else:
        target.copy_(source)


def join(dtype: torch.dtype, *weights: torch.Tensor) -> torch.Tensor:
    """Weights (experts, hidden, features) beside one another, (experts, n * hidden, features)."""
    joined: torch.Tensor = _Joined.apply(dtype, *weights)
    return joined
