"""The folder of a cell in a run, and those of its attempts: every path in them has its name here.

<cell>/cell.yaml, train.sh, status.json, job.json, end.json, job/, checkpoint/, checkpoint-damaged/
       attempt-<k>/metrics.jsonl, train.log, train.sh, environment.json, router_load.jsonl,
                   resume.json, preflight.json, stop, stopped, end.json, ranks/, stacks/, tb/,
                   comm_traces/, profile_traces/
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_ATTEMPT = "attempt-"


@dataclass(frozen=True)
class Attempt:
    """One start of a cell's script."""

    path: Path
    number: int

    @property
    def log(self) -> Path:
        """What torchrun printed: the lines of the shown ranks of every node."""
        return self.path / "train.log"

    @property
    def script(self) -> Path:
        """The script that ran, where a later attempt has another."""
        return self.path / "train.sh"

    @property
    def environment(self) -> Path:
        """What the training process said of itself: versions, GPUs, nodes, what was active."""
        return self.path / "environment.json"

    @property
    def metrics(self) -> Path:
        """A JSON object for each logged step; our hooks write it on the rank that has the loss."""
        return self.path / "metrics.jsonl"

    @property
    def router_load(self) -> Path:
        """Tokens by layer and expert at the logged steps, where the training process counts."""
        return self.path / "router_load.jsonl"

    @property
    def resumption(self) -> Path:
        """Where it continued, and what it passed over: `run.attempts` reads and writes it."""
        return self.path / "resume.json"

    @property
    def preflight(self) -> Path:
        """What the look at the nodes before training found; `job.preflight` writes it."""
        return self.path / "preflight.json"

    @property
    def stop(self) -> Path:
        """Made by whoever wants it to end at a checkpoint; the ranks look for it."""
        return self.path / "stop"

    @property
    def stopped(self) -> Path:
        """That it has ended so: the ranks write the job's id and the step that they saved."""
        return self.path / "stopped"

    @property
    def end(self) -> Path:
        """How it ended: `run.attempts` reads and writes it."""
        return self.path / "end.json"

    @property
    def stacks(self) -> Path:
        """Where a rank that made no step for long stood, in a file for each such rank."""
        return self.path / "stacks"

    @property
    def traces(self) -> Path:
        """What TorchTitan's profiler wrote, in a folder for each step that ended a trace."""
        return self.path / "profile_traces"

    def rank_logs(self, local_rank: int) -> list[list[Path]]:
        """The standard outputs of a local rank, node by node, each node's in order of restarts."""
        return [
            [
                log
                for path in _numbered(node)
                if (log := path / str(local_rank) / "stdout.log").is_file()
            ]
            for node in sorted((self.path / "ranks").glob("*"))
        ]

    def logs(self) -> list[Path]:
        """Every log that may hold metrics lines, of all ranks that there are."""
        logs = [self.log, *self.path.glob("ranks/*/attempt_*/*/stdout.log")]
        return [log for log in logs if log.is_file()]


@dataclass(frozen=True)
class CellFolder:
    """The folder of a cell; its name is the cell's in the run."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def record(self) -> Path:
        """What was asked: `run.record` reads and writes it."""
        return self.path / "cell.yaml"

    @property
    def script(self) -> Path:
        """The script that the job runs, the same bytes that `render` prints."""
        return self.path / "train.sh"

    @property
    def status(self) -> Path:
        """How far the job is; written by the job alone."""
        return self.path / "status.json"

    @property
    def job(self) -> Path:
        """The job's id; written by the one who submits it, and by the job where that failed."""
        return self.path / "job.json"

    @property
    def end(self) -> Path:
        """How Slurm said that the job ended; written by whoever saw it, since Slurm forgets."""
        return self.path / "end.json"

    @property
    def job_files(self) -> Path:
        """submitit's files, and what the batch step printed."""
        return self.path / "job"

    @property
    def submission(self) -> Path:
        """The batch file, by which Slurm knows the job where its id was not noted."""
        return self.job_files / "submission.sh"

    def attempts(self) -> list[Attempt]:
        """The attempts so far, in order."""
        found = [
            Attempt(path, int(number))
            for path in self.path.glob(f"{_ATTEMPT}*")
            # Not `isdigit`: that takes a superscript two, which is no number.
            if (number := path.name.removeprefix(_ATTEMPT)).isascii() and number.isdecimal()
        ]
        return sorted(found, key=lambda attempt: attempt.number)

    def attempt(self, number: int) -> Attempt:
        """The attempt of this number, there or not."""
        return Attempt(self.path / f"{_ATTEMPT}{number}", number)

    def next_attempt(self) -> Attempt:
        """The attempt that a script which starts now is."""
        attempts = self.attempts()
        return self.attempt(attempts[-1].number + 1 if attempts else 0)

    def newest_log(self) -> Path | None:
        """The log of the last attempt that has one, else what the job said before there was one."""
        for attempt in reversed(self.attempts()):
            if attempt.log.exists():
                return attempt.log
        said = sorted(self.job_files.glob("*.log"), key=lambda path: path.stat().st_mtime)
        return said[-1] if said else None


def _numbered(node: Path) -> list[Path]:
    """torchrun's `attempt_<k>` folders by their number: 10 comes after 9."""
    numbered = [
        (int(number), path)
        for path in node.glob("attempt_*")
        if (number := path.name.rpartition("_")[2]).isascii() and number.isdecimal()
    ]
    return [path for _, path in sorted(numbered)]
