"""The calls of FlashAttention-4's variable-length kernels by `varlen_attention.py`.

Set-up compiles the kernels by the same calls (`compile_attention.py`), so that FlashAttention-4
finds them again by their arguments.
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
    """Return the output, and the logsumexp of each token's scores, (heads, tokens)."""
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
    """Return the gradients of q, k and v, given the results of `forward`."""
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
    """Return the arguments that the forward and the backward kernels share."""
    return {
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_k": cu_seqlens,
        "max_seqlen_q": max_seqlen,
        "max_seqlen_k": max_seqlen,
        "softmax_scale": scale,
        "causal": True,
    }


def _kernels() -> Any:
    """Import FlashAttention-4 at the first call, since that takes seconds."""
    if INTERFACE in sys.modules:
        return sys.modules[INTERFACE]
    # Compiling its kernels takes each process 6 to 10 s; the next job loads them from the cache in
    # 0.03 s. The cache is in the node's /tmp by default: FlashAttention-4 needs file locks, which
    # some shared file systems lack.
    os.environ.setdefault(kernel_cache.ENABLED, "1")
    interface = import_module(INTERFACE)
    if os.environ[kernel_cache.ENABLED] == "1":
        _take_over()
    return interface


def _take_over() -> None:
    """Put set-up's kernels for this GPU into FlashAttention-4's cache."""
    major, minor = torch.cuda.get_device_capability()
    kernel_cache.take_over(
        kernel_cache.folder_of(10 * major + minor, compiler_version()),
        import_module("flash_attn.cute.cache_utils").get_cache_path(),
    )


def compiler_version() -> int:
    """Return the CUDA major version of the compiler that CuTe DSL chose for this driver."""
    return int(import_module("cutlass.base_dsl.version_info").CUDA_VERSION.major)
