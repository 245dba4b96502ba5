"""Read a training job's metrics and router load from our hooks' files, and its console output."""

import contextlib
import enum
import re
import statistics
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from cookbook.run.folder import Attempt, CellFolder
from cookbook.run.status import read_resumptions

T = TypeVar("T")
RANK = re.compile(r"\[rank([0-9]{1,7})\]:")
COLOURS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_PEAK_MEMORY = re.compile(rb"memory:\s*(?:\x1b\[[0-9;]*m)?([0-9][0-9.,]*)GiB")
_TIME = re.compile(rb"\[titan\] (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) - ")
_SAVED = re.compile(rb"Finished saving the checkpoint [^\n]*?in ([0-9]+\.[0-9]+) seconds")
_SAVED_LAST = re.compile(rb"Saving a (?:full|model only) checkpoint .*at last step")
_START = b"Training starts at step "
# Not `validate step:`, which a validation logs.
_STEP = re.compile(rb" - INFO - (?:\x1b\[[0-9;]*m)?step:")


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """The metrics of one logged step; those that were not logged are None."""

    step: int
    loss: float | None = None  # may be NaN or infinite
    grad_norm: float | None = None
    memory_gib: float | None = None  # peak reserved memory since the previous logged step
    tokens_per_second: float | None = None  # TorchTitan's `tps`, per GPU
    tflops: float | None = None  # per GPU
    mfu: float | None = None  # percent of the GPU's BF16 peak
    time: float | None = None  # seconds since the epoch
    validation_loss: float | None = None
    lr: float | None = None  # learning rate
    tokens_seen: float | None = None  # of all ranks, since the start
    skipped_steps: float | None = None  # steps with non-finite gradients in this attempt so far
    rank: int | None = None  # global rank
    attempt: int = 0


class Phase(enum.StrEnum):
    """A rank's activity; the value is the text shown to users."""

    LOADING = "loading"  # imports, process group, tokenizer and data
    BUILDING = "building"
    COMPILING = "compiling"  # torch.compile set-up and model sharding
    LOADING_CHECKPOINT = "loading checkpoint"
    FIRST_STEP = "first step"
    TRAINING = "training"
    SAVING_CHECKPOINT = "saving checkpoint"
    FINISHING = "finishing"


_PHASES = {
    "Starting job: ": Phase.LOADING,
    "Building device mesh": Phase.LOADING,
    "Building ": Phase.BUILDING,
    "Compiling each TransformerBlock": Phase.COMPILING,
    "Loading the checkpoint from ": Phase.LOADING_CHECKPOINT,
    _START.decode(): Phase.FIRST_STEP,
    "Saving the checkpoint ": Phase.SAVING_CHECKPOINT,
    "Finished saving the checkpoint ": Phase.TRAINING,
    "Training completed": Phase.FINISHING,
    "Process group destroyed": Phase.FINISHING,
    "cookbook: waiting until the checkpoint is ": Phase.SAVING_CHECKPOINT,
    "cookbook: the checkpoint is copied": Phase.TRAINING,
}
_PHASE = re.compile(rf"\[titan\] [^\[\]]* - INFO - ({'|'.join(map(re.escape, _PHASES))})")


def read_peak_memory(logs: Iterable[Path]) -> float | None:
    """Return the highest memory in GiB in these logs, over all ranks and steps."""
    shown = {text for log in logs for line in lines_of(log) for text in _PEAK_MEMORY.findall(line)}
    # TorchTitan prints -0.00GiB if the device has no memory statistics.
    return max((float(text.replace(b",", b"")) for text in shown), default=0.0) or None


def seconds_to_first_step(log: Path) -> float | None:
    """Return the seconds from the start of training to the first logged step."""
    start = None
    for line in lines_of(log):
        if _START in line:
            start = _time_of(line)
        elif start is not None and _STEP.search(line) and (logged := _time_of(line)):
            return max(0.0, logged - start)
    return None


def longest_save(attempts: Iterable[Attempt]) -> float | None:
    """Return the duration of the longest checkpoint save, in seconds; None without a save."""
    lines = (line for attempt in attempts for line in lines_of(attempt.log))
    return max((float(found) for line in lines for found in _SAVED.findall(line)), default=None)


def has_saved(attempt: Attempt, is_async: bool = False) -> bool:
    """Return whether the attempt's log says that it has written a checkpoint.

    `is_async`: the line of a save comes before its files, so only the save before it is written.
    """
    saves = 0
    for line in lines_of(attempt.log):
        if b"[rank0]:" in line:
            saves += _SAVED.search(line) is not None
            if saves > is_async or _SAVED_LAST.search(line):
                return True
    return attempt.stopped.exists()


def logged_seconds(log: Path) -> float | None:
    """Return the seconds from TorchTitan's first log line to its last; None without two lines."""
    times = [moment for line in lines_of(log) if (moment := _time_of(line))]
    seconds = times[-1] - times[0] if times else 0.0
    return seconds if seconds > 0 else None


def _time_of(line: bytes) -> float | None:
    found = _TIME.search(line)
    return datetime.fromisoformat(found[1].decode()).timestamp() if found else None


