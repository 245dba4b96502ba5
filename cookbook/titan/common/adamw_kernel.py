"""The Triton kernel of `adamw.py`: clip, decay, update the moments and the weights, in one pass."""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor
from triton.language import constexpr


@triton.jit(do_not_specialize=["lr"])
def _update_kernel(  # type: ignore[no-untyped-def]
    weights, grads, means, squares, corrections, factor, size, lr,
    beta1: constexpr, beta2: constexpr, eps: constexpr, decay: constexpr, block: constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = place < size
    weight = tl.load(weights + place, mask=inside)
    grad = tl.load(grads + place, mask=inside).to(tl.float32)
    mean = tl.load(means + place, mask=inside)
    square = tl.load(squares + place, mask=inside)
    if factor is not None:
        grad *= tl.load(factor)
    mean = beta1 * mean + (1 - beta1) * grad
    square = beta2 * square + (1 - beta2) * grad * grad
    rate = lr / tl.load(corrections)
    weight -= lr * decay * weight
    weight -= rate * mean / (tl.sqrt(square) / tl.load(corrections + 1) + eps)
    tl.store(weights + place, weight, mask=inside)
    tl.store(means + place, mean, mask=inside)
    tl.store(squares + place, square, mask=inside)


def update(
    weights: Tensor,
    grads: Tensor,
    means: Tensor,
    squares: Tensor,
    corrections: Tensor,  # (2,) float32: 1 - beta1**step and the root of 1 - beta2**step
    factor: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
    block: int = 1024,
    warps: int = 4,
) -> None:
    """Update float32 `weights` and their moments in place."""
    size = weights.numel()
    _update_kernel[(triton.cdiv(size, block),)](
        weights, grads.contiguous(), means, squares, corrections, factor, size, float(lr), beta1,
        beta2, eps, decay, block, num_warps=warps,
    )  # fmt: skip
