"""FSDP's reduction of gradients in a group of one rank, which sends and receives nothing.

FSDP gathers the gradients of a layer in the reduction's precision, for NCCL to send. Where nobody
is there to send to, it divides them by one and copies the result all the same: of an FP32 element 6
bytes are moved to gather it, and 16 more. Here what is gathered is the gradient.

Source: `foreach_reduce` in `torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter


def reduce_alone(module: FSDPModule) -> None:
    """Let a module whose FSDP group has one rank take what it gathers as its gradients."""
    module.set_custom_reduce_scatter(OneBuffer())
    # TorchTitan sets 1, by which a group of one rank divides; without a factor it does not.
    factor: Any = None
    module.set_gradient_divide_factor(factor)


class OneBuffer(ReduceScatter):
    """What is sent is what arrives.

    In each reduction FSDP asks for memory to send from, and then for memory to receive in, to which
    it copies; PyTorch copies no tensor to itself.
    """

    def __init__(self) -> None:
        self._sent: torch.Tensor | None = None

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A buffer; and the second time, in FSDP's own stream, the same.

        Raises:
            RuntimeError: what would arrive is not what is sent.
        """
        sent, self._sent = self._sent, None
        if sent is None:
            with torch.cuda.stream(_owner(device)):
                self._sent = torch.empty(*size, dtype=dtype, device=device)
            return self._sent
        if (tuple(sent.shape), sent.dtype, sent.device) != (tuple(size), dtype, device):
            raise RuntimeError(f"FSDP sends {tuple(sent.shape)} and would receive {tuple(size)}")
        if sent.is_cuda:
            # It may add the gradients to those of the last batch, and give the memory back at once.
            sent.record_stream(torch.cuda.current_stream())
        return sent

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Never called with one rank.

        Raises:
            RuntimeError: there are others, whose gradients would be lost.
        """
        raise RuntimeError("gradients of several ranks are not reduced alone")


@functools.cache
def _owner(device: torch.device) -> torch.cuda.Stream | None:
    """Whose memory it is: gradients outlive what is computed, and would lie among it."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None
