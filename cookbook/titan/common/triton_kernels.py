"""Triton kernels for the routed experts: group, move, scale and sum rows; SwiGLU.

Each kernel makes one pass over its data. `expert_groups.py` has PyTorch equivalents for CPUs. Sums
accumulate in float32, in a fixed order without atomics, so that runs are reproducible. Triton skips
the launch of a grid without programs, so no function checks for empty tensors.
"""

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from triton.language import constexpr

# Number of token copies that one Triton program handles. Their total differs in every layer, so
# kernels are compiled for any total.
_COPIES = 1024
_ROWS = 64


@triton.jit(do_not_specialize=["num_copies"])
def _count_kernel(  # type: ignore[no-untyped-def]
    experts, counts, num_copies, num_experts: constexpr, block: constexpr
):
    part = tl.program_id(0)
    copy = part * block + tl.arange(0, block)
    expert = tl.load(experts + copy, mask=copy < num_copies, other=-1)
    for one in range(num_experts):
        count = tl.sum((expert == one).to(tl.int32), 0)
        tl.store(counts + one * tl.num_programs(0) + part, count)


@triton.jit(do_not_specialize=["num_copies"])
def _place_kernel(  # type: ignore[no-untyped-def]
    experts, sums, sizes, ends, copies, slots, num_copies, num_experts: constexpr, block: constexpr
):
    part = tl.program_id(0)
    copy = part * block + tl.arange(0, block)
    inside = copy < num_copies
    expert = tl.load(experts + copy, mask=inside, other=-1)
    slot = tl.full((block,), -1, tl.int32)
    for one in range(num_experts):
        is_its = (expert == one).to(tl.int32)
        start = tl.load(ends + one) - tl.load(sizes + one)
        before = tl.load(sums + one * tl.num_programs(0) + part) - tl.sum(is_its, 0)
        slot = tl.where(expert == one, start + before + tl.cumsum(is_its, 0) - 1, slot)
    tl.store(slots + copy, slot, mask=inside)
    tl.store(copies + slot, copy, mask=slot >= 0)


@triton.jit(do_not_specialize=["num_places"])
def _take_kernel(  # type: ignore[no-untyped-def]
    values, places, taken, num_places, block: constexpr
):
    index = tl.program_id(0) * block + tl.arange(0, block)
    place = tl.load(places + index, mask=index < num_places, other=-1)
    value = tl.load(values + place, mask=place >= 0, other=0.0)
    tl.store(taken + index, value, mask=index < num_places)


