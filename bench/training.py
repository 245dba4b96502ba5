"""Starts a cell's training with torchrun, watches it, ends it with all its workers, and reads it.

A job's folder is that of a cell in a run: `cell.yaml`, and an `attempt-<k>` for each start, with
`train.log`, the log of every rank, and all that TorchTitan writes. No attempt goes on from another.
"""

from __future__ import annotations

import contextlib
import math
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from bench.torchrun import Job, environment_of, torchrun_command
from cookbook.base.paths import ROOT
from cookbook.observe.console import StepMetrics, read_active, read_peak_memory, read_time
from cookbook.observe.failure import find_reason
from cookbook.observe.metrics import read_steps
from cookbook.run.folder import CellFolder

# What torchrun gets to end its workers and say why; what is left after that is killed.
_GRACE_SECONDS = 15
_POLL_SECONDS = 0.2
_LOOK_SECONDS = 10
# As TorchTitan logs it: by the machine's clock, without a time zone.
_SECOND_STEP = re.compile(r"(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) .*step:\s+2\s")
# All processes of a job have this variable, whoever started them and whoever their parent is now.
_MARK = "COOKBOOK_BENCH_JOB"


@dataclass(frozen=True)
class Outcome:
    """What a training did.

    Attributes:
        reason: why it did not make all of its steps; None where it did.
        seconds: from its start to its end.
        steps: of the rank that knows the loss.
        active: what the hooks said was active; None without them.
        memory_gib: the most that any rank reserved.
        start_seconds: from its start to the end of its second step, by the log's clock; None
            where it did not come so far.
    """

    reason: str | None
    seconds: float
    steps: Sequence[StepMetrics]
    active: dict[str, Any] | None
    memory_gib: float | None
    command: Sequence[str]
    start_seconds: float | None = None

    @property
    def losses(self) -> list[float | None]:
        """By step."""
        return [step.loss for step in self.steps]


def train_all(
    jobs: Sequence[Job],
    note: Callable[[Job, Outcome], None],
    *,
    deadline: float = math.inf,
    least: float = 30,
    may_start: Callable[[Job, Sequence[Job]], bool] = lambda job, running: not running,
    look: Callable[[Job, Sequence[StepMetrics]], None] | None = None,
    enough: Callable[[], bool] = lambda: False,
) -> list[Job]:
    """Run jobs until all have ended or `deadline` (of `time.monotonic`) has come.

    What is under way at the deadline, or when the program is interrupted or told to end, is ended.

    Args:
        note: called with each job's outcome as it ends.
        least: with fewer seconds left than this, no job is started.
        may_start: whether a job may start beside those that run; by default, when none does.
        look: called now and then with the steps that a running job has made so far.
        enough: where it says so, what is under way is ended as at the deadline.

    Returns:
        The jobs for which there was no time.
    """
    waiting, running = list(jobs), list[Training]()
    next_look = time.monotonic() + _LOOK_SECONDS
    with _ended_by_sigterm():
        try:
            while waiting or running:
                for job in list(waiting):
                    late = time.monotonic() > deadline - least
                    if not late and may_start(job, [one.job for one in running]):
                        waiting.remove(job)
                        running.append(Training(job))
                if not running:
                    break
                time.sleep(_POLL_SECONDS)
                is_late = time.monotonic() > deadline or enough()
                end([one for one in running if is_late or one.seconds > one.job.seconds])
                for training in [one for one in running if one.has_ended()]:
                    running.remove(training)
                    note(training.job, training.outcome())
                if look and time.monotonic() > next_look:
                    next_look = time.monotonic() + _LOOK_SECONDS
                    for training in running:
                        look(training.job, training.steps())
        finally:
            end(running)
    return waiting


def train_one(job: Job, deadline: float = math.inf) -> Outcome:
    """Run a job alone; end it at `deadline`."""
    outcomes: list[Outcome] = []
    train_all(
        [job], lambda job, outcome: outcomes.append(outcome), deadline=deadline, least=-math.inf
    )
    return outcomes[0]


