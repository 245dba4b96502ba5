"""MXFP8: the converters for grouped GEMMs and linear layers, and the EP backend `mxfp8_a2a`.

TorchTitan's converters `quantize.grouped_mm.mx` and `quantize.linear.mx` are replaced: the first
ignores `recipe_name`, and both refuse GPUs below SM100 although TorchAO can emulate MXFP8.

`mxfp8_a2a` is TorchTitan's standard backend with TorchAO's quantized all-to-all. The dispatch sends
MXFP8 in the forward and BF16 in the backward; the combine does the reverse. The receiver
dequantizes at once, so the grouped GEMMs may have any precision.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn as nn
import torchao.prototype.moe_training.ep.a2a_combine as a2a_combine
import torchao.prototype.moe_training.ep.a2a_dispatch as a2a_dispatch
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torchao.prototype.moe_training import scaled_grouped_mm
from torchao.prototype.moe_training.conversion_utils import MoEScalingType, MoETrainingConfig
from torchao.prototype.mx_formats.config import (
    MXFP8Dim1CastKernelChoice,
    MXLinearConfig,
    ScaleCalculationMode,
)
from torchao.prototype.mx_formats.mx_tensor import MXTensor, to_mx
from torchao.quantization import quantize_
from torchao.quantization.quantize_.common import KernelPreference
from torchtitan.components.quantization import MXFP8_GROUP_ALIGNMENT_SIZE, QuantizationConverter
from torchtitan.components.quantization.utils import module_filter_fn
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.expert_parallel import ExpertParallel
from torchtitan.models.moe.utils import _permute, _unpermute, set_token_group_alignment_size_m
from torchtitan.protocols import model_converter
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import has_cuda_capability

from cookbook.titan.tt_0_2_2 import activity
from cookbook.titan.tt_0_2_2.versions import refuse


class _Converter(QuantizationConverter):
    section: str  # the section of `quantize` that has this converter's options

    def __init__(self, job_config: JobConfig, parallel_dims: ParallelDims) -> None:
        super().__init__(job_config, parallel_dims)
        self.options: Any = getattr(job_config.quantize, self.section).mx
        self.emulate = self.options.emulate
        if not self.emulate and not has_cuda_capability(10, 0):
            raise refuse(
                "MXFP8 needs a GPU of SM100 (B200) or later; for numerics pass "
                f"--quantize.{self.section}.mx.emulate"
            )

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Do nothing, because each forward quantizes the weights again."""

    def log(self, converted: str) -> None:
        note = " (EMULATED: numerics only)" if self.emulate else ""
        logger.info(f"{converted} use {self.options.recipe_name}{note}")


class MXGroupedMMConverter(_Converter):
    """Replaces the experts' weights, so that their grouped GEMMs quantize operands to MXFP8."""

    section = "grouped_mm"

    def __init__(self, job_config: JobConfig, parallel_dims: ParallelDims) -> None:
        fqns = job_config.quantize.grouped_mm.mx.fqns
        if not fqns:
            raise refuse(
                "quantize.grouped_mm.mx.fqns is empty: the converter replaces no layer; pass "
                "--quantize.grouped_mm.mx.fqns=experts"
            )
        super().__init__(job_config, parallel_dims)
        self.fqns = [fqns] if isinstance(fqns, str) else list(fqns)
        if self.emulate:
            scaled_grouped_mm._emulated_mxfp8_scaled_grouped_mm_2d_2d = emulated_weight_gradient
        # Pad each expert's tokens to whole scale blocks of 32: in the weight gradient's GEMM, which
        # contracts over tokens, a block is 32 tokens.
        set_token_group_alignment_size_m(MXFP8_GROUP_ALIGNMENT_SIZE)

    def convert(self, model: nn.Module) -> None:
        preference = KernelPreference.EMULATED if self.emulate else KernelPreference.AUTO
        config = MoETrainingConfig(MoEScalingType(self.options.recipe_name), preference)
        quantize_(model, config, lambda _, fqn: any(target in fqn for target in self.fqns))
        self.log(f"Grouped GEMMs of modules matching {self.fqns}")


