"""The EP backend `mxfp8_a2a`: TorchTitan's standard one, with TorchAO's quantized all-to-all.

The dispatch sends MXFP8 in the forward and BF16 in the backward, the combine the other way around.
What arrives is dequantized at once, so the grouped GEMMs may have any precision. MXFP8 ones lose
nothing by this: a value that has been rounded to its block's scale is rounded to itself again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torchao.prototype.moe_training.ep.a2a_combine as a2a_combine
import torchao.prototype.moe_training.ep.a2a_dispatch as a2a_dispatch
from torch.distributed._functional_collectives import (
    all_to_all_single,
    all_to_all_single_autograd,
)
from torch.distributed.device_mesh import DeviceMesh
from torchao.prototype.moe_training.scaled_grouped_mm import _dequantize_if_mxtensor
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import MXTensor, to_mx
from torchtitan.distributed.expert_parallel import ExpertParallel
from torchtitan.models.moe.utils import _permute, _unpermute
from torchtitan.tools.utils import has_cuda_capability

from cookbook.titan.tt_0_2_2 import activity

BLOCK = 32


def _cast_with_operations(
    values: torch.Tensor, inner_block_size: int, scaling_mode: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """TorchAO's cast kernel, which needs SM100, as PyTorch operations for any device."""
    scales, data = to_mx(
        values.contiguous(),
        torch.float8_e4m3fn,
        inner_block_size,
        ScaleCalculationMode(scaling_mode),
    )
    return data, scales


def _exchange_bytes(values: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """An all-to-all of float8 as bytes, for gloo, which does not know the type."""
    if values.element_size() > 1:
        return all_to_all_single(values, *args, **kwargs)
    received = all_to_all_single(values.view(torch.uint8), *args, **kwargs)
    return torch.ops._c10d_functional.wait_tensor(received).view(values.dtype)


def _dequantized(values: Any) -> torch.Tensor:
    if isinstance(values, MXTensor) and not emulated():
        return _dequantize_if_mxtensor(values, BLOCK)
    return values.dequantize() if isinstance(values, MXTensor) else values


def emulated() -> bool:
    """Whether the casts are PyTorch operations here; the exchange is of MXFP8 all the same."""
    return not has_cuda_capability(10, 0)


class _Dispatch(a2a_dispatch._A2ADispatchMXFP8FwdHPBwd):
    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, output_splits: Any, input_splits: Any, group: Any
    ) -> torch.Tensor:
        received = a2a_dispatch._A2ADispatchMXFP8FwdHPBwd.forward(
            ctx, tokens, output_splits, input_splits, group
        )
        activity.dispatches.add(activity.MXFP8_DISPATCH)
        return _dequantized(received)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        grads = a2a_dispatch._A2ADispatchMXFP8FwdHPBwd.backward(ctx, grad.contiguous())
        return grads[:4]


class _Combine(a2a_combine._A2ACombineHPFwdMXFP8Bwd):
    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, output_splits: Any, input_splits: Any, group: Any
    ) -> torch.Tensor:
        return a2a_combine._A2ACombineHPFwdMXFP8Bwd.forward(
            ctx, tokens.contiguous(), output_splits, input_splits, group
        )

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        grads = a2a_combine._A2ACombineHPFwdMXFP8Bwd.backward(ctx, grad.contiguous())
        activity.dispatches.add(activity.MXFP8_COMBINE)
        return _dequantized(grads[0]), *grads[1:4]


@dataclass(frozen=True)
class Precisions:
    """Which of the two exchanges quantize."""

    dispatch_forward: bool
    combine_backward: bool

    @classmethod
    def of(cls, job_config: Any) -> Precisions:
        options = job_config.parallelism
        return cls(
            options.expert_parallel_a2a_dispatch_fwd_precision == "mxfp8",
            options.expert_parallel_a2a_combine_bwd_precision == "mxfp8",
        )

    @property
    def any(self) -> bool:
        return self.dispatch_forward or self.combine_backward


def send(
    precisions: Precisions, rows: torch.Tensor, here: list[int], there: list[int], group: Any
) -> torch.Tensor:
    """Rows to their experts' ranks: `there` to each rank, `here` from each."""
    exchange = _Dispatch.apply if precisions.dispatch_forward else all_to_all_single_autograd
    received: torch.Tensor = exchange(rows.contiguous(), here, there, group)
    return received


def receive(
    precisions: Precisions, rows: torch.Tensor, there: list[int], here: list[int], group: Any
) -> torch.Tensor:
    """The way back of what `send` brought."""
    exchange = _Combine.apply if precisions.combine_backward else all_to_all_single_autograd
    returned: torch.Tensor = exchange(rows.contiguous(), there, here, group)
    return returned


class QuantizedExpertParallel(ExpertParallel):
    """TorchTitan's standard expert parallelism with one or both exchanges in MXFP8."""

    def __init__(self, precisions: Precisions) -> None:
        super().__init__()
        self.precisions = precisions

    def _token_dispatch(self, mod: nn.Module, inputs: Any, device_mesh: DeviceMesh) -> Any:
        tokens, counts = inputs
        group, ranks = device_mesh.get_group(), device_mesh.size()
        with torch.no_grad():
            received_counts = all_to_all_single(counts, None, None, group=group)
            received_counts = torch.ops._c10d_functional.wait_tensor(received_counts)
            # One wait for the device, as in the class above: splits must be known on the host.
            splits = torch.stack(
                [sizes.view(ranks, -1).sum(1) for sizes in (counts, received_counts)]
            ).tolist()
            self.input_splits, self.output_splits = splits
        received = send(self.precisions, tokens, self.output_splits, self.input_splits, group)
        self.input_shape, grouped, self.permuted_indices, sizes = _permute(
            received, received_counts, ranks, counts.shape[0] // ranks
        )
        return grouped, sizes

    def _token_combine(self, mod: nn.Module, routed_output: Any, device_mesh: DeviceMesh) -> Any:
        if not self.precisions.combine_backward:
            return super()._token_combine(mod, routed_output, device_mesh)
        tokens = _unpermute(routed_output, self.input_shape, self.permuted_indices)
        return _Combine.apply(
            tokens, self.input_splits, self.output_splits, device_mesh.get_group()
        )


def prepare_quantized_a2a() -> None:
    """Replace what TorchAO's exchange calls, where this machine lacks it.

    No door: TorchAO's functions call their cast and their exchange by name.
    """
    for module in (a2a_dispatch, a2a_combine):
        if emulated():
            module.triton_to_mxfp8_dim0 = _cast_with_operations
        if not torch.cuda.is_available():
            module.all_to_all_single = _exchange_bytes