def lines_of(log: Path) -> Iterator[bytes]:
    """Yield the lines of a file; none if it cannot be read."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        yield from file


# Skip all but the last 60,000 console lines or so: 250 steps if 256 ranks print every step.
_LOOK_BACK_BYTES = 16 << 20
# The time left follows from this many steps.
_NUM_RECENT = 20


def read_steps(attempt: Attempt) -> list[StepMetrics]:
    """Return the logged steps of the rank that computes the loss, in order."""
    steps: list[StepMetrics] = []
    for metrics in _parse(_METRICS, lines_of(attempt.metrics)):
        if metrics.loss is not None:
            steps.append(replace(metrics, attempt=attempt.number))
        elif steps and steps[-1].step == metrics.step:
            steps[-1] = replace(steps[-1], validation_loss=metrics.validation_loss)
    return steps


def step_seconds(steps: Iterable[StepMetrics]) -> float | None:
    """Return the median step time in seconds; None if too few steps were logged."""
    times = pairwise((one.step, one.time) for one in steps if one.time is not None)
    seconds = [(end - start) / (new - old) for (old, start), (new, end) in times if new > old]
    return statistics.median(seconds) if len(seconds) >= 3 else None


def collect_steps(cell: CellFolder) -> list[StepMetrics]:
    """Return the cell's loss curve: the steps of all attempts, in increasing order.

    An attempt that has logged a step replaces all steps after the one that it resumed from.
    """
    steps, attempts = list[StepMetrics](), cell.attempts()
    resumed = {one.attempt: one.step or 0 for one in read_resumptions(attempts)}
    for attempt in attempts:
        if own := read_steps(attempt):
            start = resumed.get(attempt.number, own[0].step - 1)
            steps = [one for one in steps if one.step <= start] + own
    return steps


@dataclass(frozen=True, slots=True)
class LoadStep:
    """The load of each layer's experts from `first_step` to `step`."""

    first_step: int
    step: int
    is_forced: Annotated[bool, Field(validation_alias="forced")]
    layers: tuple[int, ...]
    busiest_over_mean: tuple[float, ...]  # busiest expert's load / mean load (MaxVio + 1)
    starved_experts: tuple[int, ...]  # number of experts with less than a tenth of the mean load


def collect_router_load(cell: CellFolder) -> list[LoadStep]:
    """Return the router load over all attempts, ordered by step; empty if none was logged.

    A resumed attempt replaces the steps that it repeats. If the model's layers have changed,
    it replaces all earlier steps.
    """
    steps: list[LoadStep] = []
    for attempt in cell.attempts():
        for found in _parse(_LOAD, lines_of(attempt.router_load)):
            while steps and steps[-1].step >= found.first_step:
                steps.pop()
            if steps and steps[-1].layers != found.layers:
                steps.clear()
            steps.append(found)
    return steps


class Tail:
    """Follow a running attempt: each `read` updates what one rank has logged so far."""

    def __init__(self, attempt: Attempt, rank: int) -> None:
        self._rank = rank
        self._metrics, self._console = GrowingFile(attempt.metrics), GrowingFile(attempt.log)
        self.step: StepMetrics | None = None
        self.phase: Phase | None = None
        self.validation_loss: float | None = None
        self.recent: deque[StepMetrics] = deque(maxlen=_NUM_RECENT)

    def read(self) -> list[bytes]:
        """Return the new console lines of all ranks."""
        steps = _parse(_METRICS, self._metrics.lines())
        for step in steps:
            self.validation_loss = step.validation_loss or self.validation_loss
        lines = self._console.lines()
        for line in lines:
            # The first phase message comes after the imports; before it, any line means LOADING.
            self.phase = self.phase or Phase.LOADING
            text = line.decode("utf-8", "replace") if b" - INFO - " in line else ""
            if found := _PHASE.search(text):
                ranks = RANK.findall(text, 0, found.start())
                if ranks[-1:] == [str(self._rank)]:
                    self.phase = _PHASES[found[1]]
        trained = [step for step in steps if step.loss is not None]
        if trained and self.phase not in (Phase.SAVING_CHECKPOINT, Phase.FINISHING):
            self.phase = Phase.TRAINING
        self.recent.extend(trained)
        self.step = self.recent[-1] if self.recent else None
        return lines


class GrowingFile:
    """Read the complete lines appended to a file since the last read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.offset = 0

    def lines(self) -> list[bytes]:
        with contextlib.suppress(OSError), self._path.open("rb") as file:
            end = file.seek(0, 2)
            # Read a truncated or replaced file from its start.
            start = max(self.offset if self.offset <= end else 0, end - _LOOK_BACK_BYTES)
            file.seek(start)
            text = file.read(end - start)
            whole = text.rfind(b"\n") + 1
            self.offset = start + whole
            return text[:whole].splitlines()
        return []


_METRICS, _LOAD = TypeAdapter(StepMetrics), TypeAdapter(LoadStep)


def _parse(kind: TypeAdapter[T], lines: Iterable[bytes]) -> list[T]:
    found = list[T]()
    for line in lines:
        with contextlib.suppress(ValidationError):
            found.append(kind.validate_json(line))
    return found
