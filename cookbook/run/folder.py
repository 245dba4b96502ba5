"""The folder of a cell in a run, and those of its attempts: every path in them has its name here.

PyTorch writes the data files of `step-N` first and `.metadata` last, which lists for each tensor
its bytes in a file. So a checkpoint without `.metadata` was never finished, and one with shorter
files was damaged since; changed bytes are not detected. `.metadata` is a pickle, read here without
torch.
"""

import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class _Below(str):
    """A name below `path` of its owner; reads as the whole path."""

    __slots__ = ()

    def __get__(self, owner: Any, kind: type) -> Path:
        path: Path = owner.path
        return path / self


@dataclass(frozen=True)
class Attempt:
    """One start of a cell's script."""

    path: Path
    number: int

    log = _Below("train.log")  # the lines of the shown ranks of every node, from torchrun
    # The script and the request of this attempt, if later attempts have others.
    script, record = _Below("train.sh"), _Below("cell.yaml")
    # Versions, GPUs, nodes and active features, as the training process reports them.
    environment = _Below("environment.json")
    metrics = _Below("metrics.jsonl")  # a JSON object a logged step, of the rank with the loss
    router_load = _Below("router_load.jsonl")  # tokens by layer and expert at the logged steps
    resumption = _Below("resume.json")  # where the attempt continued (`run.status`)
    preflight = _Below("preflight.json")  # what the node checks before training found
    stop = _Below("stop")  # a request to end at a checkpoint, which the ranks poll for
    stopped = _Below("stopped")  # the ranks' answer: the job's id and the saved step
    end = _Below("end.json")  # how the attempt ended (`run.status`)
    stacks = _Below("stacks")  # stack traces of ranks that made no step for long, a file each
    traces = _Below("profile_traces")  # of TorchTitan's profiler, a folder for each traced step

    def logs(self) -> list[Path]:
        """Return every log that may hold metrics lines, of all ranks."""
        return [self.log, *self.path.glob("ranks/*/attempt_*/*/stdout.log")]


@dataclass(frozen=True)
class CellFolder:
    """The folder of a cell; its name is the cell's in the run."""

    path: Path

    record = _Below("cell.yaml")  # the newest request for the cell (`run.record`)
    script = _Below("train.sh")  # what the job runs, the same bytes that `render` prints
    status = _Below("status.json")  # the state, written by the job alone
    job = _Below("job.json")  # the job's id, from its submitter, or from the job if that failed
    end = _Below("end.json")  # how the job ended, from whoever saw it: Slurm forgets
    job_files = _Below("job")  # submitit's files and the output of the batch step
    wandb_id = _Below("wandb-id")  # of the one W&B run that all attempts write to
    submission = _Below("job/submission.sh")  # the batch file

    @property
    def name(self) -> str:
        return self.path.name

    def attempts(self) -> list[Attempt]:
        numbers = (path.name.removeprefix("attempt-") for path in self.path.glob("attempt-[0-9]*"))
        return [self.attempt(number) for number in sorted(map(int, filter(str.isdecimal, numbers)))]

    def attempt(self, number: int) -> Attempt:
        """Return the attempt of this number, whether it exists or not."""
        return Attempt(self.path / f"attempt-{number}", number)

    def next_attempt(self) -> Attempt:
        attempts = self.attempts()
        return self.attempt(attempts[-1].number + 1 if attempts else 0)

    def newest_log(self) -> Path | None:
        """Return the log of the last attempt that has one, else the newest log of the job."""
        logs = [attempt.log for attempt in reversed(self.attempts()) if attempt.log.exists()]
        of_job = self.job_files.glob("*.log")
        logs += sorted(of_job, key=lambda path: path.stat().st_mtime, reverse=True)
        return logs[0] if logs else None


_METADATA = ".metadata"
# TorchTitan takes this for a checkpoint too, and then cannot load it.
_HUGGING_FACE = "model.safetensors.index.json"
# State that training needs besides the model, by the prefix of its entries' names.
PARTS = ("optimizer", "lr_scheduler", "dataloader", "train_state")


@dataclass(frozen=True)
class Checkpoint:
    """One `step-N` folder."""

    path: Path
    step: int
    damage: str | None  # why it cannot be loaded
    states: frozenset[str] = frozenset()  # those of PARTS that it holds
    text_readers: int = 0  # data-parallel ranks that saved their position in the texts


def saved_steps(folder: Path) -> list[tuple[int, Path]]:
    """Return step and path of each `step-N` in `folder`, whole or not, the newest first."""
    names = ((re.fullmatch(r"step-([0-9]+)", path.name), path) for path in folder.glob("step-*"))
    found = [(int(match[1]), path) for match, path in names if match and path.is_dir()]
    return sorted(found, reverse=True)


def read_checkpoint(step: int, path: Path) -> Checkpoint:
    """Read which state the checkpoint in `path` holds, and whether it is whole."""
    if not (path / _METADATA).is_file():
        is_exported = (path / _HUGGING_FACE).is_file()
        damage = None if is_exported else f"has no {_METADATA}, so it was not written to its end"
        return Checkpoint(path, step, damage)
    needed: dict[str, int] = {}
    try:
        with (path / _METADATA).open("rb") as file:
            metadata = _InertUnpickler(file).load()
        for place in metadata.storage_data.values():
            end = place.offset + place.length
            needed[place.relative_path] = max(needed.get(place.relative_path, 0), end)
        names = [str(name) for name in metadata.state_dict_metadata]
    except Exception as error:
        # A cut pickle may raise anything.
        damage = f"{_METADATA} cannot be read: {type(error).__name__}: {error}"
        return Checkpoint(path, step, damage)
    damage = None
    for name, size in sorted(needed.items()):
        found = (path / name).stat().st_size if (path / name).exists() else None
        if found is None or found < size:
            has = "is missing" if found is None else f"has {found:,} of {size:,} bytes"
            damage = f"{name} {has}"
            break
    return Checkpoint(
        path,
        step,
        damage,
        frozenset(name.partition(".")[0] for name in names) & frozenset(PARTS),
        sum(name.startswith("dataloader.dp_rank_") for name in names),
    )


class _Inert:
    """Stands for any object of the pickle, whose classes are torch's."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        # The state of a frozen dataclass with slots is a list. Nothing below reads those.
        self.__dict__.update(state if isinstance(state, dict) else {})


class _InertUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return type(name, (_Inert,), {})
