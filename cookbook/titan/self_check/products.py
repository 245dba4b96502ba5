"""Compare attention, matrix products and their gradients with plain PyTorch in float32.

Attention is compared per document and head, for several packings of documents, on random inputs and
on inputs like those of a trained model. FlashAttention-4 kernels have returned correct outputs but
wrong gradients, some only with several sequences, some only on a trained model's activations
(NVIDIA/TransformerEngine#3216).

Linear layers and experts are compared per row and per column.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, cycle, pairwise

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from cookbook.titan.common import varlen_attention as varlen
from cookbook.titan.common.chunked_loss import IGNORE_INDEX, VocabularyShard, chunked_cross_entropy
from cookbook.titan.common.expert_groups import padded_sizes
from cookbook.titan.self_check import (
    BF16,
    FP8,
    Bound,
    Error,
    error_of,
    generator,
    run_both,
    uneven_counts,
    uneven_values,
    with_gradients,
    worst_ratio,
)

RANDOM = Bound(0.01, 0.05)
# Wider bounds: in a trained model, gradients are small differences of large numbers.
TRAINED = Bound(0.02, 0.1)
# The reference computes at most this many attention scores at once, 1 GiB in float32. But it always
# computes all query heads of a key head at once, even if that takes more.
SCORES = 1 << 28
# Document lengths: tiny, or close to a multiple of FlashAttention-4's tile sizes (64, 96 and 128).
_EDGES = (
    *(1, 1, 2, 63, 64, 65, 95, 96, 97, 127, 128, 129, 1, 191, 192, 193),
    *(255, 256, 257, 383, 384, 385, 3, 511),
)
# A function that computes attention from q, k and v, each (tokens, heads, head_dim).
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class AttentionShape:
    """The shape of one TP rank's attention; `groups` query heads share a key and value head.

    `max_documents` counts a batch's documents, including the empty ones that pad it: above 256,
    FlashAttention-4 runs another kernel. `max_length` is the limit for one document. If either is
    None, it is computed as in training.
    """

    batch: int
    length: int
    heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    groups: int = 1
    max_documents: int | None = None
    max_length: int | None = None


def document_ends(packing: str, batch: int, length: int, most: int | None = None) -> Tensor:
    """Return a bool mask (batch, length) that is true at the last token of each document.

    With packing `whole`, each sequence is one document. With `edges`, document lengths are close to
    the kernels' tile sizes. A sequence has at most `most` documents.
    """
    ends = torch.zeros(batch * length, dtype=torch.bool)
    last, lengths = -1, cycle(_EDGES)
    while packing == "edges" and (last := last + next(lengths)) < len(ends):
        ends[last] = True
    ends = ends.view(batch, length)
    if most is not None:
        ends &= ends.cumsum(dim=1) < most
    ends[:, -1] = True
    return ends


def attention_inputs(shape: AttentionShape, like_trained: bool, device: str) -> list[Tensor]:
    """Return q, k, v and the output's gradient, each (tokens, heads, head_dim), BF16.

    With `like_trained`, channels have an offset and scores are peaked, as in a trained model.
    """
    source = generator(device, 0)
    rows, shared = shape.batch * shape.length, shape.heads // shape.groups
    heads = (shape.heads, shared, shared, shape.heads)
    dims = (shape.head_dim, shape.head_dim, shape.v_head_dim, shape.v_head_dim)
    q, k, v, grad = (
        torch.randn(rows, *size, device=device, generator=source).bfloat16()
        for size in zip(heads, dims, strict=True)
    )
    if like_trained:
        q[..., ::17] += 2
        k[..., ::17] += 3
        k[..., 5] *= 4
        v[:: shape.length // 4 + 1] *= 8
        grad[1::3] *= 0.125
    return [q, k, v, grad]


def attention_errors(
    shape: AttentionShape,
    packing: str,
    like_trained: bool,
    attend_by: Callable[[AttentionShape, Tensor], Attend],
    device: str,
) -> Iterator[Error]:
    """Yield the errors of attention and of its gradients, for one packing of documents.

    `attend_by(shape, ends)` returns the attention function to test; for `ends` see `document_ends`.
    """
    most = shape.max_documents // shape.batch if shape.max_documents else None
    ends = document_ends(packing, shape.batch, shape.length, most).to(device)
    *leaves, grad = attention_inputs(shape, like_trained, device)
    found = with_gradients(attend_by(shape, ends), leaves, grad)
    cu_seqlens = nn.functional.pad(ends.flatten().nonzero()[:, 0] + 1, (1, 0)).int()
    lengths = cu_seqlens.diff()
    document = torch.arange(len(lengths), device=device).repeat_interleave(lengths)
    shared = shape.heads // shape.groups
    heads = max(1, min(4, SCORES // int(lengths.max()) ** 2) // shape.groups)
    # For each tensor, by document and head: the sums of squared errors and of squared values.
    sums: dict[str, list[Tensor]] = {name: [] for name in ("out", "dq", "dk", "dv")}
    for begin in range(0, shared, heads):
        q, k, v, dout, *some_found = (
            x.detach().unflatten(1, (shared, -1))[:, begin : begin + heads].flatten(1, 2).float()
            for x in (*leaves, grad, *found)
        )
        exact, lse = varlen.reference_forward(q, k, v, cu_seqlens, shape.scale)
        grads = varlen.reference_backward(dout, q, k, v, exact, lse, cu_seqlens, shape.scale)
        exacts = (exact, *grads)
        for parts, one, other in zip(sums.values(), some_found, exacts, strict=True):
            wrong = (one - other).square().sum(-1)
            both = torch.stack([wrong, other.square().sum(-1)], -1)
            by_document = both.new_zeros(len(lengths), *both.shape[1:])
            parts.append(by_document.index_add_(0, document, both))
    for name, parts in sums.items():
        wrong, right = torch.cat(parts, dim=1).unbind(-1)
        # Divide a document's error by its norm or, if larger, by the average norm of that many
        # tokens: in a document of one token, the gradients of q and k are zero.
        mean = right.sum() / (lengths.sum() * right.shape[1])
        part = worst_ratio(wrong / torch.maximum(right, lengths[:, None] * mean))
        whole = worst_ratio(wrong.sum() / right.sum())
        yield Error(name, whole, part, TRAINED if like_trained else RANDOM)


def flash_attention_4(shape: AttentionShape, ends: Tensor) -> Attend:
    """Return a function that computes attention as training does, on documents ending at `ends`."""
    capacity = varlen.bounds_capacity(int(ends.sum(dim=1).max()), shape.length)
    room = shape.max_documents or shape.batch * capacity
    lengths = varlen.cumulative_lengths(varlen.document_bounds(ends, room // shape.batch))
    # As in training, add empty documents at the end until there are `room` documents.
    cu_seqlens = nn.functional.pad(lengths, (0, room + 1 - len(lengths)), value=ends.numel())
    longest = shape.max_length or shape.length
    return lambda q, k, v: varlen.varlen_attention(q, k, v, cu_seqlens, longest, shape.scale)


Products = tuple[Tensor, Tensor, Tensor]

# Error bounds by format, for the output, the input gradient and the weight gradient.
BOUNDS: dict[str, tuple[Bound, Bound, Bound]] = {
    "bf16": (BF16, BF16, BF16),
    "mxfp8": (FP8, FP8, FP8),
    "mxfp8_wgrad_with_hp": (FP8, FP8, BF16),
    "fp8": (FP8, FP8, FP8),
    "mx": (FP8, FP8, FP8),
}
NAMES = ("output", "input gradient", "weight gradient")
# Logits are rounded to BF16. The rounding errors average out in the loss, a sum over thousands of
# tokens. They do not in its gradients, whose bound is therefore wider.
LOSS = Bound(5e-4, 5e-4)
GRADIENT = Bound(0.012, 0.04)


def grouped_errors(
    experts: int,
    rows: int,
    n: int,
    k: int,
    alignment: int,
    kind: str,
    multiply: Callable[..., Products],
    device: str,
) -> Iterator[Error]:
    """Yield the errors of a grouped GEMM with uneven groups, and of its gradients.

    `rows` is the approximate number of rows in all groups, without padding. With padding there are
    M rows. `multiply` takes x (M, K), weights (experts, N, K), the groups' ends (experts,) int32,
    and the output's gradient (M, N). All but the ends are BF16. It returns the output, the input
    gradient and the weight gradient.
    """
    counts = uneven_counts(experts, rows)
    starts = [0, *accumulate(padded_sizes(counts, alignment))]
    groups, bounds = [*pairwise(starts)], BOUNDS[kind]
    x = uneven_values(starts[-1], k, device, 1)
    grad = uneven_values(starts[-1], n, device, 2)
    for (start, stop), count in zip(groups, counts, strict=True):
        x[start + count : stop] = 0
        grad[start + count : stop] = 0
    weight = torch.stack([uneven_values(n, k, device, 100 + e) for e in range(experts)])
    offsets = torch.tensor(starts[1:], dtype=torch.int32, device=device)
    *found_rows, dw = multiply(x, weight, offsets, grad)
    by_row = zip(NAMES, found_rows, (x, grad), (weight.mT, weight), bounds, strict=False)
    for name, found, left, right, bound in by_row:
        by_group = zip(groups, right, strict=True)
        expected = torch.cat([left[a:b].float() @ one.float() for (a, b), one in by_group])
        yield error_of(name, found, expected, bound, [(0,), (1,)])
    expected = torch.stack([grad[a:b].float().t() @ x[a:b].float() for a, b in groups])
    yield error_of(NAMES[2], dw, expected, bounds[2], [(0, 1), (0, 2)], floor=0.01)


def linear_errors(layer: nn.Module, rows: int, kind: str, device: str) -> Iterator[Error]:
    """Overwrite a linear layer's weights; yield the errors of its output and gradients.

    `layer` must have no bias. It may be on `meta`; it is moved to `device` and cast to BF16.
    """
    layer = layer.to_empty(device=device).bfloat16()
    weight = next(layer.parameters())
    n, k = weight.shape
    with torch.no_grad():
        weight.copy_(uneven_values(n, k, device, 3).to(weight.dtype))
    x, grad = uneven_values(rows, k, device, 4), uneven_values(rows, n, device, 5)
    pairs = run_both(lambda x, _: layer(x), nn.functional.linear, [x, weight], grad)
    for name, (found, expected), bound in zip(NAMES, pairs, BOUNDS[kind], strict=True):
        yield error_of(name, found, expected, bound, [(0,), (1,)])


def loss_errors(
    tokens: int,
    dim: int,
    vocabulary: int,
    num_chunks: int,
    group: dist.ProcessGroup | None,
    backend: str | None,
    device: str,
) -> Iterator[Error]:
    """Compare the chunked loss and its gradients with the cross-entropy of unchunked logits.

    The vocabulary is sharded over the TP ranks of `group`, which all get the same inputs.
    """
    random = generator(device, 21)
    hidden = torch.randn(tokens, dim, device=device, generator=random).bfloat16()
    # Logits get a standard deviation of 2, so that some tokens are much likelier than others.
    weight = torch.randn(vocabulary, dim, device=device, generator=random) * (2 / dim**0.5)
    weight = weight.bfloat16()
    labels = torch.randint(vocabulary, (tokens,), device=device, generator=random)
    labels[1::7] = IGNORE_INDEX
    labels[0], labels[-1] = 0, vocabulary - 1
    ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
    # Shard as DTensor does: only the last shard may be smaller.
    size = -(-vocabulary // ranks)
    words = slice(rank * size, min((rank + 1) * size, vocabulary))
    shard = None if group is None else VocabularyShard(words.start, group)

    def chunked(x: Tensor, w: Tensor) -> Tensor:
        own = w[words]
        return chunked_cross_entropy(x[None], own, labels[None], num_chunks, shard, backend)[None]

    def whole(x: Tensor, w: Tensor) -> Tensor:
        return nn.functional.cross_entropy(x @ w.t(), labels, reduction="sum")[None]

    # TorchTitan divides the summed loss by the number of tokens.
    grad = torch.full([1], 1 / tokens, device=device)
    loss, (dx, wanted_dx), dw = run_both(chunked, whole, [hidden, weight], grad)
    yield error_of("loss", *loss, LOSS)
    own_dw, wanted_dw = (one[words] for one in dw)
    yield error_of("gradient of the weight", own_dw, wanted_dw, GRADIENT, [(0,)], floor=0.1)
    if group is not None:
        # Each rank has one term of the hidden states' gradient: sum the terms.
        dx = dx.float()
        dist.all_reduce(dx, group=group)
    yield error_of("gradient of the hidden states", dx, wanted_dx, GRADIENT)
