"""Faults in what computes: attention, GEMMs of linear layers and of experts, the loss in chunks."""

from __future__ import annotations

from typing import Any

import torch

from tests.self_check_fault import (
    AO,
    CHUNKS,
    EP2,
    FLASH,
    FLEX,
    FLOAT8,
    LOSS,
    MXFP8,
    STACK,
    TP2,
    WGRAD_HP,
    Fault,
    Wrapper,
    halves_swapped,
    instead,
    neighbours,
    neighbours_scales,
    with_argument,
    with_gradient,
    with_result,
    without_rows,
)

_OPERATOR = "cookbook.titan.common.varlen_attention.varlen_attention"
_GROUPED = "torch._grouped_mm"


def without_one_document(cu_seqlens: torch.Tensor) -> torch.Tensor:
    return torch.cat([cu_seqlens[:1], cu_seqlens[2:], cu_seqlens[-1:]])


def first_scale_doubled(made: tuple[torch.Tensor, torch.Tensor]) -> Any:
    """Of `to_mx`: the scales (a power of two each) and the data; one block of each row."""
    scale, data = made
    values = scale.float()
    values[..., 0] *= 2
    return values.to(scale.dtype), data


def ignored_counted(passes: tuple[Any, Any]) -> tuple[Any, Any]:
    """Both passes over the logits, of which the second gives ignored tokens a gradient."""
    first, second = passes

    def faulty(logits: Any, columns: Any, lse: Any) -> None:
        second(logits, columns, lse.masked_fill(lse.isinf(), 5.0))

    return first, faulty


def _never_added(original: Any) -> Wrapper:
    return lambda out, left, right, add: original(out, left, right, add=False)


def _by_one_rank(original: Any) -> Wrapper:
    return lambda chunks, statistics: statistics


