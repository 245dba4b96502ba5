"""In: the summed loss of pipeline microbatches. Out: the same loss with gradients per token.

Without a pipeline, TorchTitan divides the summed loss by the tokens of the global batch before the
backward. A pipeline schedule runs the backward inside, before that division, so that in 0.2.2 the
gradients of a run with PP are as many times larger as there are tokens in a batch: every step is
clipped to the maximal norm (pytorch/torchtitan#2972).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torchtitan.models.deepseek_v3 as deepseek_v3

from cookbook.titan.stack_2026_02 import activity

LossFunction = Callable[..., torch.Tensor]


def scale_gradient(loss: torch.Tensor, factor: float) -> torch.Tensor:
    """The value of `loss`, and `factor` times its gradient."""
    return loss * factor + loss.detach() * (1 - factor)


def tokens_of_global_batch(job_config: Any, parallel_dims: Any) -> int:
    """Text data has a label for every position, so that every token of a batch counts."""
    training = job_config.training
    sequences = training.global_batch_size
    if sequences < 0:
        sequences = training.local_batch_size * parallel_dims.dp_replicate * parallel_dims.dp_shard
    return int(sequences * training.seq_len)


def _per_token(build_loss: Callable[..., LossFunction]) -> Callable[..., LossFunction]:
    @wraps(build_loss)
    def build_loss_per_token(job_config: Any, **kwargs: Any) -> LossFunction:
        loss_fn = build_loss(job_config, **kwargs)
        parallel_dims = kwargs.get("parallel_dims")
        if parallel_dims is None or not parallel_dims.pp_enabled:
            return loss_fn
        factor = 1 / tokens_of_global_batch(job_config, parallel_dims)
        activity.corrections.add("pipeline-gradients-per-token")

        def scaled_loss(*args: Any, **kwargs: Any) -> torch.Tensor:
            return scale_gradient(loss_fn(*args, **kwargs), factor)

        return scaled_loss

    return build_loss_per_token


def correct_pipeline_loss() -> None:
    deepseek_v3.build_cross_entropy_loss = _per_token(deepseek_v3.build_cross_entropy_loss)
