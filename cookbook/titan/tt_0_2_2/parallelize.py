"""TorchTitan's function that parallelizes DeepSeek-V3, with the cookbook's MoE layers inside."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn as nn
import torchtitan.models.deepseek_v3.infra.parallelize as deepseek_parallelize

from cookbook.titan.tt_0_2_2.cpu import sum_gradients_in_fsdp
from cookbook.titan.tt_0_2_2.expert_parallel import apply_moe_ep_tp
from cookbook.titan.tt_0_2_2.loss import (
    HandingOnColwiseParallel,
    hand_on,
    keep_gathered,
)
from cookbook.titan.tt_0_2_2.plain_checkpoint import save_plain_weights
from cookbook.titan.tt_0_2_2.probs_on_activations import experts_with_probs
from cookbook.titan.tt_0_2_2.quantized_a2a import Precisions
from cookbook.titan.tt_0_2_2.recomputation import apply_ac
from cookbook.titan.tt_0_2_2.router_load import count_load
from cookbook.titan.tt_0_2_2.row_kernels import use_row_kernels
from cookbook.titan.tt_0_2_2.token_counts import count_in_training_only


def parallelize(model: nn.Module, parallel_dims: Any, job_config: Any) -> nn.Module:
    """`parallelize_deepseekv3`, also for one stage of a pipeline."""
    # No door: TorchTitan calls these functions by their names, the first after the TP of the other
    # layers, the second before compile and FSDP wrap the layers, the third before FSDP does.
    names: dict[str, Any] = {
        "apply_moe_ep_tp": partial(
            apply_moe_ep_tp,
            Precisions.of(job_config),
            chunks=job_config.deepep.num_chunks,
            score_activations=job_config.deepep.score_activations,
            row_kernels=job_config.cookbook.row_kernels,
        ),
        "apply_ac": partial(
            apply_ac,
            job_config.activation_checkpoint.op_sac_save_list,
            job_config.activation_checkpoint.num_layers_kept,
        ),
    }
    compiled = job_config.compile
    if compiled.enable and "model" in compiled.components:
        # TorchTitan compiles its own function for the experts.
        experts_with_probs.compile(compiled.backend)
    is_one_rank = not (parallel_dims.tp_enabled or parallel_dims.ep_enabled)
    if job_config.cookbook.row_kernels and is_one_rank:
        # TorchTitan calls nothing for the experts then.
        for block in model.get_submodule("layers").children():
            if block.moe_enabled:
                use_row_kernels(block.moe)
    if job_config.loss.num_chunks:
        hand_on(model)
        # No door: the class of which TorchTitan's plan for TP makes the output layer's part.
        names["ColwiseParallel"] = HandingOnColwiseParallel
    with patch.multiple(deepseek_parallelize, **names):
        model = deepseek_parallelize.parallelize_deepseekv3(model, parallel_dims, job_config)
    if job_config.loss.num_chunks:
        keep_gathered(model)
    save_plain_weights(model)
    count_load(model)
    count_in_training_only(model)
    if not torch.cuda.is_available():
        sum_gradients_in_fsdp(model)
    return model
