"""FP8 training that quantizes each tensor once, where it is made: the converters for Hopper.

TorchTitan's converter `quantize.grouped_mm.float8` wraps the experts' weights in TorchAO's tensor,
which quantizes both operands of each grouped GEMM anew. Here it marks the experts instead, and the
EP backends call `common/fp8.py` for them. Its `quantize.linear.float8` makes TorchAO's linear
layers, here `FP8Linear`, with the same scales as the experts.
"""

from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torchtitan.components.quantization import FP8_GROUP_ALIGNMENT_SIZE, QuantizationConverter
from torchtitan.components.quantization.utils import module_filter_fn
from torchtitan.models.moe.moe import GroupedExperts
from torchtitan.models.moe.utils import set_token_group_alignment_size_m
from torchtitan.protocols import model_converter
from torchtitan.tools.logging import logger

from cookbook.titan.common import fp8
from cookbook.titan.common.fp8 import Quantized, Weights
from cookbook.titan.common.weight_copies import is_alone, kept
from cookbook.titan.tt_0_2_2.versions import refuse


class FP8GroupedMMConverter(QuantizationConverter):
    """Marks the routed experts, so that their grouped GEMMs run in FP8."""

    experts: tuple[Any, ...] = ()

    def __init__(self, job_config: Any, parallel_dims: Any) -> None:
        super().__init__(job_config, parallel_dims)
        has_own_layer = job_config.parallelism.expert_parallel_comm_backend == "deepep"
        if not (has_own_layer or job_config.cookbook.row_kernels):
            # TorchTitan's own layer would train in BF16 without a word.
            raise refuse(
                "quantize.grouped_mm.float8 needs the row kernels; pass --cookbook.row_kernels"
            )
        fqns = job_config.quantize.grouped_mm.float8.fqns
        self.fqns = [fqns] if isinstance(fqns, str) else list(fqns)
        # A group's rows are the inner dimension of the weight gradient: whole 16-byte accesses.
        set_token_group_alignment_size_m(FP8_GROUP_ALIGNMENT_SIZE)

    def convert(self, model: nn.Module) -> None:
        experts = [
            module
            for name, module in model.named_modules()
            if isinstance(module, GroupedExperts) and any(one in name for one in self.fqns)
        ]
        for module in experts:
            module.cookbook_fp8 = True
        self.experts = tuple(experts) if is_alone() else ()
        logger.info(f"Grouped GEMMs of modules matching {self.fqns} use FP8")

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Quantize the new weights now, while the host is ahead of the GPU, if they can be kept."""
        for experts in self.experts:
            expert_weights(experts, [experts.w1, experts.w2, experts.w3])


class FP8LinearConverter(QuantizationConverter):
    """Makes linear layers `FP8Linear`, except those that match `filter_fqns`."""

    layers: tuple["FP8Linear", ...] = ()

    def __init__(self, job_config: Any, parallel_dims: Any) -> None:
        super().__init__(job_config, parallel_dims)
        options = job_config.quantize.linear.float8
        self.is_wanted = partial(module_filter_fn, filter_fqns=options.filter_fqns)

    def convert(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            if self.is_wanted(module, name):
                module.__class__ = FP8Linear
        if is_alone():
            self.layers = tuple(one for one in model.modules() if isinstance(one, FP8Linear))
            # Compiled layers cannot ask whether their weights have changed.
            model.register_forward_pre_hook(lambda *_: self.post_optimizer_hook(model))
        logger.info("Linear layers use FP8 with power-of-two scales")

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Quantize the weights that have changed now, if they can be kept.

        After an optimizer step the host is ahead of the GPU; in the next forward it is not.
        """
        for layer in self.layers:
            layer.keep()


def replace_float8_converters() -> None:
    """Replace TorchTitan's FP8 converters in its registry."""
    model_converter._registry_model_converter_cls.update(
        {
            "quantize.grouped_mm.float8": FP8GroupedMMConverter,
            "quantize.linear.float8": FP8LinearConverter,
        }
    )


def expert_weights(experts: Any, weights: list[Tensor]) -> Weights:
    """Return the experts' weights w1, w2 and w3 in FP8."""
    gate, down, up = (weight.detach() for weight in weights)
    return kept(
        experts, "cookbook_fp8_weights", weights, lambda: fp8.quantize_weights(gate, up, down)
    )


