"""Checkpoints that hold plain tensors, also of a model whose weights quantize themselves.

TorchAO wraps the experts' weights in a tensor subclass that quantizes when it is multiplied; inside
is the weight itself. The name `experts` matches the shared experts too, whose wrapper does nothing.
TorchTitan 0.2.2 saves the wrapper, and PyTorch, which loads weights only, refuses to read it: an
MXFP8 run could not be resumed. Saved plain, a checkpoint can also be continued in another
precision.
"""

from __future__ import annotations

from typing import Any

import torch.nn as nn
from torch.distributed.tensor import DTensor
from torchao.prototype.moe_training.tensor import ScaledGroupedMMTensor


def plain(value: Any) -> Any:
    """The tensor inside TorchAO's wrapper, on the same memory; anything else unchanged."""
    if isinstance(value, ScaledGroupedMMTensor):
        return value._data
    if isinstance(value, DTensor) and isinstance(value._local_tensor, ScaledGroupedMMTensor):
        return DTensor(value._local_tensor._data, value._spec, requires_grad=False)
    return value


def _unwrap(model: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name, value in state.items():
        state[name] = plain(value)


def save_plain_weights(model: nn.Module) -> None:
    """Unwrap the weights in the state dict of `model`, for saving and for loading."""
    model.register_state_dict_post_hook(_unwrap)
