"""The experts' activations, SwiGLU times the routing score, and their two projections as one.

One GEMM computes gate and up projection, and one the gradient of both, which need not be added.
On a GPU the activation is one kernel in each direction, on a CPU PyTorch operations.
"""

from __future__ import annotations

from typing import Any

import torch


class _ScoredSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up, scores)
        if gate_up.is_cuda:
            from cookbook.titan.common import swiglu_kernels

            return swiglu_kernels.activate(gate_up, scores.contiguous())
        gate, up = gate_up.to(_exact(gate_up)).chunk(2, dim=1)
        return (torch.nn.functional.silu(gate) * up * scores).to(gate_up.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate_up, scores = ctx.saved_tensors
        if gate_up.is_cuda:
            from cookbook.titan.common import swiglu_kernels

            return swiglu_kernels.gradient(grad.contiguous(), gate_up, scores.contiguous())
        gate, up = gate_up.to(_exact(gate_up)).chunk(2, dim=1)
        grad = grad.to(_exact(gate_up))
        sigmoid = gate.sigmoid()
        silu = gate * sigmoid
        by_gate = grad * scores * up * sigmoid * (1 + gate * (1 - sigmoid))
        grad_gate_up = torch.cat([by_gate, grad * scores * silu], dim=1).to(gate_up.dtype)
        return grad_gate_up, (grad * silu * up).sum(1, keepdim=True).to(scores.dtype)


def _exact(values: torch.Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)


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
    def forward(
        ctx: Any, gate: torch.Tensor, up: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        experts, hidden, features = gate.shape
        ctx.dtypes = gate.dtype, up.dtype
        joined = gate.new_empty(experts, 2 * hidden, features, dtype=dtype)
        joined[:, :hidden] = gate
        joined[:, hidden:] = up
        return joined

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        by_gate, by_up = grad.chunk(2, dim=1)
        # Copies, even of the same type: a gradient that is half of another's memory keeps all.
        first, second = ctx.dtypes
        contiguous = torch.contiguous_format
        return (
            by_gate.to(first, copy=True, memory_format=contiguous),
            by_up.to(second, copy=True, memory_format=contiguous),
            None,
        )


def join(gate: torch.Tensor, up: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Two weights (experts, hidden, features) as one (experts, 2 * hidden, features)."""
    joined: torch.Tensor = _Joined.apply(gate, up, dtype)
    return joined
