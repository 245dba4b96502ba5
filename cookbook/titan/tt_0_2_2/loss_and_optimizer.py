"""Changes to TorchTitan's loss, optimizer step and learning-rate schedule.

- TorchTitan 0.2.2 divides the summed loss by the number of tokens in the global batch. A pipeline
  runs the backward before this division, so its gradients are too large, and every step is clipped
  (pytorch/torchtitan#2972). Here a pipeline's gradients are divided by the same number.
- With `loss.num_chunks` the output layer does not compute logits. It passes its input and weight to
  the loss function, which computes them one chunk at a time (`common/chunked_loss.py`).
- A fused AdamW on a GPU clips the gradients while it updates the weights (`common/adamw.py`).
- TorchTitan takes the optimizer step even if the gradient norm is not finite. Here its clipping
  function is patched to record the norm, and the optimizers' `step` is wrapped to skip the update
  of weights, moments and routing bias.
- A run that is resumed with more steps keeps its original schedule (`lr_scheduler.total_steps`).
  After its end the learning rate is constant; TorchTitan's would turn negative or rise again.
- In a resumed run, TorchTitan takes the learning rate, betas, epsilon and weight decay from the
  checkpoint. Here the job's options set them; only the schedule's step is loaded.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn as nn
import torchtitan.distributed.utils as dist_utils
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_module
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel
from torchtitan.components.loss import build_cross_entropy_loss
from torchtitan.components.lr_scheduler import build_lr_schedulers as titan_lr_schedulers
from torchtitan.components.optimizer import build_optimizers_with_moe_load_balancing
from torchtitan.tools.logging import logger

from cookbook.titan.common.adamw import ClippingAdamW, can_clip
from cookbook.titan.common.chunked_loss import VocabularyShard, chunked_cross_entropy
from cookbook.titan.common.weight_copies import is_alone, keep_dtypes, note_changes
from cookbook.titan.tt_0_2_2 import activity
from cookbook.titan.tt_0_2_2.routing import moe_layers
from cookbook.titan.tt_0_2_2.versions import refuse

LossFunction = Callable[..., Tensor]


def build_loss(job_config: Any, **kwargs: Any) -> LossFunction:
    """Build the cross-entropy loss, summed over tokens.

    TorchTitan divides the loss by the number of tokens in the global batch before the backward, but
    not under PP. Under PP, the returned loss function divides the gradient instead.
    """
    if num_chunks := job_config.loss.num_chunks:
        name, loss_fn = f"cross_entropy in {num_chunks} chunks", build_chunked_loss(job_config)
    else:
        name, loss_fn = "cross_entropy", build_cross_entropy_loss(job_config, **kwargs)
    factor = None
    if (dims := kwargs.get("parallel_dims")) is not None and dims.pp_enabled:
        training = job_config.training
        sequences = training.global_batch_size
        if sequences < 0:
            sequences = training.local_batch_size * dims.dp_replicate * dims.dp_shard
        # No labels are masked, so the loss covers every token of the global batch.
        factor = 1 / (sequences * training.seq_len)
        activity.patches_applied.add("pipeline-gradients-per-token")

    def noted_loss(*args: Any, **kwargs: Any) -> Tensor:
        activity.losses.add(name)
        loss = loss_fn(*args, **kwargs)
        return loss if factor is None else scale_gradient(loss, factor)

    return noted_loss


def scale_gradient(loss: Tensor, factor: float) -> Tensor:
    """Return `loss` with its value unchanged and its gradient scaled by `factor`."""
    return loss * factor + loss.detach() * (1 - factor)


class HandingOn(nn.Linear):
    """An output layer that returns its input, because the chunked loss computes the logits."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Return `hidden` (batch, length, dim); its new attribute is the weight, for the loss."""
        hidden.output_weight = self.weight
        return hidden


def hand_on(model: nn.Module) -> None:
    """Make the output layer of `model`, if any, return its input; call before parallelizing."""
    output = model.output
    if output is None:
        return
    if type(output) is not nn.Linear:
        raise refuse(
            "loss.num_chunks needs the output layer's unconverted weight, but the converters "
            f"made it a {type(output).__name__}; add output to their filter_fqns, or leave out "
            "loss.num_chunks"
        )
    output.__class__ = HandingOn


def keep_gathered(model: nn.Module) -> None:
    """Make FSDP keep the output layer's weight gathered after its forward, for the loss."""
    if isinstance(model.output, FSDPModule):
        model.output.set_reshard_after_forward(False, recurse=False)


