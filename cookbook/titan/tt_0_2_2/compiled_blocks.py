"""Compiles the part of a layer before its experts as one, where TorchTitan compiles three.

TorchTitan compiles the norms and the attention of a layer with experts one by one, and adds what
they return in between. Compiled together, the sum belongs to the second norm's kernel and the sums
of the gradients to the norms', so that hidden states are read and written less often; and the host
enters one compiled function instead of three, in the forward and in the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torchtitan.models.deepseek_v3.model.model import TransformerBlock
from torchtitan.models.llama4.infra.parallelize import apply_compile

_PARTS = ("attention_norm", "attention", "ffn_norm")
_Both = tuple[torch.Tensor, torch.Tensor]


def _before_experts(
    attention_norm: nn.Module, attention: nn.Module, ffn_norm: nn.Module, x: Any, *inputs: Any
) -> _Both:
    """The hidden states after the attention, and the same behind the second norm."""
    x = x + attention(attention_norm(x), *inputs)
    return x, ffn_norm(x)


class JoinedBlock(TransformerBlock):
    """TorchTitan's layer with experts; what comes before them is one function."""

    cookbook_before_experts: Callable[..., _Both]

    def forward(self, x: torch.Tensor, *inputs: Any) -> torch.Tensor:
        """The layer's output, (batch, length, features) as `x`.

        Args:
            inputs: the attention's: rotary embeddings, masks, positions.
        """
        parts = self.attention_norm, self.attention, self.ffn_norm
        x, normed = self.cookbook_before_experts(*parts, x, *inputs)
        return x + self.moe(normed)


def start_compiling_workers(job_config: Any) -> None:
    """Start the processes that compile Triton's kernels for a GPU, and do not wait for them.

    They import torch, for seconds, and torch starts them when it compiles the first function. That
    comes after other things that a job can do meanwhile.
    """
    if not torch.cuda.is_available() or job_config.comm.mode != "default":
        return
    if not job_config.compile.enable or job_config.compile.backend != "inductor":
        return
    # No public function; where another torch lacks it, the start is only slower.
    with suppress(ImportError):
        from torch._inductor.async_compile import maybe_warm_pool

        maybe_warm_pool()


def compile_blocks(model: nn.Module, compile_config: Any, ep_enabled: bool) -> None:
    """TorchTitan's `apply_compile`, with this file's change."""
    apply_compile(model, compile_config, ep_enabled)
    # Compiled once for all layers, which are alike.
    joined = torch.compile(_before_experts, backend=compile_config.backend, fullgraph=True)
    for layer in model.get_submodule("layers").children():
        is_wrapped = isinstance(layer, CheckpointWrapper)
        block: Any = layer._checkpoint_wrapped_module if is_wrapped else layer
        if not block.moe_enabled:
            continue
        # Wrapped, and not compiled before they are called.
        for name in _PARTS:
            setattr(block, name, getattr(block, name)._orig_mod)
        block.__class__ = JoinedBlock
        block.cookbook_before_experts = joined
