"""Causal attention within each document of a batch, as one operator with its own backward.

A batch's sequences are flattened to one row of tokens, and cumulative lengths mark the documents'
ends. A GPU runs FlashAttention-4's variable-length kernels, the CPU a reference in plain PyTorch.
Document boundaries follow TorchTitan's `get_document_mask_mod`: an end-of-document token belongs to
the document that it ends, and no document spans two sequences.

PyTorch 2.10's own operator (`torch.nn.attention.varlen`) is no substitute: it supports neither a
scale nor values whose head dimension differs from that of the keys.
"""

import contextlib
import os
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

INTERFACE = "flash_attn.cute.interface"
FLASH_ATTENTION_4 = "flash_attention_4"
REFERENCE = "flash_attention_4_reference"

# The attention implementations that ran in this process.
ran: set[str] = set()


def why_not() -> str | None:
    """Return why FlashAttention-4 cannot run on this GPU; None if it can or there is no GPU."""
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    # Other GPUs (except perhaps SM110) have no kernel for 192-element keys with 128-element values.
    if major not in (9, 10):
        needed = "FlashAttention-4 needs a GPU of SM90 (H100, H200) or SM100 (B200)"
        return f"{needed}, this one is SM{major}{minor}"
    with contextlib.suppress(ModuleNotFoundError):
        if find_spec("flash_attn.cute"):
            return None
    return "FlashAttention-4 (flash-attn-4) is not installed here"


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float
) -> Tensor:
    """Let each token attend to its own document's tokens, up to and including itself.

    Args:
        q: (tokens, heads, head_dim); BF16 on a GPU, any floating-point type on the CPU.
        k, v: (tokens, kv_heads, head_dim or v_head_dim); `kv_heads` divides `heads`, and
            adjacent query heads share a key head.
        cu_seqlens: (documents + 1,) int32, ascending from 0 to `tokens`; documents may be empty.
        max_seqlen: upper bound on a document's length.

    Returns:
        (tokens, heads, v_head_dim), contiguous.
    """
    out, _ = torch.ops.cookbook.varlen_attention(q, k, v, cu_seqlens, max_seqlen, scale)
    return out


def forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output and the logsumexp of each token's scores, (heads, tokens)."""
    if not q.is_cuda:
        ran.add(REFERENCE)
        return reference_forward(q, k, v, cu_seqlens, scale)
    ran.add(FLASH_ATTENTION_4)
    out, lse, *_ = _kernels()._flash_attn_fwd(
        q, k, v, return_lse=True, **_packing(cu_seqlens, max_seqlen, scale)
    )
    return out, lse


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, given the results of `forward`."""
    if not q.is_cuda:
        return reference_backward(grad_out, q, k, v, out, lse, cu_seqlens, scale)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    _kernels()._flash_attn_bwd(
        *(q, k, v, out, grad_out, lse),
        **_packing(cu_seqlens, max_seqlen, scale) | {"dq": dq, "dk": dk, "dv": dv},
        # Without this, the kernel sums dQ by atomic additions, whose order differs between runs.
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return dq, dk, dv


def _packing(cu_seqlens: Tensor, max_seqlen: int, scale: float) -> dict[str, Any]:
    return {
        **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), cu_seqlens),
        **dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), max_seqlen),
        "softmax_scale": scale,
        "causal": True,
    }


def _kernels() -> Any:
    """Return FlashAttention-4's module, with its cache of compiled kernels enabled.

    Compiling takes each process 6 to 10 s. The cache is in the node's /tmp, because it needs file
    locks, which some shared file systems lack.
    """
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    return import_module(INTERFACE)


_forward = torch.library.custom_op("cookbook::varlen_attention", forward, mutates_args=())
_backward = torch.library.custom_op(
    "cookbook::varlen_attention_backward", backward, mutates_args=()
)


def _precise(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    tokens, heads, _ = q.shape
    lse = q.new_empty((heads, tokens), dtype=_precise(q))
    return q.new_empty((tokens, heads, v.shape[-1])), lse


@_backward.register_fake
def _(grad_out: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    q, k, v = inputs[:3]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, cu_seqlens, ctx.max_seqlen, ctx.scale = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, out, lse, cu_seqlens)


def _autograd(ctx: Any, grad_out: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, cu_seqlens = ctx.saved_tensors
    grads = torch.ops.cookbook.varlen_attention_backward(
        grad_out, q, k, v, out, lse, cu_seqlens, ctx.max_seqlen, ctx.scale
    )
    return *grads, None, None, None


_forward.register_autograd(_autograd, setup_context=_setup_context)


# Memory-budget recomputation weighs operators by these FLOPs. The formulas see tensors' shapes, not
# document lengths. So each sequence counts as one document: a causal triangle of scores per head.
@register_flop_formula(torch.ops.cookbook.varlen_attention)
def _forward_flops(
    q: Any, k: Any, v: Any, cu_seqlens: Any, max_seqlen: int, *_: Any, **__: Any
) -> int:
    tokens, heads, head_dim = q
    return int(tokens * max_seqlen * heads * (head_dim + v[-1]))


@register_flop_formula(torch.ops.cookbook.varlen_attention_backward)
def _backward_flops(grad_out: Any, q: Any, k: Any, v: Any, *rest: Any, **_: Any) -> int:
    """Count five products: recomputed scores, and gradients of probabilities, q, k and v."""
    tokens, heads, head_dim = q
    max_seqlen = rest[3]
    return int(tokens * max_seqlen * heads * (3 * head_dim + 2 * v[-1]))


def reference_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute `forward` in plain PyTorch, per document, in float32 (float64 for float64 inputs)."""
    precise, groups = _precise(q), q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    out = q.new_empty((*q.shape[:2], v.shape[-1]))
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=precise)
    for part in _documents(cu_seqlens):
        scores = _scores(q[part].to(precise), k[part].to(precise), scale)
        lse[:, part] = torch.logsumexp(scores, dim=-1)
        probabilities = torch.exp(scores - lse[:, part, None])
        out[part] = torch.einsum("hqk,khd->qhd", probabilities, v[part].to(precise)).to(q.dtype)
    return out, lse