class _Plain(torch.autograd.Function):
    """A grouped GEMM that takes quantized weights' own data and quantizes nothing."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b_t: Any, offs: torch.Tensor) -> torch.Tensor:
        data = getattr(b_t, "_data", b_t)
        ctx.save_for_backward(a, data, offs)
        return torch._grouped_mm(a, data, offs=offs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        a, data, offs = ctx.saved_tensors
        with torch.enable_grad():
            leaves = [value.detach().requires_grad_() for value in (a, data)]
            out = torch._grouped_mm(*leaves, offs=offs)
        return (*torch.autograd.grad(out, leaves, grad), None)


def _high_precision(a: Any, b_t: Any, offs: Any, *args: Any, **kwargs: Any) -> Any:
    return _Plain.apply(a, b_t, offs)


def _not_causal(original: Any) -> Wrapper:
    return lambda *args, **kwargs: original(*args, **kwargs, is_causal=False)


def _recipe_ignored(original: Any) -> Wrapper:
    return lambda *args, **kwargs: original(*args, **kwargs | {"wgrad_with_hp": False})


COMPUTING = (
    Fault(
        "scale of the scores off by 10%",
        "flash_attention_4",
        FLASH,
        _OPERATOR,
        with_argument(5, lambda scale: scale * 1.1),
    ),
    Fault(
        "two documents taken for one",
        "flash_attention_4",
        FLASH,
        _OPERATOR,
        with_argument(3, without_one_document),
    ),
    Fault(
        "one sequence's keys read for another's",
        "flash_attention_4",
        FLASH,
        _OPERATOR,
        with_argument(1, halves_swapped),
    ),
    Fault(
        "last rows of dq not written",
        "flash_attention_4",
        FLASH,
        _OPERATOR,
        with_gradient(0, without_rows(slice(-5, None))),
    ),
    Fault(
        "dk of one head scaled",
        "flash_attention_4",
        FLASH,
        _OPERATOR,
        with_gradient(
            1,
            lambda dk: (
                dk
                * (
                    1 + 0.2 * torch.eye(2, device=dk.device)[0, :, None]
                    if dk.shape[1] == 2
                    else 1.2
                )
            ),
        ),
    ),
    Fault(
        "dv of another head", "flash_attention_4", FLASH, _OPERATOR, with_gradient(2, neighbours(1))
    ),
    Fault(
        "output holds NaN",
        "flash_attention_4",
        FLASH,
        _OPERATOR,
        with_result(
            lambda out: torch.where(
                torch.arange(len(out), device=out.device)[:, None, None] == 3, torch.nan, out
            )
        ),
    ),
    Fault(
        "documents not masked",
        "flex",
        FLEX,
        f"{STACK}.reference_attention.get_document_mask_mod",
        instead(lambda *batch: lambda b, h, q, k: q >= k),
    ),
    Fault(
        "later tokens not masked",
        "sdpa",
        (),
        "torchtitan.models.attention.ScaledDotProductAttentionWrapper.forward",
        _not_causal,
    ),
    Fault(
        "a linear layer's output row lost",
        "linear layer bf16",
        (),
        "torch.nn.Linear.forward",
        with_result(without_rows(slice(-9, -8))),
    ),
    Fault(
        "an output row lost",
        "grouped GEMM bf16",
        (),
        _GROUPED,
        with_result(without_rows(slice(-9, -8))),
    ),
    Fault(
        "an input gradient's row lost",
        "grouped GEMM bf16",
        (),
        _GROUPED,
        with_gradient(0, without_rows(slice(-9, -8))),
    ),
    Fault(
        "the weight of the next expert",
        "grouped GEMM bf16",
        (),
        _GROUPED,
        with_argument(1, neighbours(0)),
    ),
    Fault(
        "an expert's weight gradient halved",
        "grouped GEMM bf16",
        (),
        _GROUPED,
        with_gradient(
            1,
            lambda dw: (
                dw
                * torch.where(torch.arange(len(dw), device=dw.device) == len(dw) - 1, 0.5, 1)[
                    :, None, None
                ].to(dw.dtype)
            ),
        ),
    ),
    Fault(
        "scale of one block doubled",
        "grouped GEMM mxfp8",
        MXFP8,
        f"{AO}.to_mx",
        with_result(first_scale_doubled),
    ),
    Fault(
        "scale of the neighbouring block",
        "grouped GEMM mxfp8",
        MXFP8,
        f"{AO}.to_mx",
        with_result(neighbours_scales),
    ),
    Fault(
        "weight gradients of the next expert",
        "grouped GEMM mxfp8",
        MXFP8,
        f"{STACK}.mxfp8.emulated_weight_gradient",
        with_result(neighbours(0)),
    ),
    Fault(
        "nothing quantized",
        "grouped GEMM mxfp8",
        MXFP8,
        "torchao.prototype.moe_training.tensor._quantize_then_scaled_grouped_mm",
        instead(_high_precision),
    ),
    Fault(
        "the weight gradient's recipe ignored",
        "grouped GEMM mxfp8_wgrad_with_hp",
        WGRAD_HP,
        f"{AO}._to_mxfp8_then_scaled_grouped_mm",
        _recipe_ignored,
    ),
    Fault(
        "scale of one block doubled in linear layers",
        "linear layer mx",
        MXFP8,
        "torchao.prototype.mx_formats.mx_tensor.to_mx",
        with_result(first_scale_doubled),
    ),
    Fault(
        "chunks' weight gradients not summed",
        "loss in chunks",
        CHUNKS,
        f"{LOSS}._multiply",
        _never_added,
    ),
    Fault(
        "ignored labels get a gradient",
        "loss in chunks",
        CHUNKS,
        f"{LOSS}._passes",
        with_result(ignored_counted),
    ),
    Fault(
        "one TP rank's words alone",
        "loss in chunks",
        (*CHUNKS, *TP2, *EP2),
        f"{LOSS}._Chunks._over_ranks",
        _by_one_rank,
    ),
    Fault(
        "scales of the next row in FP8",
        "grouped GEMM fp8_rowwise",
        FLOAT8,
        f"{AO}.tensor_to_scale",
        with_result(neighbours(0)),
        gpu_only=True,
    ),
    Fault(
        "a weight gradient's scales of the next group in FP8",
        "grouped GEMM fp8_rowwise",
        FLOAT8,
        f"{AO}.triton_fp8_per_group_colwise_scales",
        with_result(lambda made: (made[0], made[1].roll(1, 0))),
        gpu_only=True,
    ),
)