def end(trainings: Sequence[Training]) -> None:
    """End these and all their processes, and no other's."""
    for training in trainings:
        training.ask_to_end()
    deadline = time.monotonic() + _GRACE_SECONDS
    for training in trainings:
        training.wait_until(deadline)


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let `kill` and `timeout` end the program as Ctrl-C does, with what it has started."""

    def leave(number: int, frame: FrameType | None) -> None:
        # A second one, as `timeout` and `kill` send together, must not cut the cleaning short.
        signal.signal(number, signal.SIG_IGN)
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Training:
    """A job's torchrun under way."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._record = job.cell.record()
        folder = CellFolder(job.folder)
        self._attempt = folder.next_attempt()
        self._attempt.path.mkdir(parents=True)
        self._record.write(folder.record)
        self._command = torchrun_command(job, self._attempt)
        self._mark = uuid.uuid4().hex
        # torchrun and compilers leave files there when they are killed.
        self._temporary = tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True)
        self._stopped = ""
        self._started, self._began = time.monotonic(), datetime.now()
        self._ended: float | None = None
        environment = environment_of(job, self._attempt) | {
            "TMPDIR": self._temporary.name,
            _MARK: self._mark,
        }
        with self._attempt.log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C is for the benchmark, which then ends its jobs.
                start_new_session=True,
            )

    @property
    def seconds(self) -> float:
        """Since its start, until its end."""
        return (self._ended or time.monotonic()) - self._started

    def steps(self) -> list[StepMetrics]:
        """The steps so far, of the rank that knows the loss."""
        return read_steps(self._attempt, self._record)

    def has_ended(self) -> bool:
        """Whether torchrun has ended; then nothing of the job is left."""
        if self._process.poll() is None:
            return False
        self.wait_until(time.monotonic())
        return True

    def ask_to_end(self) -> None:
        """Tell torchrun to end; it ends its workers."""
        if self._process.poll() is None:
            self._stopped = f"stopped after {self.seconds:.0f} s"
            self._process.terminate()

    def wait_until(self, deadline: float) -> None:
        """Wait for torchrun's end; then kill what is left of the job.

        Its workers lead sessions of their own, which no signal to torchrun's group reaches.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, deadline - time.monotonic()))
        # Again until there is none: one that is killed may just have started another.
        while left := [one for one in psutil.process_iter() if _mark_of(one) == self._mark]:
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(left, timeout=1)
        self._process.wait()
        self._ended = self._ended or time.monotonic()
        self._temporary.cleanup()

    def outcome(self) -> Outcome:
        """What it did; only after its end."""
        steps, log = self.steps(), self._attempt.log
        return Outcome(
            reason=self._stopped or self._failure(len(steps)),
            seconds=round(self.seconds, 1),
            start_seconds=_seconds_until(_SECOND_STEP, log, self._began),
            steps=steps,
            active=read_active(log),
            memory_gib=read_peak_memory(self._attempt.logs()),
            command=self._command,
        )

    def _failure(self, steps: int) -> str | None:
        status, asked = self._process.returncode, self.job.cell.steps
        if status:
            return find_reason(self._attempt.path) or f"exit status {status}"
        return None if steps == asked else f"its log has {steps} of {asked} steps"


def _seconds_until(line: re.Pattern[str], log: Path, began: datetime) -> float | None:
    """From `began` to when the first such line was logged."""
    with log.open(encoding="utf-8", errors="replace") as lines:
        found = next(filter(None, map(line.search, lines)), None)
    if found is None:
        return None
    return round((read_time(found["time"]) - began).total_seconds(), 1)


def _mark_of(process: psutil.Process) -> str | None:
    try:
        mark: str | None = process.environ().get(_MARK)
    except (psutil.Error, OSError):
        return None
    return mark
