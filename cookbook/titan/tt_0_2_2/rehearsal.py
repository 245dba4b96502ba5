"""Do in one CPU process what a job does around its model before and after its first step.

The dry build replaces tokenizer, texts and checkpoint. What TorchTitan raises or asserts in them
would otherwise end a job after its time in the queue: the tokenizer's files, the first batch of
training and validation, the learning rate of each step, the profiler's schedule, and a checkpoint's
tensors beside the model's.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from cookbook.titan.tt_0_2_2.text_data import build_dataloader

# Steps whose learning rate is computed: all of a usual run, else evenly spread ones.
_RATES = 10_000


def rehearse(
    trainer: Any, build_tokenizer: Callable[[Any], Any], *, reads_texts: bool
) -> list[str]:
    """Raise what a job would raise; return notes on what was not rehearsed."""
    config, notes = trainer.job_config, list[str]()
    if reads_texts:
        _read_batches(config, build_tokenizer(config), trainer.parallel_dims)
    else:
        notes.append("data loader: not built")
    steps = config.training.steps
    for step in range(0, steps + 1, max(1, steps // _RATES)):
        factors = [one(step) for each in trainer.lr_schedulers for one in each.lr_lambdas]
        if not all(0 <= factor <= 1 for factor in factors):
            raise ValueError(f"the learning rate's factor in step {step} is {factors[0]}")
    if (profiling := config.profiling).enable_profiling:
        warmup, active = profiling.profiler_warmup, profiling.profiler_active
        wait = profiling.profile_freq - warmup - active
        torch.profiler.schedule(wait=wait, warmup=warmup, active=active)
    checkpoint = config.checkpoint
    if checkpoint.enable and checkpoint.initial_load_path and not checkpoint.initial_load_in_hf:
        _compare_with_model(checkpoint.initial_load_path, trainer.model_parts)
    return notes


def _read_batches(config: Any, tokenizer: Any, dims: Any) -> None:
    config = copy.deepcopy(config)
    training, validation = config.training, config.validation
    validation.seq_len, validation.local_batch_size = training.seq_len, training.local_batch_size
    # In this process: workers would be forked for one batch.
    training.dataloader.num_workers = validation.dataloader.num_workers = 0
    ranks = {"dp_world_size": dims.dp_replicate * dims.dp_shard, "dp_rank": 0}
    for validates in (False, True)[: 1 + validation.enable]:
        next(iter(build_dataloader(validates, job_config=config, tokenizer=tokenizer, **ranks)))


def _compare_with_model(path: str, parts: list[Any]) -> None:
    saved = FileSystemReader(path).read_metadata().state_dict_metadata
    for name, value in (pair for part in parts for pair in part.state_dict().items()):
        found = saved.get(name)
        if not isinstance(found, TensorStorageMetadata):
            raise ValueError(f"{path} has no {name}, which the model has")
        if found.size != value.shape:
            raise ValueError(f"{path}: {name} is {[*found.size]}, of the model {[*value.shape]}")
