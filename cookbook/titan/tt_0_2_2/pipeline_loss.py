"""The loss, with gradients per token also where the model is a pipeline.

Without a pipeline, TorchTitan divides the summed loss by the tokens of the global batch before the
backward. A pipeline schedule runs the backward inside, before that division. In 0.2.2 the gradients
of a run with PP are therefore as many times larger as a batch has tokens, and every step is clipped
to the maximal norm (pytorch/torchtitan#2972).
"""

from __future__ import annotations

from typing import Any

import torch
from torchtitan.components.loss import build_cross_entropy_loss

from cookbook.titan.tt_0_2_2 import activity
from cookbook.titan.tt_0_2_2.loss import LossFunction, build_chunked_loss


def build_loss(job_config: Any, **kwargs: Any) -> LossFunction:
    """The cross-entropy, summed over tokens; under PP its gradient is per token."""
    if num_chunks := job_config.loss.num_chunks:
        loss_fn = _noted(f"cross_entropy in {num_chunks} chunks", build_chunked_loss(job_config))
    else:
        loss_fn = _noted("cross_entropy", build_cross_entropy_loss(job_config, **kwargs))
    parallel_dims = kwargs.get("parallel_dims")
    if parallel_dims is None or not parallel_dims.pp_enabled:
        return loss_fn
    factor = 1 / tokens_of_global_batch(job_config, parallel_dims)
    activity.patches_applied.add("pipeline-gradients-per-token")

    def scaled_loss(*args: Any, **kwargs: Any) -> torch.Tensor:
        return scale_gradient(loss_fn(*args, **kwargs), factor)

    return scaled_loss


def _noted(name: str, loss_fn: LossFunction) -> LossFunction:
    """`loss_fn`, which notes for the report of the first step that it ran."""

    def noted_loss(*args: Any, **kwargs: Any) -> torch.Tensor:
        activity.losses.add(name)
        return loss_fn(*args, **kwargs)

    return noted_loss


def scale_gradient(loss: torch.Tensor, factor: float) -> torch.Tensor:
    """The value of `loss`, and `factor` times its gradient."""
    return loss * factor + loss.detach() * (1 - factor)


def tokens_of_global_batch(job_config: Any, parallel_dims: Any) -> int:
    """The number of tokens; text data has a label for every position, so every token counts."""
    training = job_config.training
    sequences = training.global_batch_size
    if sequences < 0:
        sequences = training.local_batch_size * parallel_dims.dp_replicate * parallel_dims.dp_shard
    return int(sequences * training.seq_len)
