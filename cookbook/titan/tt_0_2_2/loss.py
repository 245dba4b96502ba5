"""The loss without whole logits: the output layer hands its input on, and the loss multiplies.

TorchTitan's Trainer gives a model's output and the labels to a loss function, which is two doors:
the output layer returns the hidden states that it got, with its weight at hand, and the loss
function computes both (`common/chunked_loss.py`). A pipeline's last stage and gradient
accumulation call them as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel
from torchtitan.tools.logging import logger

from cookbook.titan.common.chunked_loss import VocabularyShard, chunked_cross_entropy
from cookbook.titan.tt_0_2_2.versions import refuse

LossFunction = Callable[..., torch.Tensor]


class HandingOn(nn.Linear):
    """TorchTitan's output layer, which leaves its product to the loss."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden` itself, (batch, length, dim), with the weight beside it."""
        hidden.output_weight = self.weight
        return hidden


def hand_on(model: nn.Module) -> None:
    """Let the output layer of `model` hand its input on, before the model is parallelized.

    Only one stage of a pipeline has an output layer.
    """
    output = model.output
    if output is None:
        return
    if type(output) is not nn.Linear:
        raise refuse(
            f"loss.num_chunks multiplies with the output layer's own weight, and the converters "
            f"made it a {type(output).__name__}; add output to their filter_fqns, or leave out "
            "loss.num_chunks"
        )
    # This instance alone; FSDP changes a module's class in the same way.
    output.__class__ = HandingOn


def keep_gathered(model: nn.Module) -> None:
    """Let FSDP keep the output layer's weight from its forward to the loss, whatever the policy.

    Every policy but `always` does so. Under that one too the weight is needed again at once.
    """
    if isinstance(model.output, FSDPModule):
        model.output.set_reshard_after_forward(False, recurse=False)


class HandingOnColwiseParallel(ColwiseParallel):
    """TorchTitan's plan for the output layer: the vocabulary is cut over the TP ranks.

    An output layer that hands on gets the hidden states of all ranks, as a plain tensor. Whether
    logits would have been gathered (`parallelism.disable_loss_parallel`) does not matter to it.
    """

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Any, desired_input_layouts: Any, mod: Any, inputs: Any, device_mesh: Any
    ) -> Any:
        if not isinstance(mod, HandingOn):
            return ColwiseParallel._prepare_input_fn(
                input_layouts, desired_input_layouts, mod, inputs, device_mesh
            )
        (hidden,) = inputs
        if not isinstance(hidden, DTensor):
            hidden = DTensor.from_local(hidden, device_mesh, input_layouts, run_check=False)
        # Each rank's gradient is that of its words: a term of a sum over ranks.
        return hidden.redistribute(placements=(Replicate(),)).to_local(grad_placements=(Partial(),))

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Any, use_local_output: bool, mod: Any, outputs: Any, device_mesh: Any
    ) -> Any:
        if isinstance(mod, HandingOn):
            return outputs
        return ColwiseParallel._prepare_output_fn(
            output_layouts, use_local_output, mod, outputs, device_mesh
        )


def build_chunked_loss(job_config: Any) -> LossFunction:
    """The cross-entropy of hidden states that an output layer handed on, summed over tokens."""
    num_chunks = job_config.loss.num_chunks
    compiled = job_config.compile.enable and "loss" in job_config.compile.components
    backend = job_config.compile.backend if compiled else None
    logger.info(f"The loss multiplies with the output layer's weight, in {num_chunks} chunks")

    def chunked_loss(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        weight, shard = _local_weight(hidden.output_weight)
        device = hidden.device.type
        if torch.is_autocast_enabled(device):
            # Without FSDP, TorchTitan's mixed precision is autocast, which casts for a product.
            dtype = torch.get_autocast_dtype(device)
            hidden, weight = hidden.to(dtype), weight.to(dtype)
        return chunked_cross_entropy(hidden, weight, labels, num_chunks, shard, backend)

    return chunked_loss


def _local_weight(weight: torch.Tensor) -> tuple[torch.Tensor, VocabularyShard | None]:
    """This rank's rows of the weight, and which they are where TP has cut it."""
    if not isinstance(weight, DTensor):
        return weight, None
    mesh, placements = weight.device_mesh, weight.placements
    _, offset = compute_local_shape_and_global_offset(weight.shape, mesh, placements)
    return weight.to_local(), VocabularyShard(offset[0], mesh.get_group())
