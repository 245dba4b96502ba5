"""Define every path in a cell's folder and its attempts' folders, and read its checkpoints.

PyTorch writes the data files of `step-N` first. It writes `.metadata` last, which lists the file
and byte range of each tensor. So a checkpoint without `.metadata` was never finished, and one with
files shorter than listed was damaged later. Changed bytes are not detected.
"""

import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar


class _Below(str):
    """A file's name as a descriptor: after `log = _Below("x")`, `a.log` is `a.path / "x"`."""

    __slots__ = ()

    def __get__(self, owner: Any, kind: type) -> Path:
        return Path(owner.path, self)


@dataclass(frozen=True)
class Attempt:
    """One start of a cell's training."""

    path: Path
    number: int

    log = _Below("train.log")  # console output of all nodes, but of only a few ranks on each
    script = _Below("train.sh")  # what this attempt runs, everything resolved
    record = _Below("cell.yaml")  # a copy of its request, made only if the next attempt changes it
    # Versions, GPUs, nodes and active features, reported by the training process.
    environment = _Below("environment.json")
    metrics = _Below("metrics.jsonl")  # one JSON object per logged step or validation
    router_load = _Below("router_load.jsonl")  # tokens per layer and expert at logged steps
    resumption = _Below("resume.json")  # where the attempt resumed
    texts = _Below("texts.json")  # what is in texts, tokenizer, weights and what it saved
    preflight = _Below("preflight.json")  # findings of the node checks
    stop = _Below("stop")  # request to save and exit; the ranks poll for it
    stopped = _Below("stopped")  # the ranks' reply to `stop`: job id and saved step
    end = _Below("end.json")  # how the attempt ended
    stacks = _Below("stacks")  # stack traces of hung ranks, one file per rank
    traces = _Below("profile_traces")  # TorchTitan's profiler: one folder per traced step

    def logs(self) -> list[Path]:
        """Return every log, of any rank, that may contain lines with metrics."""
        return [self.log, *self.path.glob("ranks/*/attempt_*/*/stdout.log")]


@dataclass(frozen=True)
class CellFolder:
    """The folder of a cell; the folder's name is the cell's name."""

    path: Path

    record = _Below("cell.yaml")  # the newest request for the cell (`run.record`)
    script = _Below("train.sh")  # the script to read, copy and submit, as `render` prints it
    status = _Below("status.json")  # the cell's state; after submission, only the job writes it
    job = _Below("job.json")  # the job's id, written by the submitter, else by the job itself
    end = _Below("end.json")  # how the job ended, kept because Slurm forgets jobs
    job_files = _Below("job")  # the batch step's output
    latest = _Below("latest")  # a link to the newest attempt
    wandb_id = _Below("wandb-id")  # the W&B run's id, the same until a roll-back
    names: ClassVar = frozenset(value for value in vars().values() if isinstance(value, _Below))

    @property
    def name(self) -> str:
        return self.path.name

    def attempts(self) -> list[Attempt]:
        numbers = (path.name.removeprefix("attempt-") for path in self.path.glob("attempt-[0-9]*"))
        return [self.attempt(number) for number in sorted(map(int, filter(str.isdecimal, numbers)))]

    def attempt(self, number: int) -> Attempt:
        """Return the attempt with this number, whether or not it has a folder yet."""
        return Attempt(self.path / f"attempt-{number}", number)

    def next_attempt(self) -> Attempt:
        attempts = self.attempts()
        return self.attempt(attempts[-1].number + 1 if attempts else 0)

    def checkpoints(self, options: Mapping[str, Any]) -> Path:
        """Return the cell's checkpoint folder: `checkpoint.folder` in the folder of the cell.

        If `checkpoint.folder` is an absolute path, return its subfolder RUN/CELL.
        """
        path, folder = self.path.resolve(), Path(options.get("checkpoint.folder") or "checkpoint")
        return folder / path.parent.name / path.name if folder.is_absolute() else path / folder

    def newest_log(self) -> Path | None:
        """Return the log of the last attempt that has one, else the job's newest log."""
        logs = [attempt.log for attempt in reversed(self.attempts()) if attempt.log.exists()]
        of_job = self.job_files.glob("*.log")
        logs += sorted(of_job, key=lambda path: path.stat().st_mtime, reverse=True)
        return logs[0] if logs else None


_METADATA = ".metadata"
# TorchTitan also treats a folder with this file as a checkpoint, but cannot resume from it.
_HUGGING_FACE = "model.safetensors.index.json"
# Prefixes of the entries that training needs in a checkpoint besides the model's.
PARTS = ("optimizer", "lr_scheduler", "dataloader", "train_state")


@dataclass(frozen=True)
class Checkpoint:
    """One `step-N` folder."""

    path: Path
    step: int
    damage: str | None  # why it is incomplete or damaged; None if it is neither
    states: frozenset[str] = frozenset()  # which of PARTS the checkpoint contains
    text_readers: int = 0  # number of data-parallel ranks with a saved data-loader state
    is_exported: bool = False  # whether it is a Hugging Face export, with weights only
    shapes: Mapping[str, list[int]] = field(default_factory=dict)  # of the tensors in it


def saved_steps(folder: Path) -> list[tuple[int, Path]]:
    """Return the step and path of each `step-N` in `folder`, complete or not, newest first."""
    names = ((re.fullmatch(r"step-([0-9]+)", path.name), path) for path in folder.glob("step-*"))
    found = [(int(match[1]), path) for match, path in names if match and path.is_dir()]
    return sorted(found, reverse=True)


def read_checkpoint(step: int, path: Path) -> Checkpoint:
    """Read which of PARTS the checkpoint in `path` contains, and whether it is complete."""
    if not (path / _METADATA).is_file():
        is_exported = (path / _HUGGING_FACE).is_file()
        damage = None if is_exported else f"has no {_METADATA}, so it was never finished"
        return Checkpoint(path, step, damage, is_exported=is_exported)
    needed: dict[str, int] = {}
    try:
        with (path / _METADATA).open("rb") as file:
            metadata = _InertUnpickler(file).load()
        for place in metadata.storage_data.values():
            end = place.offset + place.length
            needed[place.relative_path] = max(needed.get(place.relative_path, 0), end)
        names = [str(name) for name in metadata.state_dict_metadata]
        sizes = {n: getattr(one, "size", None) for n, one in metadata.state_dict_metadata.items()}
        shapes = {str(n): [*one.arguments[0]] for n, one in sizes.items() if one is not None}
    except Exception as error:
        # A truncated pickle may raise any exception.
        damage = f"{_METADATA} cannot be read: {type(error).__name__}: {error}"
        return Checkpoint(path, step, damage)
    for name, size in sorted(needed.items()):
        found = (path / name).stat().st_size if (path / name).exists() else None
        if found is None or found < size:
            has = "is missing" if found is None else f"has {found:,} of {size:,} bytes"
            return Checkpoint(path, step, f"{name} {has}")
    states = frozenset(name.partition(".")[0] for name in names) & set(PARTS)
    readers = sum(name.startswith("dataloader.dp_rank_") for name in names)
    return Checkpoint(path, step, None, states, readers, shapes=shapes)


class _Inert:
    """Stand-in for every object in the pickle, so that torch's classes are not imported."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {})


class _InertUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return type(name, (_Inert,), {})
