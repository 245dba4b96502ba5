"""Copies of weights in another format, made once an optimizer step, and their gradients.

Copies are kept, and gradients set without autograd, on a rank alone, whose weights change in the
optimizer only. With other ranks FSDP may have gathered new weights into the memory and the version
of the old ones, and DDP waits for each gradient that autograd accumulates.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from cookbook.titan.common.expert_groups import cast

Copy = TypeVar("Copy")


def is_alone() -> bool:
    """Return whether this process trains without other ranks."""
    return not dist.is_initialized() or dist.get_world_size() == 1


def kept(module: Any, name: str, weights: Sequence[Tensor], make: Callable[[], Copy]) -> Copy:
    """Return `make()`; a rank alone keeps it in `module` until one of `weights` changes."""
    if not is_alone():
        return make()
    state = tuple((one.data_ptr(), one._version) for one in weights)
    found = module.__dict__.get(name)
    # A step may have several microbatches, and recomputation runs the forward again.
    if found is None or found[0] != state:
        found = state, make()
        module.__dict__[name] = found
    copy: Copy = found[1]
    return copy


def keep_dtypes(weights: Iterable[Tensor]) -> None:
    """Let a rank alone keep gradients as they were computed, for an optimizer that reads any dtype.

    A weight's gradients of several microbatches are summed in its own dtype.
    """
    for weight in weights if is_alone() else ():
        weight.grad_dtype = None


def note_changes(weights: Iterable[Tensor]) -> None:
    """Note that an optimizer has written `weights`: autograd does not see what fused ones write."""
    torch.autograd.graph.increment_version(weights)


def give(grad: Tensor, weight: Tensor, factor: Tensor | None = None) -> Tensor | None:
    """Return `grad` (..., rows, columns), times `factor`, for autograd.

    It has the dtype of `weight`, unless that accepts any: see `keep_dtypes`. A rank alone adds it
    to the gradient of an earlier microbatch, if any, and returns None: one pass instead of a cast
    and a sum.
    """
    if weight.is_leaf and weight.grad is not None and is_alone():
        earlier = weight.grad
        if earlier.dtype != weight.dtype:
            weight.grad = torch.empty_like(earlier, dtype=weight.dtype)
        cast(grad, weight.grad, factor, earlier)
        return None
    dtype = grad.dtype if weight.is_leaf and weight.grad_dtype is None else weight.dtype
    is_whole = grad.is_contiguous() and grad.untyped_storage().nbytes() == grad.nbytes
    if is_whole and grad.dtype == dtype and factor is None:
        return grad
    # Copy a part even if its dtype is right: a view would keep the whole joined gradient alive.
    given = grad.new_empty(grad.shape, dtype=dtype)
    cast(grad, given, factor)
    return given


def joined(dtype: torch.dtype, *weights: Tensor) -> Tensor:
    """Return n weights (experts, hidden, features) as one, (experts, n * hidden, features).

    With the gate and up weights joined, one GEMM computes both projections, and another computes
    the gradient of their input.
    """
    experts, hidden, features = weights[0].shape
    copy = weights[0].new_empty(experts, len(weights) * hidden, features, dtype=dtype)
    for weight, part in zip(weights, copy.chunk(len(weights), dim=1), strict=True):
        cast(weight.detach().contiguous(), part)
    return copy


class _CopyOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, copy: Tensor, *weights: Tensor) -> Tensor:
        ctx.weights = weights
        return copy.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        parts = grad.contiguous().chunk(len(ctx.weights), dim=1)
        return None, *(give(part, one) for part, one in zip(parts, ctx.weights, strict=True))


def copy_of(copy: Tensor, *weights: Tensor) -> Tensor:
    """Return `copy`, the result of `joined`, as a function of the weights, which get gradients."""
    return _CopyOf.apply(copy, *weights)


def join(dtype: torch.dtype, *weights: Tensor) -> Tensor:
    """Return `joined(dtype, *weights)` as a function of the weights."""
    return copy_of(joined(dtype, *weights), *weights)
