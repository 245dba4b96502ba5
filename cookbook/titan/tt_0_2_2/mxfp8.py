"""The model converters for MXFP8, `quantize.grouped_mm.mx` and `quantize.linear.mx`.

TorchTitan's own converters of these names ignore `recipe_name` of the grouped GEMMs, and refuse all
GPUs below SM100, although TorchAO has both the recipe and an emulated mode.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torchtitan.components.quantization import MXFP8_GROUP_ALIGNMENT_SIZE, QuantizationConverter
from torchtitan.components.quantization.utils import module_filter_fn
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.moe.utils import set_token_group_alignment_size_m
from torchtitan.protocols import model_converter
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import has_cuda_capability

from cookbook.titan.tt_0_2_2.versions import refuse


class MXGroupedMMConverter(QuantizationConverter):
    """Replaces the experts' weights, so that their grouped GEMMs quantize operands to MXFP8."""

    def __init__(self, job_config: JobConfig, parallel_dims: ParallelDims) -> None:
        from torchao.prototype.moe_training import scaled_grouped_mm

        super().__init__(job_config, parallel_dims)
        options: Any = job_config.quantize.grouped_mm.mx
        if not options.fqns:
            raise refuse(
                "model.converters has quantize.grouped_mm.mx, but quantize.grouped_mm.mx.fqns is "
                "empty; pass --quantize.grouped_mm.mx.fqns=experts"
            )
        _check_hardware(options.emulate, "quantize.grouped_mm.mx.emulate")
        self.fqns = [options.fqns] if isinstance(options.fqns, str) else list(options.fqns)
        self.recipe_name = options.recipe_name
        self.emulate = options.emulate
        if self.emulate:
            # No door: TorchAO calls its emulation by name.
            scaled_grouped_mm._emulated_mxfp8_scaled_grouped_mm_2d_2d = emulated_weight_gradient
        # MXFP8 scales run over 32 elements, and the weight gradient's GEMM contracts over tokens.
        set_token_group_alignment_size_m(MXFP8_GROUP_ALIGNMENT_SIZE)

    def convert(self, model: nn.Module) -> None:
        from torchao.prototype.moe_training.conversion_utils import (
            MoEScalingType,
            MoETrainingConfig,
        )
        from torchao.quantization.quant_api import quantize_
        from torchao.quantization.quantize_.common import KernelPreference

        config = MoETrainingConfig(
            scaling_type=MoEScalingType(self.recipe_name),
            kernel_preference=(
                KernelPreference.EMULATED if self.emulate else KernelPreference.AUTO
            ),
        )
        quantize_(model, config=config, filter_fn=self._is_target)
        logger.info(
            f"Grouped GEMMs of modules matching {self.fqns} use {self.recipe_name}"
            + (" (EMULATED: numerics only)" if self.emulate else "")
        )

    def _is_target(self, module: nn.Module, fqn: str) -> bool:
        return any(target in fqn for target in self.fqns)

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Quantization is dynamic: nothing is kept from step to step."""


class MXLinearConverter(QuantizationConverter):
    """Turns the linear layers that `filter_fqns` leaves into TorchAO's MXLinear."""

    def __init__(self, job_config: JobConfig, parallel_dims: ParallelDims) -> None:
        from torchao.prototype.mx_formats.config import MXFP8Dim1CastKernelChoice, MXLinearConfig
        from torchao.quantization.quantize_.common import KernelPreference

        super().__init__(job_config, parallel_dims)
        options: Any = job_config.quantize.linear.mx
        _check_hardware(options.emulate, "quantize.linear.mx.emulate")
        compiled = job_config.compile.enable and "model" in job_config.compile.components
        if compiled and parallel_dims.tp_enabled and not options.emulate:
            # Emulated casts are plain operations on DTensors and compile. TorchAO's SM100 casts are
            # operations of its own; TorchTitan says that they do not compile under TP.
            raise refuse(
                "MXFP8 linear layers under tensor parallelism do not compile with TorchAO 0.16's "
                "SM100 kernels; leave out --compile.enable, set --compile.components=loss, or use "
                "--parallelism.tensor_parallel_degree=1"
            )
        config = MXLinearConfig.from_recipe_name(options.recipe_name)
        if options.emulate:
            # The recipe keeps its way of choosing scales; only the kernels are replaced.
            config = replace(
                config,
                kernel_preference=KernelPreference.EMULATED,
                mxfp8_dim1_cast_kernel_choice=MXFP8Dim1CastKernelChoice.TORCH,
            )
        else:
            choice = options.mxfp8_dim1_cast_kernel_choice.upper()
            config.mxfp8_dim1_cast_kernel_choice = MXFP8Dim1CastKernelChoice[choice]
        self.config = config
        self.emulate = options.emulate
        self.recipe_name = options.recipe_name
        self.filter_fn = partial(module_filter_fn, filter_fqns=options.filter_fqns)

    def convert(self, model: nn.Module) -> None:
        from torchao.quantization import quantize_

        quantize_(model, config=self.config, filter_fn=self.filter_fn)
        logger.info(
            f"Linear layers use {self.recipe_name}"
            + (" (EMULATED: numerics only)" if self.emulate else "")
        )

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Quantization is dynamic: nothing is kept from step to step."""


def emulated_weight_gradient(
    a_data: torch.Tensor,
    a_scale: torch.Tensor,
    b_data: torch.Tensor,
    b_scale: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype | None = torch.bfloat16,
    block_size: int = 32,
) -> torch.Tensor:
    """Dequantize both operands and multiply in BF16, group by group along the contraction.

    Takes the place of TorchAO's function of the same signature, which loops over the groups on the
    host: it waits for the device in every call, and does not compile. Groups are whole blocks, so
    that no scale belongs to two groups and the operands can be dequantized at once.

    Args:
        a_data: (N, M) float8, its scales (N, M / block) along the rows of all groups.
        b_data: (M, K) float8, its scales (M / block, K).
        offs: (groups,) int32, where each group ends in M.

    Returns:
        (groups, N, K).
    """
    rows, length = a_data.shape
    a = a_data.reshape(rows, length // block_size, block_size).to(torch.bfloat16)
    a = (a * a_scale.to(torch.bfloat16).unsqueeze(-1)).reshape(rows, length)
    columns = b_data.shape[1]
    b = b_data.t().reshape(columns, length // block_size, block_size).to(torch.bfloat16)
    b = (b * b_scale.to(torch.bfloat16).t().unsqueeze(-1)).reshape(columns, length).t()
    return torch._grouped_mm(a, b, offs=offs, out_dtype=out_dtype)


def _check_hardware(emulate: bool, option: str) -> None:
    if not emulate and not has_cuda_capability(10, 0):
        raise refuse(f"MXFP8 needs a GPU of SM100 (B200) or later; for numerics pass --{option}")


def replace_mx_converters() -> None:
    """Put both classes where TorchTitan looks converters up; its own stay unused.

    No door: `register_model_converter` refuses a name that is taken, and recipes use TorchTitan's
    names. A job of another model family does not come here.
    """
    registry: dict[str, Any] = model_converter._registry_model_converter_cls
    for name, converter in (
        ("quantize.grouped_mm.mx", MXGroupedMMConverter),
        ("quantize.linear.mx", MXLinearConverter),
    ):
        assert name in registry, name
        registry[name] = converter
