"""Skip steps whose gradients are not finite, and keep the learning rate beyond its schedule.

TorchTitan clips by the norm of all ranks' gradients and steps whatever the norm is. There is no
door for this: its clipping function is replaced to see the norm, and the optimizers' `step` to
leave the weights, the moments and the routing bias as they are.

A run that is resumed with more steps keeps the schedule it began with (`lr_scheduler.total_steps`).
TorchTitan's rate turns negative, or rises again, after the end of a schedule.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torchtitan.distributed.utils as dist_utils
from torchtitan.components.lr_scheduler import build_lr_schedulers as titan_lr_schedulers
from torchtitan.components.optimizer import build_optimizers_with_moe_load_balancing
from torchtitan.tools.logging import logger

_clip = dist_utils.clip_grad_norm_


class _Watch:
    """The last norm and the skipped steps; `limit` is `training.max_skipped_steps`."""

    limit = 0
    skipped = 0
    norm: torch.Tensor | None = None


def watch_gradients(job_config: Any) -> None:
    """Look at the norm of each step's gradients where the job allows for skipped steps."""
    _Watch.limit, _Watch.skipped = job_config.training.max_skipped_steps, 0
    dist_utils.clip_grad_norm_ = _clip_and_note if _Watch.limit else _clip


def skipped_steps() -> int:
    """Return how many steps this process has skipped."""
    return _Watch.skipped


def build_optimizers(*args: Any, **kwargs: Any) -> Any:
    """Return TorchTitan's optimizers; arguments as its function takes them.

    Raises:
        RuntimeError: in `step`, when more steps than allowed were skipped.
    """
    optimizers = build_optimizers_with_moe_load_balancing(*args, **kwargs)
    if not _Watch.limit:
        return optimizers
    step = optimizers.step

    def step_if_finite(*args: Any, **kwargs: Any) -> None:
        assert _Watch.norm is not None
        # The host waits for the GPU here, as it does where TorchTitan logs the norm.
        norm = _Watch.norm.item()
        if math.isfinite(norm):
            step(*args, **kwargs)
            return
        _Watch.skipped += 1
        words = f"{_Watch.skipped} of training.max_skipped_steps={_Watch.limit}"
        if _Watch.skipped > _Watch.limit:
            raise RuntimeError(f"cookbook: the gradients' norm is {norm} again: {words} skipped")
        logger.warning(f"cookbook: skipped a step whose gradients' norm is {norm} ({words})")

    optimizers.step = step_if_finite
    return optimizers


def _clip_and_note(*args: Any, **kwargs: Any) -> torch.Tensor:
    _Watch.norm = _clip(*args, **kwargs)
    return _Watch.norm


def build_lr_schedulers(optimizers: Any, lr_scheduler_config: Any, training_steps: int) -> Any:
    """Return TorchTitan's schedulers, whose rate stays at that of the schedule's last step."""
    schedulers = titan_lr_schedulers(optimizers, lr_scheduler_config, training_steps)
    last = (lr_scheduler_config.total_steps or training_steps) - 1
    for scheduler in schedulers:
        scheduler.lr_lambdas = [
            lambda step, own=own: own(min(step, last)) for own in scheduler.lr_lambdas
        ]
    return schedulers
