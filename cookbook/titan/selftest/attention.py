"""Proofs of attention: output and gradients of q, k and v, for each document and head.

The reference is plain PyTorch in float32, some heads at a time. FlashAttention-4 has had right
outputs with wrong gradients, for several sequences alone and for activations as trained models have
them (NVIDIA/TransformerEngine#3216). So inputs come in both kinds, and documents in all packings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from cookbook.titan.common import varlen_attention as varlen
from cookbook.titan.common.documents import (
    bounds_capacity,
    cumulative_lengths,
    document_bounds,
)
from cookbook.titan.selftest.attention_errors import (
    PART_BOUND,
    WHOLE_BOUND,
    Errors,
    Tensors,
)
from cookbook.titan.selftest.cases import Bound, Error
from cookbook.titan.selftest.inputs import generator
from cookbook.titan.selftest.packings import document_ends_of

RANDOM = Bound(WHOLE_BOUND, PART_BOUND)
# Gradients of peaked scores are small differences.
TRAINED = Bound(2 * WHOLE_BOUND, 2 * PART_BOUND)
# Of the reference at a time, over heads: 1 GiB in float32, and its backward holds some of them.
SCORES = 1 << 28
# Attention of folded q, k and v, (tokens, heads, head_dim), for the ends of their documents.
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Told:
    """What training tells the kernel of a batch, whatever documents it has.

    FlashAttention-4 compiles by these numbers: beyond 256 documents it is another kernel.

    Attributes:
        room: documents of all sequences together, empty ones included.
        length: no document is longer; the tokens of a sequence.
    """

    room: int
    length: int


@dataclass(frozen=True)
class AttentionShape:
    """What one rank's attention gets: heads are those of one TP rank.

    Attributes:
        told: what the kernel is told where training has more sequences, or longer ones; None where
            this shape is that of training.
    """

    batch: int
    length: int
    heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    told: Told | None = field(default=None, kw_only=True)

    def __str__(self) -> str:
        return (
            f"{self.batch} x {self.length:,} tokens, {self.heads} heads of "
            f"{self.head_dim}/{self.v_head_dim}"
        )

    @property
    def most_documents(self) -> int:
        """That a sequence has room for."""
        return self.told.room // self.batch if self.told else self.length


def random_inputs(shape: AttentionShape, device: str) -> Tensors:
    """q, k, v and the gradient of the output, (tokens, heads, head_dim), BF16."""
    random = generator(device, 0)
    rows = (shape.batch * shape.length, shape.heads)
    dims = (shape.head_dim, shape.head_dim, shape.v_head_dim, shape.v_head_dim)
    return [torch.randn(*rows, dim, device=device, generator=random).bfloat16() for dim in dims]


def trained_inputs(shape: AttentionShape, device: str) -> Tensors:
    """The same as a trained model has them: channels with an offset, and scores that are peaked."""
    q, k, v, grad = random_inputs(shape, device)
    q[..., ::17] += 2
    k[..., ::17] += 3
    k[..., 5] *= 4
    # A few tokens of large value that many others attend to, and gradients of unequal size.
    v[:: shape.length // 4 + 1] *= 8
    grad[1::3] *= 0.125
    return [q, k, v, grad]


def differentiate(attend: Attend, inputs: Tensors) -> Tensors:
    """Output and gradients of q, k and v."""
    *leaves, grad = inputs
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def reference(inputs: Tensors, heads: slice, cu_seqlens: torch.Tensor, scale: float) -> Tensors:
    """The same in float32, for some of the heads."""
    q, k, v, grad = (x[:, heads].float() for x in inputs)
    out, lse = varlen.reference_forward(q, k, v, cu_seqlens, scale)
    return [out, *varlen.reference_backward(grad, q, k, v, out, lse, cu_seqlens, scale)]


def compare(
    shape: AttentionShape,
    results: Mapping[str, Tensors],
    inputs: Tensors,
    exact: torch.Tensor,
    heads: int,
) -> dict[str, Errors]:
    """Errors of the results of each kind against the reference, `heads` heads at a time.

    Args:
        exact: (documents + 1,), cumulative lengths without empty documents.
    """
    errors = {kind: Errors(exact) for kind in results}
    for begin in range(0, shape.heads, heads):
        some = slice(begin, begin + heads)
        expected = reference(inputs, some, exact, shape.scale)
        for kind, result in results.items():
            errors[kind].add([x[:, some] for x in result], expected)
    return errors


def attention_errors(
    shape: AttentionShape,
    packing: str,
    like_trained: bool,
    attend_by: Callable[[AttentionShape, torch.Tensor], Attend],
    device: str,
) -> Iterator[Error]:
    """Compare one packing of documents.

    Args:
        attend_by: makes the attention for a shape and the documents' ends, (batch, length), bool.
    """
    ends = document_ends_of(packing, shape.batch, shape.length, shape.most_documents).to(device)
    inputs = (trained_inputs if like_trained else random_inputs)(shape, device)
    results = {"": differentiate(attend_by(shape, ends), inputs)}
    exact = torch.unique_consecutive(padded_lengths(ends))
    heads = max(1, min(4, SCORES // int(exact.diff().max()) ** 2))
    errors = compare(shape, results, inputs, exact, heads)[""]
    for name, error in errors.relative().items():
        whole, part = (math.inf if math.isnan(x) else x for x in (error["whole"], error["part"]))
        yield Error(name, whole, part, TRAINED if like_trained else RANDOM)


def padded_lengths(ends: torch.Tensor, room: int | None = None) -> torch.Tensor:
    """Cumulative lengths as training makes them, with empty documents; `ends` as above.

    Args:
        room: documents of all sequences together, none of them more than its share; None for what
            training gives a batch of this very shape.
    """
    if room is None:
        documents = int(ends.sum(dim=1).max())
        room = len(ends) * bounds_capacity(documents, ends.shape[1])
    lengths = cumulative_lengths(document_bounds(ends, room // len(ends)))
    return torch.nn.functional.pad(lengths, (0, room + 1 - len(lengths)), value=ends.numel())


def flash_attention_4(shape: AttentionShape, ends: torch.Tensor) -> Attend:
    """The operator that training calls; on a CPU it is the operator's own implementation."""
    cu_seqlens = padded_lengths(ends, shape.told.room if shape.told else None)
    longest = shape.told.length if shape.told else shape.length

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return varlen.varlen_attention(q, k, v, cu_seqlens, longest, shape.scale)

    return attend
