"""FlashAttention-4's variable-length kernels as the operator of `varlen_attention.py` calls them.

Set-up compiles them by the same calls (`compile_attention.py`): its kernels are found again by what
FlashAttention-4 is told here.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

import torch

from cookbook.titan.common import kernel_cache

INTERFACE = "flash_attn.cute.interface"


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and the logarithm of each token's sum of exponentials, (heads, tokens)."""
    out, lse, *_ = _kernels()._flash_attn_fwd(
        q, k, v, return_lse=True, **_packing(cu_seqlens, max_seqlen, scale)
    )
    return out, lse


def backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v, from what `forward` returned."""
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    _kernels()._flash_attn_bwd(
        *(q, k, v, out, grad_out, lse),
        **_packing(cu_seqlens, max_seqlen, scale),
        dq=dq,
        dk=dk,
        dv=dv,
        # dQ is summed by atomic additions otherwise, in another order each time.
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return dq, dk, dv


def _packing(cu_seqlens: torch.Tensor, max_seqlen: int, scale: float) -> dict[str, Any]:
    """Keyword arguments that the forward and the backward kernels share."""
    return {
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_k": cu_seqlens,
        "max_seqlen_q": max_seqlen,
        "max_seqlen_k": max_seqlen,
        "softmax_scale": scale,
        "causal": True,
    }


def _kernels() -> Any:
    """FlashAttention-4; imported at the first call, since that takes seconds."""
    if INTERFACE in sys.modules:
        return sys.modules[INTERFACE]
    # Compiling its kernels takes each process 6 to 10 s. Kept, in /tmp of the node by default, they
    # are loaded in 0.03 s by the next job. Not on a shared file system: some have no file locks,
    # and FlashAttention-4 fails without.
    os.environ.setdefault(kernel_cache.ENABLED, "1")
    interface = import_module(INTERFACE)
    if os.environ[kernel_cache.ENABLED] == "1":
        _take_over()
    return interface


def _take_over() -> None:
    """Put set-up's kernels for this GPU into FlashAttention-4's cache, before it looks there."""
    major, minor = torch.cuda.get_device_capability()
    kernel_cache.take_over(
        kernel_cache.folder_of(10 * major + minor, compiler_version()),
        import_module("flash_attn.cute.cache_utils").get_cache_path(),
    )


def compiler_version() -> int:
    """The CUDA major version of the compiler that CuTe DSL has chosen here, by the driver."""
    return int(import_module("cutlass.base_dsl.version_info").CUDA_VERSION.major)