@triton.jit
def _spread_kernel(  # type: ignore[no-untyped-def]
    tokens, slots, scores, grouped, features, top_k: constexpr, block: constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < features
    row = tl.load(tokens + token * features + column, mask=inside, other=0.0)
    for k in tl.static_range(top_k):
        slot = tl.load(slots + token * top_k + k).to(tl.int64)
        value = row
        if scores is not None:
            value = row.to(tl.float32) * tl.load(scores + token * top_k + k)
        tl.store(grouped + slot * features + column, value, mask=inside & (slot >= 0))


@triton.jit(do_not_specialize=["num_rows"])
def _fill_kernel(  # type: ignore[no-untyped-def]
    copies, grouped, num_rows, features: constexpr, rows: constexpr, block: constexpr
):
    # Write zeros to padding rows. They are rare, so one program checks many rows.
    first = tl.program_id(0) * rows
    index = first + tl.arange(0, rows)
    copy = tl.load(copies + index, mask=index < num_rows, other=0)
    if tl.min(copy, 0) < 0:
        for offset in range(rows):
            row = (first + offset).to(tl.int64)
            if tl.load(copies + row, mask=row < num_rows, other=0) < 0:
                for start in range(0, features, block):
                    column = start + tl.arange(0, block)
                    zeros = tl.zeros((block,), dtype=tl.float32)
                    tl.store(grouped + row * features + column, zeros, mask=column < features)


@triton.jit
def _collect_kernel(  # type: ignore[no-untyped-def]
    grouped, slots, scores, base, tokens, features, top_k: constexpr, block: constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < features
    total = tl.zeros((block,), dtype=tl.float32)
    if base is not None:
        total += tl.load(base + token * features + column, mask=inside, other=0.0).to(tl.float32)
    for k in tl.static_range(top_k):
        slot = tl.load(slots + token * top_k + k).to(tl.int64)
        value = tl.load(grouped + slot * features + column, mask=inside & (slot >= 0), other=0.0)
        value = value.to(tl.float32)
        if scores is not None:
            value *= tl.load(scores + token * top_k + k)
        total += value
    tl.store(tokens + token * features + column, total, mask=inside)


@triton.jit
def _dot_kernel(  # type: ignore[no-untyped-def]
    tokens, grouped, slots, products, features: constexpr, top_k: constexpr, block: constexpr
):
    token = tl.program_id(0).to(tl.int64)
    for k in tl.static_range(top_k):
        slot = tl.load(slots + token * top_k + k).to(tl.int64)
        total = tl.zeros((block,), dtype=tl.float32)
        if slot >= 0:
            for start in range(0, features, block):
                column = start + tl.arange(0, block)
                inside = column < features
                left = tl.load(tokens + token * features + column, mask=inside, other=0.0)
                right = tl.load(grouped + slot * features + column, mask=inside, other=0.0)
                total += left.to(tl.float32) * right.to(tl.float32)
        tl.store(products + token * top_k + k, tl.sum(total))


def _block(features: int, limit: int) -> int:
    return min(int(triton.next_power_of_2(features)), limit)


def _ready(tensor: Tensor) -> Tensor:
    if isinstance(tensor, AsyncCollectiveTensor):
        # Wait for the pending collective: until it ends, Triton would get address 0 for its result.
        tensor = tensor.trigger_wait()
    return tensor.contiguous()


def _weights(scores: Tensor | None) -> Tensor | None:
    return None if scores is None else _ready(scores).float()


def count(experts: Tensor, num_experts: int) -> Tensor:
    """Return running counts of each expert's token copies, (experts, parts) int32.

    A part is 1,024 consecutive copies. Its count includes the copies in all earlier parts.
    """
    # Make one part even if there are no tokens: `plan_on_device` reads the last part's counts.
    parts = max(1, triton.cdiv(experts.numel(), _COPIES))
    counts = torch.empty(num_experts, parts, dtype=torch.int32, device=experts.device)
    _count_kernel[(parts,)](_ready(experts), counts, experts.numel(), num_experts, _COPIES)
    return counts.cumsum(1, dtype=torch.int32)


def place(
    experts: Tensor, sums: Tensor, sizes: Tensor, ends: Tensor, num_rows: int
) -> tuple[Tensor, Tensor]:
    """Assign each token copy, one per expert of the token, to a row of the padded expert groups.

    Returns `copies` (rows,) int32, the index of the copy in each row, and `slots` (tokens, top k)
    int32, the row of each copy. `sums` is the result of `count`.
    """
    copies = torch.full((num_rows,), -1, dtype=torch.int32, device=experts.device)
    slots = torch.empty(experts.shape, dtype=torch.int32, device=experts.device)
    given = _ready(experts), sums, sizes, ends, copies, slots
    _place_kernel[(sums.shape[1],)](*given, experts.numel(), len(sizes), _COPIES)
    return copies, slots


def take(values: Tensor, places: Tensor) -> Tensor:
    """Return flattened `values` at indices `places`, in the shape of `places`; 0 for index -1."""
    taken = values.new_empty(places.shape)
    parts = (triton.cdiv(places.numel(), _COPIES),)
    _take_kernel[parts](_ready(values), _ready(places), taken, places.numel(), _COPIES)
    return taken


def spread(
    tokens: Tensor, scores: Tensor | None, copies: Tensor, slots: Tensor, dtype: torch.dtype
) -> Tensor:
    """Copy tokens to their rows, scaled by scores; zero the padding. Return (rows, features)."""
    num_tokens, top_k = slots.shape
    features, num_rows = tokens.shape[1], copies.numel()
    grouped = tokens.new_empty(num_rows, features, dtype=dtype)
    block = _block(features, 2048)
    given = _ready(tokens), slots, _weights(scores), grouped
    _spread_kernel[num_tokens, triton.cdiv(features, block)](*given, features, top_k, block)
    parts = (triton.cdiv(num_rows, _ROWS),)
    _fill_kernel[parts](copies, grouped, num_rows, features, _ROWS, block)
    return grouped


def collect(
    grouped: Tensor, scores: Tensor | None, slots: Tensor, dtype: torch.dtype, base: Tensor | None
) -> Tensor:
    """Return `base` plus the sum of each token's rows, weighted by scores: (tokens, features)."""
    num_tokens, top_k = slots.shape
    features = grouped.shape[1]
    tokens = grouped.new_empty(num_tokens, features, dtype=dtype)
    block = _block(features, 2048)
    added = None if base is None else _ready(base)
    given = _ready(grouped), slots, _weights(scores), added, tokens
    _collect_kernel[num_tokens, triton.cdiv(features, block)](*given, features, top_k, block)
    return tokens


def dot(tokens: Tensor, grouped: Tensor, slots: Tensor) -> Tensor:
    """Return `tokens[i] @ grouped[slots[i, k]]` as (tokens, top k) float32; 0 if the slot is -1."""
    num_tokens, top_k = slots.shape
    products = torch.empty(num_tokens, top_k, dtype=torch.float32, device=tokens.device)
    given = _ready(tokens), _ready(grouped), slots, products
    features = tokens.shape[1]
    _dot_kernel[(num_tokens,)](*given, features, top_k, _block(features, 1024))
    return products


@triton.jit
def _activate_kernel(  # type: ignore[no-untyped-def]
    gate_up, scores, activations, hidden: constexpr, block: constexpr
):
    row = tl.program_id(0).to(tl.int64)
    score = tl.load(scores + row)
    for start in tl.static_range(0, hidden, block):
        column = start + tl.arange(0, block)
        inside = column < hidden
        gate = tl.load(gate_up + row * 2 * hidden + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up + (row * 2 + 1) * hidden + column, mask=inside, other=0.0)
        value = gate * tl.sigmoid(gate) * up.to(tl.float32) * score
        tl.store(activations + row * hidden + column, value, mask=inside)


@triton.jit
def _gradient_kernel(  # type: ignore[no-untyped-def]
    grad, gate_up, scores, grad_gate_up, grad_scores, hidden: constexpr, block: constexpr
):
    row = tl.program_id(0).to(tl.int64)
    score = tl.load(scores + row)
    total = tl.zeros((block,), dtype=tl.float32)
    for start in tl.static_range(0, hidden, block):
        column = start + tl.arange(0, block)
        inside = column < hidden
        left = row * 2 * hidden + column
        gate = tl.load(gate_up + left, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up + left + hidden, mask=inside, other=0.0).to(tl.float32)
        upstream = tl.load(grad + row * hidden + column, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        total += upstream * silu * up
        scored = upstream * score
        slope = sigmoid * (1 + gate * (1 - sigmoid))
        tl.store(grad_gate_up + left, scored * up * slope, mask=inside)
        tl.store(grad_gate_up + left + hidden, scored * silu, mask=inside)
    tl.store(grad_scores + row, tl.sum(total))


@triton.jit
def _cast_kernel(  # type: ignore[no-untyped-def]
    source, target, factor, base, size, source_stride, target_stride, base_stride, block: constexpr
):
    part = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * block + tl.arange(0, block)
    value = tl.load(source + part * source_stride + place, mask=place < size)
    if factor is not None:
        value *= tl.load(factor)
    if base is not None:
        there = tl.load(base + part * base_stride + place, mask=place < size)
        dtype = target.dtype.element_ty
        value = there.to(dtype) + value.to(dtype)
    tl.store(target + part * target_stride + place, value, mask=place < size)


def cast(source: Tensor, target: Tensor, factor: Tensor | None, base: Tensor | None) -> None:
    """Write `source * factor + base` to `target` in its dtype, all (..., rows, columns).

    They must be contiguous within a matrix; `factor` is a scalar of the device. PyTorch's own copy
    runs at half the speed when one of them is a slice of a larger tensor, and its product at a
    third when the dtypes differ.
    """
    matrices, size = source.shape[:-2].numel(), source.shape[-2:].numel()

    def stride(tensor: Tensor | None) -> int:
        return 0 if tensor is None or tensor.dim() == 2 else tensor.stride(0)

    strides = (stride(one) for one in (source, target, base))
    _cast_kernel[(triton.cdiv(size, 4096), matrices)](
        source, target, factor, base, size, *strides, 4096
    )


def activate(gate_up: Tensor, scores: Tensor) -> Tensor:
    """Return SwiGLU of `gate_up` (rows, 2 * hidden) times scores (rows, 1), as (rows, hidden)."""
    rows, hidden = len(gate_up), gate_up.shape[1] // 2
    activations = gate_up.new_empty(rows, hidden)
    _activate_kernel[(rows,)](gate_up, scores, activations, hidden, _block(hidden, 2048))
    return activations


def gradient(grad: Tensor, gate_up: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of `gate_up` and `scores`. `grad` is the gradient of the activations."""
    rows, hidden = grad.shape
    found = torch.empty_like(gate_up), torch.empty_like(scores)
    _gradient_kernel[(rows,)](grad, gate_up, scores, *found, hidden, _block(hidden, 2048))
    return found