class HandingOnColwiseParallel(ColwiseParallel):
    """ColwiseParallel for `HandingOn`, the output layer that leaves the logits to the loss.

    The layer's input is gathered over TP and passed to the loss as a plain tensor, not a DTensor.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, HandingOn):
            return super()._apply(module, device_mesh)

        def gather(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            (hidden,) = inputs
            if not isinstance(hidden, DTensor):
                hidden = DTensor.from_local(hidden, mesh, self.input_layouts, run_check=False)
            whole = hidden.redistribute(placements=(Replicate(),))
            # Sum this input's gradient over TP. A rank has only its vocabulary shard's part of it.
            return whole.to_local(grad_placements=(Partial(),))

        return distribute_module(module, device_mesh, self._partition_linear_fn, gather)


def build_chunked_loss(job_config: Any) -> LossFunction:
    """Build a cross-entropy loss that computes the logits from hidden states, chunk by chunk."""
    num_chunks = job_config.loss.num_chunks
    compiled = job_config.compile.enable and "loss" in job_config.compile.components
    backend = job_config.compile.backend if compiled else None
    logger.info(f"The loss multiplies by the output layer's weight, in {num_chunks} chunks")

    def chunked_loss(hidden: Tensor, labels: Tensor) -> Tensor:
        weight, shard = hidden.output_weight, None
        if isinstance(weight, DTensor):
            # TP shards the vocabulary: this rank's rows of the weight begin at `offset`.
            mesh, placements = weight.device_mesh, weight.placements
            _, offset = compute_local_shape_and_global_offset(weight.shape, mesh, placements)
            weight, shard = weight.to_local(), VocabularyShard(offset[0], mesh.get_group())
        device = hidden.device.type
        if torch.is_autocast_enabled(device):
            # Without FSDP, mixed precision is autocast: multiply in its dtype.
            hidden = hidden.to(torch.get_autocast_dtype(device))
        return chunked_cross_entropy(hidden, weight, labels, num_chunks, shard, backend)

    return chunked_loss


_clip = dist_utils.clip_grad_norm_


class GradientWatch:
    """The norm of the last step's gradients, and the number of steps this process has skipped."""

    limit = 0  # how many steps may be skipped: the option training.max_skipped_steps
    skipped = 0
    norm: Tensor | None = None
    clipping: tuple[ClippingAdamW, ...] = ()  # the optimizers that scale gradients themselves


def watch_gradients(job_config: Any) -> None:
    """Record the gradient norm of each step if the job sets `training.max_skipped_steps`."""
    GradientWatch.limit, GradientWatch.skipped = job_config.training.max_skipped_steps, 0
    GradientWatch.clipping = ()
    dist_utils.clip_grad_norm_ = _clip_and_note if GradientWatch.limit else _clip


def build_optimizers(*args: Any, **kwargs: Any) -> Any:
    """Return TorchTitan's optimizers, extended to update the routing bias in every family.

    A checkpoint's moments are loaded, but not its options, such as the weight decay.

    With `training.max_skipped_steps` N, `step` skips up to N steps whose gradients are not finite,
    and fails at the next one.
    """
    optimizers = build_optimizers_with_moe_load_balancing(*args, **kwargs)
    if all(can_clip(one) for one in optimizers):
        for one in optimizers:
            one.__class__ = ClippingAdamW
            keep_dtypes(weight for group in one.param_groups for weight in group["params"])
        GradientWatch.clipping = tuple(optimizers)
        dist_utils.clip_grad_norm_ = _clip_and_note
    if is_alone():
        groups = [group for one in optimizers for group in one.param_groups]
        weights = [weight for group in groups for weight in group["params"]]
        optimizers.register_step_post_hook(lambda *_: note_changes(weights))
    load = optimizers.load_state_dict

    def load_moments(state: dict[str, Any]) -> None:
        asked = optimizers.state_dict().items()
        load(state | {name: value for name, value in asked if name.startswith("param_groups.")})

    optimizers.load_state_dict = load_moments
    if not GradientWatch.limit:
        return optimizers
    step = optimizers.step

    def step_if_finite(*args: Any, **kwargs: Any) -> None:
        assert GradientWatch.norm is not None
        # This waits for the GPU in every step.
        norm = GradientWatch.norm.item()
        if math.isfinite(norm):
            step(*args, **kwargs)
            return
        GradientWatch.skipped += 1
        words = f"{GradientWatch.skipped} of training.max_skipped_steps={GradientWatch.limit}"
        if GradientWatch.skipped > GradientWatch.limit:
            raise RuntimeError(f"cookbook: the gradient norm is {norm} in too many steps: {words}")
        logger.warning(f"cookbook: skipped a step whose gradient norm is {norm} ({words})")
        # Otherwise the next step would update the routing bias from this step's tokens too.
        for moe in moe_layers(optimizers.model_parts).values():
            moe.tokens_per_expert.zero_()

    optimizers.step = step_if_finite
    return optimizers


def _clip_and_note(*args: Any, **kwargs: Any) -> Tensor:
    note = _hand_factor if GradientWatch.clipping else torch.nn.utils.clip_grads_with_norm_
    norms = torch._foreach_norm
    if is_alone():
        # Gradients may be BF16, and so would their norms, with three digits.
        norms = partial(norms, dtype=torch.float32)
    with (
        patch.object(torch.nn.utils, "clip_grads_with_norm_", note),
        patch.object(torch, "_foreach_norm", norms),
    ):
        GradientWatch.norm = _clip(*args, **kwargs)
    return GradientWatch.norm


def _hand_factor(_: Any, max_norm: float, total_norm: Tensor, *__: Any, **___: Any) -> None:
    for optimizer in GradientWatch.clipping:
        # PyTorch's own formula.
        optimizer.factor = (max_norm / (total_norm + 1e-6)).clamp(max=1.0)


def build_lr_schedulers(optimizers: Any, lr_scheduler_config: Any, training_steps: int) -> Any:
    """Return TorchTitan's schedulers, with a constant rate after the schedule's last step.

    Only their position is loaded from a checkpoint.
    """
    schedulers = titan_lr_schedulers(optimizers, lr_scheduler_config, training_steps)
    last = (lr_scheduler_config.total_steps or training_steps) - 1
    for scheduler in schedulers:
        scheduler.lr_lambdas = [
            lambda step, own=own: own(min(step, last)) for own in scheduler.lr_lambdas
        ]
    load = schedulers.load_state_dict

    def load_position(state: dict[str, Any]) -> None:
        # All schedulers are alike, so the checkpoint has the state of one.
        load(state | {"base_lrs": schedulers.schedulers[0].base_lrs})
        for scheduler in schedulers:
            scheduler._update_lr(scheduler.last_epoch)

    schedulers.load_state_dict = load_position
    return schedulers
