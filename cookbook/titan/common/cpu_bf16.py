"""BF16 matrix products on a CPU without instructions for them, by way of float32.

Where oneDNN has no BF16 (a CPU without AVX-512, say), PyTorch multiplies in plain loops, at
1 GFLOP/s a core where float32 has 70. Products of BF16 numbers are exact in float32, and sums are
taken in it either way, so a result differs by no more than the order of its sum.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


def cpu_has_bf16() -> bool:
    """Whether oneDNN, which PyTorch multiplies with, has BF16 on this CPU."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@functools.cache
def multiply_bf16_in_float32() -> torch.library.Library | None:
    """Bind this process's BF16 products on the CPU to float32's, where that is faster.

    The dispatcher's kernels are replaced, so that autograd and compiled code take them too.

    Returns:
        What the kernels live in; they stay as long as it does. None where the CPU has BF16.
    """
    if cpu_has_bf16():
        return None
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        for name in _PRODUCTS:
            _replace(library, name)
    return library


def _replace(library: torch.library.Library, name: str) -> None:
    plain = torch.library.get_kernel(f"aten::{name}", "CPU")
    into = torch.library.get_kernel(f"aten::{name}.out", "CPU")

    def product(keys: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not _are_bf16(args):
            return plain.call_boxed(keys, *args, **kwargs)
        return plain.call_boxed(keys, *map(_widened, args), **kwargs).bfloat16()

    def product_into(keys: Any, *args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if not _are_bf16((*args, out)):
            return into.call_boxed(keys, *args, out=out, **kwargs)
        found = plain.call_boxed(keys, *map(_widened, args), **kwargs)
        return out.resize_(found.shape).copy_(found)

    library.impl(name, product, "CPU", with_keyset=True, allow_override=True)
    library.impl(f"{name}.out", product_into, "CPU", with_keyset=True, allow_override=True)


def _are_bf16(args: tuple[Any, ...]) -> bool:
    """Whether all tensors are; for others PyTorch has its own kernels and refusals."""
    return all(one.dtype is torch.bfloat16 for one in args if isinstance(one, torch.Tensor))


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) else value
