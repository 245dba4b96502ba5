"""Causal attention within each document of a batch, as one operator with its own backward.

The sequences of a batch are folded into one row of tokens, and cumulative lengths say where each
document ends (`documents.py`). On a GPU FlashAttention-4's variable-length kernels compute it. On
the CPU the same operator computes a reference with plain PyTorch operations.

PyTorch 2.10 has an operator of this kind (`torch.nn.attention.varlen`), but it takes no scale, its
fake output has the head dimension of the queries, and its FlashAttention-4 backend expects two
results where FlashAttention-4 returns five.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from cookbook.titan.common import flash_kernels

FLASH_ATTENTION_4 = "flash_attention_4"
REFERENCE = "flash_attention_4_reference"

# What computed attention in this process, noted by the operator when it runs.
ran: set[str] = set()

# SM90 is H100 and H200, SM100 and SM103 are B200 and B300: what FlashAttention-4 has kernels for
# with heads of 192 and 128.
_MAJORS = (9, 10)


def why_not() -> str | None:
    """Why FlashAttention-4 cannot run on this machine's GPU; None where it can.

    Without a GPU the reference runs, so there is no reason.
    """
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    if major not in _MAJORS:
        return (
            f"FlashAttention-4 needs a GPU of SM90 (H100, H200) or SM100 (B200), "
            f"this one is SM{major}{minor}"
        )
    try:
        installed = find_spec("flash_attn.cute") is not None
    except ModuleNotFoundError:  # not even the package around it
        installed = False
    return None if installed else "FlashAttention-4 (flash-attn-4) is not installed here"


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
) -> torch.Tensor:
    """Each token attends to its own document, up to itself.

    Args:
        q, k: (tokens, heads, head_dim); BF16 on a GPU, any floating-point type on the CPU.
        v: (tokens, heads, v_head_dim).
        cu_seqlens: (documents + 1,) int32, ascending from 0 to `tokens`. Documents may be empty, so
            that the number of entries can stay the same from batch to batch.
        max_seqlen: no document is longer. A bound, so that no number has to come from the GPU.
        scale: factor of the scores before the softmax.

    Returns:
        (tokens, heads, v_head_dim), contiguous.
    """
    out, _ = torch.ops.cookbook.varlen_attention(q, k, v, cu_seqlens, max_seqlen, scale)
    return out


@torch.library.custom_op("cookbook::varlen_attention", mutates_args=())
def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    if not q.is_cuda:
        ran.add(REFERENCE)
        return reference_forward(q, k, v, cu_seqlens, scale)
    ran.add(FLASH_ATTENTION_4)
    return flash_kernels.forward(q, k, v, cu_seqlens, max_seqlen, scale)


@torch.library.custom_op("cookbook::varlen_attention_backward", mutates_args=())
def _backward(
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
    if not q.is_cuda:
        return reference_backward(grad_out, q, k, v, out, lse, cu_seqlens, scale)
    return flash_kernels.backward(grad_out, q, k, v, out, lse, cu_seqlens, max_seqlen, scale)


def _lse_dtype(q: torch.Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


@_forward.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads, _ = q.shape
    lse = q.new_empty((heads, tokens), dtype=_lse_dtype(q))
    return q.new_empty((tokens, heads, v.shape[-1])), lse


@_backward.register_fake
def _(
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
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    q, k, v, cu_seqlens, ctx.max_seqlen, ctx.scale = inputs
    out, lse = output
    # Its gradient is left out of the backward, so nobody may ask for it.
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, out, lse, cu_seqlens)


def _autograd(ctx: Any, grad_out: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    q, k, v, out, lse, cu_seqlens = ctx.saved_tensors
    grads = torch.ops.cookbook.varlen_attention_backward(
        grad_out, q, k, v, out, lse, cu_seqlens, ctx.max_seqlen, ctx.scale
    )
    return *grads, None, None, None


_forward.register_autograd(_autograd, setup_context=_setup_context)


@register_flop_formula(torch.ops.cookbook.varlen_attention)
def _forward_flops(
    q: tuple[int, ...],
    k: tuple[int, ...],
    v: tuple[int, ...],
    cu_seqlens: tuple[int, ...],
    max_seqlen: int,
    *_: Any,
    **__: Any,
) -> int:
    """Two products of half a square for each head, as if every sequence were one document.

    The lengths are on the GPU. Recomputation within a memory budget weighs operators by this.
    """
    tokens, heads, head_dim = q
    return tokens * max_seqlen * heads * (head_dim + v[-1])


@register_flop_formula(torch.ops.cookbook.varlen_attention_backward)
def _backward_flops(
    grad_out: tuple[int, ...],
    q: tuple[int, ...],
    k: tuple[int, ...],
    v: tuple[int, ...],
    out: tuple[int, ...],
    lse: tuple[int, ...],
    cu_seqlens: tuple[int, ...],
    max_seqlen: int,
    *_: Any,
    **__: Any,
) -> int:
    """Five products: the scores again, then the gradients of probabilities, q, k and v."""
    tokens, heads, head_dim = q
    return tokens * max_seqlen * heads * (3 * head_dim + 2 * v[-1])


def reference_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator in plain PyTorch, document by document, in float32 or, for float64, in float64.

    Returns:
        The output in the type of `q`, (tokens, heads, v_head_dim), and the logarithm of the sum of
        the exponentials of each token's scores, (heads, tokens).
    """
    precise = _lse_dtype(q)
    out = q.new_empty((*q.shape[:2], v.shape[-1]))
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=precise)
    for part in _documents(cu_seqlens):
        scores = _scores(q[part].to(precise), k[part].to(precise), scale)
        lse[:, part] = torch.logsumexp(scores, dim=-1)
        probabilities = torch.exp(scores - lse[:, part, None])
        out[part] = torch.einsum("hqk,khd->qhd", probabilities, v[part].to(precise)).to(q.dtype)
    return out, lse


def reference_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v, from what `reference_forward` returned."""
    grads = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    for part in _documents(cu_seqlens):
        q_, k_, v_, out_, grad_ = (x[part].to(lse.dtype) for x in (q, k, v, out, grad_out))
        probabilities = torch.exp(_scores(q_, k_, scale) - lse[:, part, None])
        grad_probabilities = torch.einsum("qhd,khd->hqk", grad_, v_)
        row_sums = (grad_ * out_).sum(-1).T.unsqueeze(-1)
        grad_scores = probabilities * (grad_probabilities - row_sums) * scale
        grads[0][part] = torch.einsum("hqk,khd->qhd", grad_scores, k_).to(q.dtype)
        grads[1][part] = torch.einsum("hqk,qhd->khd", grad_scores, q_).to(k.dtype)
        grads[2][part] = torch.einsum("hqk,qhd->khd", probabilities, grad_).to(v.dtype)
    return grads[0], grads[1], grads[2]


def _documents(cu_seqlens: torch.Tensor) -> Iterator[slice]:
    for start, stop in pairwise(cu_seqlens.tolist()):
        if stop > start:
            yield slice(start, stop)


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """(heads, length, length); minus infinity where the key comes after the query."""
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill_(later, float("-inf"))
