"""Validate on the same batches each time, without a trace in the training that goes on.

TorchTitan's DeepSeek-V3 has no validator. TorchTitan's own reads other batches each time, counts
its tokens as training's and moves the router's counts; this one restores all of that.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn as nn
from torchtitan.components.validate import BaseValidator, Validator
from torchtitan.distributed.context_parallel import prepare_context_parallel_input

from cookbook.titan.tt_0_2_2.text_data import build_validation_dataloader


class RepeatableValidator(Validator):
    """TorchTitan's validator over the first `validation.steps` batches of its texts."""

    def __init__(self, job_config: Any, dp_world_size: int, dp_rank: int, **parts: Any) -> None:
        # Not Validator's: it builds a loader of TorchTitan's own data sets.
        BaseValidator.__init__(self, job_config)
        for name, part in parts.items():
            setattr(self, name, part)
        self._place = {"dp_world_size": dp_world_size, "dp_rank": dp_rank}

    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        """Log the validation loss: the mean over tokens, by the rank that has the loss."""
        self.validation_dataloader = build_validation_dataloader(
            job_config=self.job_config, tokenizer=self.tokenizer, **self._place
        )
        processor = self.metrics_processor
        if (alarm := getattr(processor, "alarm", None)) is not None:
            alarm.pause()
        tokens, last_log = processor.ntokens_since_last_log, processor.time_last_log
        counts = [
            (module.tokens_per_expert, module.tokens_per_expert.clone())
            for part in model_parts
            for module in part.modules()
            if isinstance(getattr(module, "tokens_per_expert", None), torch.Tensor)
        ]
        began = time.perf_counter()
        processor.ntokens_since_last_log, processor.time_last_log = 0, began
        super().validate(model_parts, step)
        for count, before in counts:
            count.copy_(before)
        processor.ntokens_since_last_log = tokens
        processor.time_last_log = last_log + time.perf_counter() - began

    def post_dataloading_process(
        self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor, model_parts: list[Any]
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor], dict[str, Any]]:
        """Prepare a batch as TorchTitan's Trainer does.

        TorchTitan's validator makes masks for SDPA too, which takes none.
        """
        inputs = input_dict["input"]
        others = {name: value for name, value in input_dict.items() if name != "input"}
        options: dict[str, Any] = {}
        if model_parts[0].model_args.attn_type in ("flex", "varlen"):
            options["attention_masks"] = model_parts[0].get_attention_masks(
                input_batch=inputs, tokenizer=self.tokenizer, extra_inputs=others
            )
        if self.parallel_dims.cp_enabled:
            inputs, labels, options = prepare_context_parallel_input(
                inputs,
                labels,
                options,
                self.parallel_dims.get_mesh("cp"),
                inputs.device,
                self.job_config.parallelism.context_parallel_load_balancer,
            )
        return inputs, labels, others, options


def build_validator(job_config: Any, **arguments: Any) -> RepeatableValidator:
    """Return the validator of a job; arguments as TorchTitan's function takes them.

    A validation batch has the shape of a training batch, so that nothing is compiled or sized for
    another.
    """
    training, validation = job_config.training, job_config.validation
    validation.seq_len, validation.local_batch_size = training.seq_len, training.local_batch_size
    return RepeatableValidator(job_config, **arguments)
