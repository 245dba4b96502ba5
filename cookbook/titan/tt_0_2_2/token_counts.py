"""Counts of tokens for each expert, from which the balance of experts follows: training's alone.

TorchTitan 0.2.2 counts in every forward and corrects the experts' bias by the counts at the next
step. Not every forward is training: before its first microbatch, a pipeline computes each stage
once for zeros, to learn the shapes of what it sends (`_shape_inference` in PyTorch's `stage.py`),
and validation computes losses. Their tokens moved the bias, and with it the routing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn

from cookbook.titan.tt_0_2_2 import activity


def count_in_training_only(model: nn.Module) -> None:
    """Keep the counts of the MoE layers of `model` where a forward records no gradients."""
    for block in model.layers.values():
        if block.moe_enabled:
            block.moe.register_forward_pre_hook(_remember)
            block.moe.register_forward_hook(_restore)


def _remember(moe: Any, inputs: Any) -> None:
    if not torch.is_grad_enabled():
        moe.cookbook_counts = moe.tokens_per_expert.clone()


def _restore(moe: Any, inputs: Any, outputs: Any) -> None:
    if not torch.is_grad_enabled():
        moe.tokens_per_expert.copy_(moe.cookbook_counts)
        activity.patches_applied.add("tokens-counted-in-training-only")
