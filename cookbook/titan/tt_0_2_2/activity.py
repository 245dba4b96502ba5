"""What is active in this process: how its GEMMs quantize, how its tokens travel, what is corrected.

The model says which GEMMs quantize. Dispatches and corrections are noted by the code that runs.
Words are those of TorchAO and TorchTitan: a scaling type of the routed experts' grouped GEMMs
(`mxfp8`, `mxfp8_wgrad_with_hp`, `fp8_rowwise`), a kind of linear layers (`mx`, `float8`), `bf16`
for none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torchao.float8.float8_linear import Float8Linear
from torchao.prototype.moe_training.tensor import ScaledGroupedMMTensor
from torchao.prototype.mx_formats.mx_linear import MXLinear
from torchao.quantization.quantize_.common import KernelPreference
from torchtitan.models.moe.moe import GroupedExperts
from torchtitan.tools.utils import has_cuda_capability

# One training step makes both exchanges of the quantized all-to-all.
MXFP8_DISPATCH = "mxfp8 in the dispatch only"
MXFP8_COMBINE = "mxfp8 in the combine only"

# Filled while the code runs: which dispatch sent tokens, what moved their rows, how the loss was
# computed, what selective recomputation saved, which corrections were applied.
dispatches: set[str] = set()
rows: set[str] = set()
losses: set[str] = set()
saved: set[str] = set()
patches_applied: set[str] = set()


@dataclass(frozen=True)
class ModelActivity:
    """How the GEMMs of one rank's part of the model quantize.

    Attributes:
        grouped_gemms: the scaling types of its routed experts; empty where it has none.
        linear_layers: the kinds of its quantized linear layers; `bf16` where it has none.
        emulated: whether one of them multiplies in high precision.
    """

    grouped_gemms: frozenset[str]
    linear_layers: frozenset[str]
    emulated: bool


def words(found: Iterable[str]) -> str | None:
    """What was found, as one text; None for nothing."""
    return " and ".join(sorted(found)) or None


def observe_model(model_parts: Iterable[nn.Module]) -> ModelActivity:
    """Look at the weights and layers themselves, not at the options that made them."""
    modules = [module for part in model_parts for module in part.modules()]
    grouped, linear = set(_grouped_gemms(modules)), set(_quantized_linear_layers(modules))
    return ModelActivity(
        grouped_gemms=frozenset(scaling for scaling, _ in grouped),
        linear_layers=frozenset(kind for kind, _ in linear) or frozenset({"bf16"}),
        emulated=any(emulated for _, emulated in grouped | linear),
    )


def observe_dispatch() -> frozenset[str]:
    """How this rank sent tokens: `standard`, `deepep`, `mxfp8`; empty where it sent none."""
    both = {MXFP8_DISPATCH, MXFP8_COMBINE}
    return frozenset(dispatches - both | {"mxfp8"} if both <= dispatches else dispatches)


def casts_are_emulated() -> bool:
    """Whether the quantized all-to-all ran and cast with PyTorch operations, as below SM100."""
    quantized = bool(dispatches & {MXFP8_DISPATCH, MXFP8_COMBINE})
    return quantized and not has_cuda_capability(10, 0)


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter.data


def _grouped_gemms(modules: list[nn.Module]) -> Iterator[tuple[str, bool]]:
    """Scaling type and emulation of every routed expert weight."""
    for module in modules:
        if not isinstance(module, GroupedExperts):
            continue
        for parameter in module.parameters(recurse=False):
            weight = _local(parameter)
            # The for-loop over experts multiplies without torch._grouped_mm: nothing quantizes.
            if isinstance(weight, ScaledGroupedMMTensor) and module.use_grouped_mm:
                preference = weight.kernel_preference
                yield weight.scaling_type.value, preference == KernelPreference.EMULATED
            else:
                yield "bf16", False


def _quantized_linear_layers(modules: list[nn.Module]) -> Iterator[tuple[str, bool]]:
    """Kind and emulation of every quantized linear layer."""
    for module in modules:
        if isinstance(module, MXLinear):
            yield "mx", module.config.kernel_preference == KernelPreference.EMULATED
        elif isinstance(module, Float8Linear):
            yield "float8", bool(module.config.emulate)