# torch.compile merges equal calls of these operators: layers that read one input quantize it once.
# The transposed copies are made within those of the backward, or it would make them in the forward,
# where the host has no time: it begins each step together with the GPU.
@torch.library.custom_op("cookbook::fp8_quantize", mutates_args=())
def _quantize(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    values, scales, group_scales = fp8.quantize(rows.unsqueeze(0))
    return values.squeeze(0), scales.squeeze(0), group_scales


@_quantize.register_fake
def _(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scales = rows.new_empty(len(rows), dtype=torch.float32)
    return torch.empty_like(rows, dtype=fp8.FP8), scales, scales.new_empty(1)


@torch.library.custom_op("cookbook::fp8_input_gradient", mutates_args=())
def _input_gradient(grad: list[Tensor], weight: list[Tensor]) -> Tensor:
    """Return the gradient of the input, (rows, in) in BF16, from the results of `_quantize`."""
    scales = weight[2].unsqueeze(1).expand(weight[0].shape[1], 1).contiguous()
    return _product(grad[0], _transposed(weight), grad[1].unsqueeze(1), scales, torch.bfloat16)


@_input_gradient.register_fake
def _(grad: list[Tensor], weight: list[Tensor]) -> Tensor:
    return grad[0].new_empty(len(grad[0]), weight[0].shape[1], dtype=torch.bfloat16)


@torch.library.custom_op("cookbook::fp8_weight_gradient", mutates_args=())
def _weight_gradient(grad: list[Tensor], rows: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the gradient of the weight, (out, in), from the results of `_quantize`."""
    left, right = _transposed(grad), _transposed(rows)
    return _product(left, right, grad[2].view(1, 1), rows[2].view(1, 1), dtype)


@_weight_gradient.register_fake
def _(grad: list[Tensor], rows: list[Tensor], dtype: torch.dtype) -> Tensor:
    return grad[0].new_empty(grad[0].shape[1], rows[0].shape[1], dtype=dtype)


def _transposed(quantized: list[Tensor]) -> Tensor:
    return fp8.transpose(Quantized(*quantized)).squeeze(0)


def _product(
    left: Tensor, right: Tensor, left_scales: Tensor, right_scales: Tensor, dtype: torch.dtype
) -> Tensor:
    """Multiply FP8 matrices (m, inner) and (n, inner), each with scales for its rows or for all."""
    if left.is_cuda:
        return torch._scaled_mm(
            left, right.t(), left_scales, right_scales.t(), out_dtype=dtype, use_fast_accum=True
        )
    product = (left.float() * left_scales) @ (right.float() * right_scales).t()
    return product.to(dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, *kept: Tensor) -> Tensor:
        quantized, of_weight = _quantize(rows), kept or _quantize(weight)
        ctx.save_for_backward(*quantized, *of_weight)
        ctx.dtypes = rows.dtype, weight.dtype
        left, scales = quantized[0], quantized[1].unsqueeze(1)
        return _product(left, of_weight[0], scales, of_weight[1].unsqueeze(1), torch.bfloat16)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        given = [*_quantize(grad)]
        by_rows = _input_gradient(given, [*saved[3:]])
        by_weight = _weight_gradient(given, [*saved[:3]], ctx.dtypes[1])
        unused = len(ctx.needs_input_grad) - 2
        return by_rows.to(ctx.dtypes[0]), by_weight, *[None] * unused


class FP8Linear(nn.Linear):
    """A linear layer without bias whose three GEMMs run in FP8."""

    quantized: tuple[Tensor, ...] = ()  # the result of `_quantize` of the weight, if it is kept

    def keep(self) -> None:
        """Quantize the weight, if its values have changed, for the forwards until the next step."""
        weight = self.weight
        self.quantized = kept(self, "cookbook_fp8", [weight], lambda: _quantize(weight.detach()))

    def forward(self, x: Any) -> Any:
        """Return x @ weight.T in BF16; under TP both are DTensors, as for `nn.Linear`."""
        weight: Any = self.weight
        if not isinstance(weight, DTensor):
            return self._multiply(x, weight)
        mesh, placements = weight.device_mesh, weight.placements
        last = Shard(x.dim() - 1)
        # The input's gradient and the output, by how the weight is placed on the TP ranks.
        by_weight = {
            Shard(0): (Partial(), last),
            Shard(1): (last, Partial()),
            Replicate(): (Replicate(), Replicate()),
        }
        x_grad, out = by_weight[placements[0]]
        local = self._multiply(
            x.to_local(grad_placements=(x_grad,)), weight.to_local(grad_placements=placements)
        )
        return DTensor.from_local(local, mesh, (out,), run_check=False)

    def _multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return _Linear.apply(rows, weight, *self.quantized).view(*x.shape[:-1], weight.shape[0])
