"""Do in one CPU process what a job does around its model before and after its first step.

    python -m cookbook.titan.tt_0_2_2.rehearsal QUESTION

The dry build replaces tokenizer, texts and checkpoint. What TorchTitan raises or asserts in them
would otherwise end a job after its time in the queue: the tokenizer's files, the first batch of
training and validation, the learning rate of each step, the profiler's schedule, and a checkpoint's
tensors beside the model's. A job rehearses the same without the model, before its ranks start:
QUESTION is JSON with `argv` and the arguments of `rehearse`; the last line says what was raised.
"""

import contextlib
import copy
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torchtitan.config import ConfigManager
from torchtitan.protocols.train_spec import get_train_spec

from cookbook.titan.tt_0_2_2.checkpoint import root_cause
from cookbook.titan.tt_0_2_2.loss_and_optimizer import build_lr_schedulers
from cookbook.titan.tt_0_2_2.text_data import build_dataloader

REHEARSED = "cookbook-rehearsed "
# Steps whose learning rate is computed: all of a usual run, else evenly spread ones.
_RATES = 10_000


def rehearse(config: Any, build_tokenizer: Any, *, readers: int, reads_texts: bool) -> list[str]:
    """Raise what a job on `readers` data-parallel ranks would raise; return what was not done."""
    notes, tokenizer = list[str](), None
    # Also beside texts of the hub, or too many to read here.
    if Path(config.model.hf_assets_path, "tokenizer.json").is_file():
        with _named(config.model.hf_assets_path):
            tokenizer = build_tokenizer(config)
    else:
        notes.append("tokenizer: not read")
    if reads_texts:
        _read_batches(config, tokenizer, readers)
    else:
        notes.append("texts: not read")
    steps, optimizer = config.training.steps, torch.optim.AdamW([torch.zeros(1)])
    schedulers = build_lr_schedulers([optimizer], config.lr_scheduler, steps)
    for step in range(0, steps + 1, max(1, steps // _RATES)):
        factors = [one(step) for each in schedulers for one in each.lr_lambdas]
        if not all(0 <= factor <= 1 for factor in factors):
            raise ValueError(f"the learning rate's factor in step {step} is {factors[0]}")
    if (profiling := config.profiling).enable_profiling:
        warmup, active = profiling.profiler_warmup, profiling.profiler_active
        wait = profiling.profile_freq - warmup - active
        torch.profiler.schedule(wait=wait, warmup=warmup, active=active)
    return notes


@contextlib.contextmanager
def _named(file: str) -> Iterator[None]:
    """Raise an error as one that names the file and the first cause."""
    try:
        yield
    except Exception as error:
        cause = root_cause(error)
        raise ValueError(f"{file}: {type(cause).__name__}: {cause}") from error


def _read_batches(config: Any, tokenizer: Any, readers: int) -> None:
    config = copy.deepcopy(config)
    training, validation = config.training, config.validation
    validation.seq_len, validation.local_batch_size = training.seq_len, training.local_batch_size
    # In this process: workers would be forked for one batch.
    training.dataloader.num_workers = validation.dataloader.num_workers = 0
    ranks = {"dp_world_size": readers, "dp_rank": 0}
    for validates in (False, True)[: 1 + validation.enable]:
        texts = (training, validation)[validates]
        with _named(texts.dataset_path or f"{texts.dataset}, which the options name"):
            loader = build_dataloader(validates, job_config=config, tokenizer=tokenizer, **ranks)
            if next(iter(loader), None) is None:
                raise ValueError("the texts are shorter than one batch")


def compare_with_model(config: Any, parts: list[Any]) -> None:
    """Raise ValueError where a native checkpoint that the job would load is of another model."""
    path, checkpoint = config.checkpoint.initial_load_path, config.checkpoint
    if not (checkpoint.enable and path) or checkpoint.initial_load_in_hf:
        return
    saved = FileSystemReader(path).read_metadata().state_dict_metadata
    for name, value in (pair for part in parts for pair in part.state_dict().items()):
        found = saved.get(name)
        if not isinstance(found, TensorStorageMetadata):
            raise ValueError(f"{path} has no {name}, which the model has")
        if found.size != value.shape:
            raise ValueError(f"{path}: {name} is {[*found.size]}, of the model {[*value.shape]}")


def main() -> None:
    """Rehearse the job that the only argument describes, and print what it raises, or nothing."""
    question, said = json.loads(sys.argv[1]), ""
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(SystemExit):
        config = ConfigManager().parse_args([*question.pop("argv"), f"--job.dump_folder={folder}"])
        build_tokenizer = get_train_spec(config.model.name).build_tokenizer_fn
        try:
            rehearse(config, build_tokenizer, **question)
        except BaseException as error:
            said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        print(f"{REHEARSED}{said}", flush=True)


if __name__ == "__main__":
    main()
