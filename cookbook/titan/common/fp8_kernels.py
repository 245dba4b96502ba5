"""Triton kernels that quantize rows to FP8 (e4m3) where they are made, and transpose them.

A row has its own scale, a power of two, so one pass reads it and writes it in FP8. The weight
gradient contracts over rows and cannot have a scale a row: it reads a transposed copy with one
scale a group of rows. Between powers of two this changes exponents only, so the transposed copy is
made from the FP8 rows, and the values in high precision are read once. Values of rows that are far
below their group's largest may become subnormal there.

A scale is the factor that restores the values: `row.float() * scale`. A row that is not finite gets
the scale NaN. `fp8.py` has PyTorch equivalents for CPUs. Atomic maxima do not depend on the order.
"""

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

FP8 = torch.float8_e4m3fn


@triton.jit
def _exponent(largest):  # type: ignore[no-untyped-def]
    # The largest k with largest * 2**k <= 448 = 1.75 * 2**8, e4m3's maximum.
    bits = largest.to(tl.int32, bitcast=True)
    k = 8 - ((bits >> 23) - 127) - ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    # A row of zeros must not raise the scale of its group.
    return tl.where(largest > 0, tl.minimum(tl.maximum(k, -100), 100), 100)


@triton.jit
def _two_to(k):  # type: ignore[no-untyped-def]
    return ((k + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _scale(k, largest):  # type: ignore[no-untyped-def]
    return tl.where(largest < float("inf"), _two_to(-k), float("nan"))


@triton.jit
def _quantize_kernel(  # type: ignore[no-untyped-def]
    rows, values, scales, group_scales, columns, part, stride, first, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    group = row // part
    target = group * stride + first + row % part
    column = tl.arange(0, block)
    inside = column < columns
    value = tl.load(rows + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(value), 0)
    k = _exponent(largest)
    scale = _scale(k, largest)
    quantized = (value * _two_to(k)).to(tl.float8e4nv)
    tl.store(values + target * columns + column, quantized, mask=inside)
    tl.store(scales + target, scale)
    tl.atomic_max(group_scales + group, scale, sem="relaxed")


@triton.jit
def _activate_kernel(  # type: ignore[no-untyped-def]
    gate_up, scores, groups, values, scales, group_scales, num_groups, hidden, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.load(groups + row)
    if group < num_groups:
        column = tl.arange(0, block)
        inside = column < hidden
        left = gate_up + row * 2 * hidden + column
        gate = tl.load(left, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(left + hidden, mask=inside, other=0.0).to(tl.float32)
        value = gate * tl.sigmoid(gate) * up * tl.load(scores + row)
        largest = tl.max(tl.abs(value), 0)
        k = _exponent(largest)
        scale = _scale(k, largest)
        quantized = (value * _two_to(k)).to(tl.float8e4nv)
        tl.store(values + row * hidden + column, quantized, mask=inside)
        tl.store(scales + row, scale)
        tl.atomic_max(group_scales + group, scale, sem="relaxed")


@triton.jit
def _gradient_kernel(  # type: ignore[no-untyped-def]
    grad,
    gate_up,
    scores,
    groups,
    values,
    scales,
    group_scales,
    grad_scores,
    num_groups,
    hidden,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.load(groups + row)
    if group < num_groups:
        column = tl.arange(0, block)
        inside = column < hidden
        left = row * 2 * hidden + column
        gate = tl.load(gate_up + left, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up + left + hidden, mask=inside, other=0.0).to(tl.float32)
        upstream = tl.load(grad + row * hidden + column, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        tl.store(grad_scores + row, tl.sum(upstream * silu * up, 0))
        scored = upstream * tl.load(scores + row)
        by_gate = scored * up * sigmoid * (1 + gate * (1 - sigmoid))
        by_up = scored * silu
        largest = tl.max(tl.maximum(tl.abs(by_gate), tl.abs(by_up)), 0)
        k = _exponent(largest)
        scale, factor = _scale(k, largest), _two_to(k)
        tl.store(values + left, (by_gate * factor).to(tl.float8e4nv), mask=inside)
        tl.store(values + left + hidden, (by_up * factor).to(tl.float8e4nv), mask=inside)
        tl.store(scales + row, scale)
        tl.atomic_max(group_scales + group, scale, sem="relaxed")
    else:
        tl.store(grad_scores + row, 0.0)


@triton.jit
def _transpose_kernel(  # type: ignore[no-untyped-def]
    values,
    scales,
    group_scales,
    copies,
    groups,
    transposed,
    num_rows,
    num_groups,
    columns,
    top_k: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    part = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    column = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)
    inside = row < num_rows
    source = part * num_rows + row
    if copies is not None:
        copy = tl.load(copies + row, mask=inside, other=-1)
        inside = inside & (copy >= 0)
        source = (copy // top_k).to(tl.int64)
    if groups is not None:
        group = tl.load(groups + row, mask=inside, other=num_groups)
        inside = inside & (group < num_groups)
        group = tl.where(inside, group, 0)
    else:
        group = tl.zeros((tile_rows,), tl.int64) + part
    group_scale = tl.load(group_scales + group)
    factor = tl.load(scales + source, mask=inside, other=0.0) / tl.where(
        group_scale > 0, group_scale, 1.0
    )
    mask = inside[:, None] & (column < columns)[None, :]
    place = source[:, None] * columns + column[None, :]
    value = tl.load(values + place, mask=mask, other=0.0).to(tl.float32) * factor[:, None]
    out = (part * columns + column[:, None]) * num_rows + row[None, :]
    there = (column < columns)[:, None] & (row < num_rows)[None, :]
    tl.store(transposed + out, tl.trans(value.to(tl.float8e4nv)), mask=there)


def _block(columns: int) -> int:
    return int(triton.next_power_of_2(columns))


def _warps(block: int) -> int:
    return min(16, max(4, block // 1024))


def quantize(
    rows: Tensor, values: Tensor, scales: Tensor, group_scales: Tensor, first: int = 0
) -> None:
    """Quantize `rows` (groups, rows, columns) into rows `first` and on of each group of `values`.

    `values` is (groups, at least as many rows, columns) in FP8, `scales` (groups, rows of values)
    float32. `group_scales` (groups,) is raised to the largest scale of each group.
    """
    groups, part, columns = rows.shape
    block = _block(columns)
    _quantize_kernel[(groups * part,)](
        rows, values, scales, group_scales, columns, part, values.shape[1], first, block,
        num_warps=_warps(block),
    )  # fmt: skip


def activate(
    gate_up: Tensor, scores: Tensor, groups: Tensor, group_scales: Tensor
) -> tuple[Tensor, ...]:
    """Return SwiGLU of `gate_up` (rows, 2 * hidden) times scores, in FP8, and its scales (rows,).

    Rows whose group is `len(group_scales)` are not written.
    """
    rows, hidden = len(gate_up), gate_up.shape[1] // 2
    values = gate_up.new_empty(rows, hidden, dtype=FP8)
    scales = torch.empty(rows, dtype=torch.float32, device=gate_up.device)
    block = _block(hidden)
    _activate_kernel[(rows,)](
        gate_up, scores, groups, values, scales, group_scales, len(group_scales), hidden, block,
        num_warps=_warps(block),
    )  # fmt: skip
    return values, scales


def gradient(
    grad: Tensor, gate_up: Tensor, scores: Tensor, groups: Tensor, group_scales: Tensor
) -> tuple[Tensor, ...]:
    """Return the gradient of `gate_up` in FP8, its scales (rows,), and the gradient of `scores`."""
    rows, hidden = grad.shape
    values = torch.empty_like(gate_up, dtype=FP8)
    scales = torch.empty(rows, dtype=torch.float32, device=grad.device)
    grad_scores = torch.empty_like(scores)
    block = _block(hidden)
    _gradient_kernel[(rows,)](
        grad, gate_up, scores, groups, values, scales, group_scales, grad_scores,
        len(group_scales), hidden, block, num_warps=_warps(block),
    )  # fmt: skip
    return values, scales, grad_scores


def transpose(
    values: Tensor,
    scales: Tensor,
    group_scales: Tensor,
    groups: Tensor | None = None,
    copies: Tensor | None = None,
    top_k: int = 1,
    tile: tuple[int, int, int] = (128, 128, 4),
) -> Tensor:
    """Return FP8 rows (parts, rows, columns) as (parts, columns, rows) under one scale a group.

    The group of a row is its part, or `groups` (rows,) where there is one part; a row of the group
    `len(group_scales)` becomes zeros. With `copies` (rows,), row i is row `copies[i] // top_k` of
    `values`; -1 stands for zeros.
    """
    parts, num_rows, columns = values.shape
    if copies is not None:
        num_rows = len(copies)
    transposed = values.new_empty(parts, columns, num_rows)
    rows, width, warps = tile
    grid = triton.cdiv(num_rows, rows), triton.cdiv(columns, width), parts
    _transpose_kernel[grid](
        values, scales, group_scales, copies, groups, transposed, num_rows, len(group_scales),
        columns, top_k, rows, width, num_warps=warps,
    )  # fmt: skip
    return transposed