def reference_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, given the results of `reference_forward`."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
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
    # Sum each key and value head's gradients over the query heads that share it.
    dk, dv = (x.to(lse.dtype).unflatten(1, (-1, groups)).sum(2).to(x.dtype) for x in grads[1:])
    return grads[0], dk, dv


def _documents(cu_seqlens: Tensor) -> list[slice]:
    return [slice(*ends) for ends in pairwise(cu_seqlens.tolist()) if ends[1] > ends[0]]


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill_(later, float("-inf"))


@dataclass
class AttendedLength:
    """A running mean of the number of keys that a token attends to."""

    keys: Tensor | int = 0
    tokens: int = 0
    is_open: bool = True

    def add(self, ends: Tensor) -> None:
        """Add a batch; `ends` (batch, length) is true at the last token of each document."""
        positions = torch.arange(ends.shape[1], device=ends.device).expand_as(ends)
        after_end = torch.where(ends[:, :-1], positions[:, 1:], 0)
        starts = torch.nn.functional.pad(after_end, (1, 0)).cummax(dim=1).values
        self.keys = self.keys + (positions + 1 - starts).sum()
        self.tokens += ends.numel()

    def add_whole(self, sequences: int, length: int) -> None:
        """Count the tokens of `sequences` sequences, each one document of `length` tokens."""
        self.keys = self.keys + sequences * (length * (length + 1) // 2)
        self.tokens += sequences * length

    def close(self) -> float | None:
        """Stop counting; return the mean number of keys per token, None if no batch was added."""
        self.is_open = False
        return int(self.keys) / self.tokens if self.tokens else None


def document_ends(tokens: Tensor, eos_id: int | None) -> Tensor:
    """Return a bool mask (batch, length) that is true at the last token of each document.

    The token `eos_id` ends a document; if it is None, each sequence is one document.
    """
    ends = torch.zeros_like(tokens, dtype=torch.bool) if eos_id is None else tokens == eos_id
    ends[:, -1] = True
    return ends


def bounds_capacity(documents: int, length: int) -> int:
    """Return how many documents per sequence to reserve room for, a power of two.

    The result is at least `documents`, `length // 128` and `min(length, 16)`. The last two keep it
    from changing often, because each new capacity recompiles code and kernels.
    """
    return 1 << (max(documents, length // 128, min(length, 16)) - 1).bit_length()


def document_bounds(ends: Tensor, capacity: int) -> Tensor:
    """Return the position after each document, (batch, capacity) int32, ascending.

    `ends` marks the documents' last tokens, (batch, length) bool; a sequence has at most `capacity`
    documents, and unused entries are `length`. One row per sequence lets callers split the batch.
    """
    length = ends.shape[1]
    after = torch.arange(1, length + 1, dtype=torch.int32, device=ends.device)
    bounds = torch.where(ends, after, length).sort(dim=1).values[:, :capacity]
    return torch.nn.functional.pad(bounds, (0, capacity - bounds.shape[1]), value=length)


def cumulative_lengths(bounds: Tensor) -> Tensor:
    """Convert document bounds (batch, capacity) to cumulative lengths in the flattened batch.

    The result is (batch * capacity + 1,) int32, ascending from 0 to batch * length; unused capacity
    becomes empty documents.
    """
    # The last column is the sequence length, read on the device so that the host need not wait.
    starts = torch.arange(len(bounds), dtype=torch.int32, device=bounds.device) * bounds[:, -1]
    return torch.nn.functional.pad((bounds + starts.unsqueeze(1)).flatten(), (1, 0))