class MXLinearConverter(_Converter):
    """Replaces linear layers with TorchAO's MXLinear, except those that match `filter_fqns`."""

    section = "linear"

    def __init__(self, job_config: JobConfig, parallel_dims: ParallelDims) -> None:
        super().__init__(job_config, parallel_dims)
        self.config = MXLinearConfig.from_recipe_name(self.options.recipe_name)
        choice = self.options.mxfp8_dim1_cast_kernel_choice.upper()
        if self.emulate:
            self.config.kernel_preference, choice = KernelPreference.EMULATED, "TORCH"
        self.config.mxfp8_dim1_cast_kernel_choice = MXFP8Dim1CastKernelChoice[choice]

    def convert(self, model: nn.Module) -> None:
        kept = partial(module_filter_fn, filter_fqns=self.options.filter_fqns)
        quantize_(model, config=self.config, filter_fn=kept)
        self.log("Linear layers")


def emulated_weight_gradient(
    a_data: Tensor,  # (N, M) float8
    a_scale: Tensor,  # (N, M / block)
    b_data: Tensor,  # (M, K) float8
    b_scale: Tensor,  # (M / block, K)
    offs: Tensor,  # (groups,) int32, end of each group along M
    out_dtype: torch.dtype | None = torch.bfloat16,
    block_size: int = 32,
) -> Tensor:
    """Dequantize the operands, multiply in BF16, and return the weight gradient (groups, N, K).

    TorchAO's function with this signature loops over groups on the host, which does not compile.
    Each group must consist of whole blocks, so that no scale spans two groups.
    """
    rows, length = a_data.shape
    a = a_data.reshape(rows, length // block_size, block_size).to(torch.bfloat16)
    a = (a * a_scale.to(torch.bfloat16).unsqueeze(-1)).reshape(rows, length)
    columns = b_data.shape[1]
    b = b_data.t().reshape(columns, length // block_size, block_size).to(torch.bfloat16)
    b = (b * b_scale.to(torch.bfloat16).t().unsqueeze(-1)).reshape(columns, length).t()
    return torch._grouped_mm(a, b, offs=offs, out_dtype=out_dtype)


def replace_mx_converters() -> None:
    """Replace TorchTitan's MX converters in its registry."""
    model_converter._registry_model_converter_cls.update(
        {"quantize.grouped_mm.mx": MXGroupedMMConverter, "quantize.linear.mx": MXLinearConverter}
    )


def _cast_with_operations(
    values: Tensor, inner_block_size: int, scaling_mode: str
) -> tuple[Tensor, Tensor]:
    mode = ScaleCalculationMode(scaling_mode)
    scales, data = to_mx(values.contiguous(), torch.float8_e4m3fn, inner_block_size, mode)
    return data, scales


def _exchange_bytes(values: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Run an all-to-all that sends float8 as bytes, because gloo does not support float8."""
    if values.element_size() > 1:
        return all_to_all_single(values, *args, **kwargs)
    received = all_to_all_single(values.view(torch.uint8), *args, **kwargs)
    return torch.ops._c10d_functional.wait_tensor(received).view(values.dtype)


def _dequantized(values: MXTensor) -> Tensor:
    if casts_are_emulated():
        return values.dequantize()
    return scaled_grouped_mm._dequantize_if_mxtensor(values, 32)


def casts_are_emulated() -> bool:
    """Return whether this GPU must emulate MXFP8 casts; the all-to-all sends MXFP8 either way."""
    return not has_cuda_capability(10, 0)


class _Dispatch(a2a_dispatch._A2ADispatchMXFP8FwdHPBwd):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, *splits: Any) -> Tensor:
        received = a2a_dispatch._A2ADispatchMXFP8FwdHPBwd.forward(ctx, tokens, *splits)
        activity.dispatches.add(activity.MXFP8_DISPATCH)
        return _dequantized(received)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return a2a_dispatch._A2ADispatchMXFP8FwdHPBwd.backward(ctx, grad.contiguous())[:4]


class _Combine(a2a_combine._A2ACombineHPFwdMXFP8Bwd):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        grads = a2a_combine._A2ACombineHPFwdMXFP8Bwd.backward(ctx, grad.contiguous())
        activity.dispatches.add(activity.MXFP8_COMBINE)
        return _dequantized(grads[0]), *grads[1:4]


@dataclass(frozen=True)
class Precisions:
    """Whether the dispatch's forward sends MXFP8, and whether the combine's backward does."""

    dispatch_forward: bool
    combine_backward: bool

    @classmethod
    def of(cls, job_config: Any) -> "Precisions":
        options = job_config.parallelism
        return cls(
            options.expert_parallel_a2a_dispatch_fwd_precision == "mxfp8",
            options.expert_parallel_a2a_combine_bwd_precision == "mxfp8",
        )

    @property
    def any(self) -> bool:
        return self.dispatch_forward or self.combine_backward

    def send(self, rows: Tensor, here: list[int], there: list[int], group: Any) -> Tensor:
        """Send `there[i]` rows to rank i, which has their experts; get `here[i]` rows from it."""
        exchange = _Dispatch.apply if self.dispatch_forward else all_to_all_single_autograd
        return exchange(rows.contiguous(), here, there, group)

    def receive(self, rows: Tensor, there: list[int], here: list[int], group: Any) -> Tensor:
        """Undo `send`: the rows that came from rank i return there, and its own come back."""
        exchange = _Combine.apply if self.combine_backward else all_to_all_single_autograd
        return exchange(rows.contiguous(), there, here, group)


@torch.no_grad()
def exchange_counts(counts: Tensor, group: Any, ranks: int) -> tuple[Tensor, list[list[int]]]:
    """Return how many rows each rank sends to each local expert, (ranks * local experts,).

    Also return the all-to-all's [send, receive] splits. `counts` are this rank's rows by expert.
    """
    received = all_to_all_single(counts, None, None, group=group)
    received = torch.ops._c10d_functional.wait_tensor(received)
    # The only wait for the device: the host needs the splits to start the all-to-all.
    splits = [sizes.view(ranks, -1).sum(1) for sizes in (counts, received)]
    return received, torch.stack(splits).tolist()


class QuantizedExpertParallel(ExpertParallel):
    """TorchTitan's standard expert parallelism, with dispatch, combine or both in MXFP8."""

    def __init__(self, precisions: Precisions) -> None:
        super().__init__()
        self.precisions = precisions

    def _token_dispatch(self, mod: nn.Module, inputs: Any, device_mesh: DeviceMesh) -> Any:
        tokens, counts = inputs
        group, ranks = device_mesh.get_group(), device_mesh.size()
        found, (self.input_splits, self.output_splits) = exchange_counts(counts, group, ranks)
        received = self.precisions.send(tokens, self.output_splits, self.input_splits, group)
        self.input_shape, grouped, self.permuted_indices, sizes = _permute(
            received, found, ranks, counts.shape[0] // ranks
        )
        return grouped, sizes

    def _token_combine(self, mod: nn.Module, routed_output: Any, device_mesh: DeviceMesh) -> Any:
        tokens = _unpermute(routed_output, self.input_shape, self.permuted_indices)
        group = device_mesh.get_group()
        return self.precisions.receive(tokens, self.input_splits, self.output_splits, group)


def prepare_quantized_a2a() -> None:
    """Patch TorchAO's cast and all-to-all, each only if this machine does not support it."""
    for module in (a2a_dispatch, a2a_combine):
        if casts_are_emulated():
            module.triton_to_mxfp8_dim0 = _cast_with_operations
        if not torch.cuda.is_available():
            module.all_to_all_single = _exchange_bytes
