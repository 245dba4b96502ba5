"""The folder of a cell in a run, and those of its attempts: every path in them has its name here.

<cell>/cell.yaml, train.sh, status.json, job.json, end.json, job/, checkpoint/, checkpoint-damaged/
       attempt-<k>/metrics.jsonl, train.log, train.sh, cell.yaml, environment.json,
                   router_load.jsonl, resume.json, preflight.json, stop, stopped, end.json, ranks/,
                   stacks/, tb/, comm_traces/, profile_traces/
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class _Below:
    """A name below `path` of its owner; reads as the whole path."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, owner: Any, kind: type) -> Path:
        path: Path = owner.path
        return path / self.name


@dataclass(frozen=True)
class Attempt:
    """One start of a cell's script."""

    path: Path
    number: int

    # torchrun's output: the lines of the shown ranks of every node.
    log = _Below("train.log")
    # The script and the request of this attempt, if later attempts have others.
    script = _Below("train.sh")
    record = _Below("cell.yaml")
    # Versions, GPUs, nodes and active features, as the training process reports them.
    environment = _Below("environment.json")
    # A JSON object for each logged step, written by our hooks on the rank that has the loss.
    metrics = _Below("metrics.jsonl")
    # Tokens by layer and expert at the logged steps.
    router_load = _Below("router_load.jsonl")
    # Where the attempt continued (`run.status`).
    resumption = _Below("resume.json")
    # What the node checks before training found.
    preflight = _Below("preflight.json")
    # A request to end at a checkpoint, which the ranks poll for.
    stop = _Below("stop")
    # The ranks' answer: the job's id and the saved step.
    stopped = _Below("stopped")
    # How the attempt ended (`run.status`).
    end = _Below("end.json")
    # Stack traces of ranks that made no step for long, a file each.
    stacks = _Below("stacks")
    # Traces of TorchTitan's profiler, a folder for each step that ended one.
    traces = _Below("profile_traces")

    def logs(self) -> list[Path]:
        """Return every log that may hold metrics lines, of all ranks."""
        logs = [self.log, *self.path.glob("ranks/*/attempt_*/*/stdout.log")]
        return [log for log in logs if log.is_file()]


@dataclass(frozen=True)
class CellFolder:
    """The folder of a cell; its name is the cell's in the run."""

    path: Path

    # The newest request for the cell (`run.record`).
    record = _Below("cell.yaml")
    # The script that the job runs, the same bytes that `render` prints.
    script = _Below("train.sh")
    # The state, written by the job alone.
    status = _Below("status.json")
    # The job's id, written by its submitter, or by the job if that failed.
    job = _Below("job.json")
    # How the job ended in Slurm, written by whoever saw it: Slurm forgets.
    end = _Below("end.json")
    # submitit's files and the output of the batch step.
    job_files = _Below("job")
    # The id of the one W&B run that all attempts write to.
    wandb_id = _Below("wandb-id")
    # The batch file.
    submission = _Below("job/submission.sh")

    @property
    def name(self) -> str:
        return self.path.name

    def attempts(self) -> list[Attempt]:
        """Return the attempts so far, in order."""
        paths = _by_number(self.path, "attempt-")
        return [Attempt(path, int(path.name.removeprefix("attempt-"))) for path in paths]

    def attempt(self, number: int) -> Attempt:
        """Return the attempt of this number, whether it exists or not."""
        return Attempt(self.path / f"attempt-{number}", number)

    def next_attempt(self) -> Attempt:
        """Return the attempt of a script that starts now."""
        attempts = self.attempts()
        return self.attempt(attempts[-1].number + 1 if attempts else 0)

    def newest_log(self) -> Path | None:
        """Return the log of the last attempt that has one, else the newest log of the job."""
        for attempt in reversed(self.attempts()):
            if attempt.log.exists():
                return attempt.log
        logs = sorted(self.job_files.glob("*.log"), key=lambda path: path.stat().st_mtime)
        return logs[-1] if logs else None


def _by_number(folder: Path, prefix: str) -> list[Path]:
    """Return the paths `<prefix><number>` in `folder` by their number: 10 comes after 9."""
    pattern = re.compile(rf"{prefix}([0-9]+)")
    found = [(pattern.fullmatch(path.name), path) for path in folder.glob(f"{prefix}*")]
    return [path for _, path in sorted((int(match[1]), path) for match, path in found if match)]
