"""Without FSDP, hidden states have the dtype that FSDP gives them.

FSDP gathers weights in BF16, so embeddings, norms and residual sums are BF16. A rank alone trains
under autocast, which knows neither: its hidden states would stay float32, twice the bytes in every
pass between two matrix products, and its losses those of no run on several ranks.
"""

from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torchtitan.config import TORCH_DTYPE_MAP

from cookbook.titan.tt_0_2_2 import activity


class NarrowRMSNorm(nn.RMSNorm):
    """RMSNorm that casts its weight to the dtype of its input, and returns that dtype."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x` (..., features)."""
        weight = self.weight.to(x.dtype)
        return nn.functional.rms_norm(x, self.normalized_shape, weight, self.eps)


def narrow_hidden_states(model: Any, parallel_dims: Any, training: Any) -> None:
    """Cast embeddings, and with them all hidden states, where TorchTitan trains under autocast."""
    has_autocast = not (
        parallel_dims.fsdp_enabled or parallel_dims.tp_enabled or parallel_dims.pp_enabled
    )
    dtype = TORCH_DTYPE_MAP[training.mixed_precision_param]
    if not has_autocast or dtype is torch.float32:
        return
    activity.patches_applied.add("hidden-states-as-under-fsdp")
    for module in model.modules():
        if type(module) is nn.RMSNorm:
            module.__class__ = NarrowRMSNorm
    model.tok_embeddings.register_forward_hook(lambda _, __, embeddings: embeddings.to(dtype))
