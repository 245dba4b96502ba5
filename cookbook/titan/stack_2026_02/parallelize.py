"""TorchTitan's function that parallelizes DeepSeek-V3, with the cookbook's MoE layers inside."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn as nn
import torchtitan.models.deepseek_v3.infra.parallelize as deepseek_parallelize

from cookbook.titan.stack_2026_02.cpu import sum_gradients_in_fsdp
from cookbook.titan.stack_2026_02.expert_parallel import apply_moe_ep_tp
from cookbook.titan.stack_2026_02.plain_checkpoint import save_plain_weights
from cookbook.titan.stack_2026_02.quantized_a2a import Precisions


def parallelize(model: nn.Module, parallel_dims: Any, job_config: Any) -> nn.Module:
    """`parallelize_deepseekv3`, also for one stage of a pipeline."""
    moe = partial(apply_moe_ep_tp, Precisions.of(job_config))
    # No door: TorchTitan calls this function by its name, after the TP of the other layers and
    # before recomputation, compile and FSDP wrap the layers.
    with patch.object(deepseek_parallelize, "apply_moe_ep_tp", moe):
        model = deepseek_parallelize.parallelize_deepseekv3(model, parallel_dims, job_config)
    save_plain_weights(model)
    if not torch.cuda.is_available():
        sum_gradients_in_fsdp(model)
    return model
