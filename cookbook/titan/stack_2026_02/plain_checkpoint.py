"""In: a model with quantizing weights. Out: checkpoints that hold plain tensors.

TorchAO wraps the experts' weights in a tensor subclass that quantizes when it is multiplied; what
it holds is the weight as it is. TorchTitan 0.2.2 saves the wrapper, and PyTorch, which loads
weights only, refuses to read it: an MXFP8 run could not be resumed. Saved plain, a checkpoint can
also be continued in another precision.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from torch.distributed.tensor import DTensor
from torchtitan.components.checkpoint import ModelWrapper


def plain(value: Any) -> Any:
    """The tensor inside of TorchAO's wrapper, on the same memory; anything else as it is."""
    from torchao.prototype.moe_training.tensor import ScaledGroupedMMTensor

    if isinstance(value, ScaledGroupedMMTensor):
        return value._data
    if isinstance(value, DTensor) and isinstance(value._local_tensor, ScaledGroupedMMTensor):
        return DTensor(value._local_tensor._data, value._spec, requires_grad=False)
    return value


def save_plain_weights() -> None:
    """Unwrap where TorchTitan hands its model to the checkpointer, for saving and for loading."""
    state_dict = ModelWrapper.state_dict

    @wraps(state_dict)
    def plain_state_dict(self: ModelWrapper) -> dict[str, Any]:
        return {name: plain(value) for name, value in state_dict(self).items()}

    ModelWrapper.state_dict = plain_state_dict
