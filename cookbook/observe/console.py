"""Read TorchTitan's console lines: phases and times of any run, steps of runs without our hooks."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

RANK = re.compile(r"\[rank([0-9]{1,7})\]:")
COLOURS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_NUMBER = r"[-+]?(?:[0-9][0-9,]*(?:\.[0-9]+)?(?:e[-+]?[0-9]+)?|nan|inf)"
# Validation prints `validate step:` with a loss and a tps of its own: not a training step.
_STEP = re.compile(r"(?<!validate )\bstep:\s*([0-9]{1,12})(?=\s)")
_VALUE = re.compile(rf"\b(loss|grad_norm|memory|tps|tflops|mfu):\s*({_NUMBER})(?=[\sG%]|$)")
_MEMORY_PERCENT = re.compile(rf"GiB\(({_NUMBER})%\)")
_PEAK_MEMORY = re.compile(rb"memory:\s*(?:\x1b\[[0-9;]*m)?([0-9][0-9.,]*)GiB")
_TIME = re.compile(r"\[titan\] (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) - ")
_SAVED = re.compile(rb"Finished saving the checkpoint [^\n]*?in ([0-9]+\.[0-9]+) seconds")
_START = b"Training starts at step "


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """The metrics of one logged step; None where a value is not logged, or is `N/A`.

    A loss that is NaN or infinite is kept as such.
    """

    rank: int | None
    """Global rank; None for a console line without a `[rank0]:` prefix."""
    step: int
    loss: float | None
    grad_norm: float | None = None
    memory_gib: float | None = None
    """Peak reserved memory since the logged step before this one."""
    memory_percent: float | None = None
    tokens_per_second: float | None = None
    """TorchTitan's `tps`, per GPU."""
    tflops: float | None = None
    """Per GPU."""
    mfu: float | None = None
    """Percent of the GPU's BF16 peak."""
    time: float | None = None
    """Seconds since the epoch."""
    lr: float | None = None
    tokens_seen: float | None = None
    """Tokens of all ranks since the first step of the run."""
    validation_loss: float | None = None
    skipped_steps: float | None = None
    """Steps of this attempt so far whose gradients were not finite."""
    attempt: int = 0


class Phase(enum.StrEnum):
    """A rank's activity; the value is the text to show."""

    LOADING = "loading"
    """Imports, process group, tokenizer and data."""
    BUILDING = "building"
    COMPILING = "compiling"
    """torch.compile is set up, and the model sharded; most kernels are made in the first step."""
    LOADING_CHECKPOINT = "loading checkpoint"
    FIRST_STEP = "first step"
    TRAINING = "training"
    SAVING_CHECKPOINT = "saving checkpoint"
    FINISHING = "finishing"


# How the message begins that opens a phase. `Applied ...` opens none: TorchTitan also prints it
# without torch.compile. The last two are ours (`titan/tt_0_2_2/checkpoint.py`).
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


def parse_step(line: bytes, rank: int | None = None) -> StepMetrics | None:
    """Return the metrics in a line of `rank` (any rank: None); None where it holds none."""
    if b"step:" not in line or b"loss:" not in line:
        return None
    text = COLOURS.sub("", line.decode("utf-8", "replace")).rstrip()
    found = _STEP.search(text)
    if found is None:
        return None
    ranks = RANK.findall(text, 0, found.start())
    own, *others = re.split(r"\[rank[0-9]+\]:|\[titan\]", text[found.end() :])
    values: dict[str, float] = {}
    for key, value in _VALUE.findall(own):
        values.setdefault(key, float(value.replace(",", "")))
    # The last value of a line that another line cut off may be a part, unless it is `mfu`'s.
    if "loss" not in values or (others and not re.search(r"mfu:\s*(?:[0-9.,]+%|N/A)$", own)):
        return None
    if rank is not None and ranks[-1:] != [str(rank)]:
        return None
    percent = _MEMORY_PERCENT.search(own)
    return StepMetrics(
        rank=int(ranks[-1]) if ranks else None,
        step=int(found[1]),
        loss=values["loss"],
        grad_norm=values.get("grad_norm"),
        memory_gib=values.get("memory"),
        memory_percent=float(percent[1].replace(",", "")) if percent else None,
        tokens_per_second=values.get("tps"),
        tflops=values.get("tflops"),
        mfu=values.get("mfu"),
        time=_time_of(text),
    )


def parse_phase(line: bytes, rank: int | None = None) -> Phase | None:
    """Return the phase that a line of `rank` (any rank: None) opens; None where it opens none."""
    if b" - INFO - " not in line:
        return None
    text = line.decode("utf-8", "replace")
    found = _PHASE.search(text)
    ranks = RANK.findall(text, 0, found.start()) if found else []
    if found is None or (rank is not None and ranks[-1:] != [str(rank)]):
        return None
    return _PHASES[found[1]]


def read_console(log: Path, rank: int | None = None) -> Iterator[StepMetrics]:
    """Yield the metrics lines of a log in order, of one rank or of all.

    The last line is left out while its newline is missing: the job may still be writing it.
    """
    for line in lines_of(log):
        if line.endswith(b"\n") and (metrics := parse_step(line, rank)) is not None:
            yield metrics


def read_peak_memory(logs: Iterable[Path]) -> float | None:
    """Return the most GiB in any metrics line of these logs, over all ranks and steps."""
    shown = {text for log in logs for line in lines_of(log) for text in _PEAK_MEMORY.findall(line)}
    # TorchTitan prints -0.00GiB where the device has no memory statistics.
    return max((float(text.replace(b",", b"")) for text in shown), default=0.0) or None


def seconds_to_first_step(log: Path) -> float | None:
    """Return the time from the start of training to the first logged step."""
    start = None
    for line in lines_of(log):
        if _START in line:
            start = _time_of(line.decode("utf-8", "replace"))
        elif start is not None and (metrics := parse_step(line)) and metrics.time:
            return max(0.0, metrics.time - start)
    return None


def save_seconds(log: Path) -> list[float]:
    """Return how long each save of a checkpoint took."""
    return [float(found) for line in lines_of(log) for found in _SAVED.findall(line)]


def logged_seconds(log: Path) -> float | None:
    """Return the seconds from the first to the last line of TorchTitan; None without two."""
    titan = (line.decode("utf-8", "replace") for line in lines_of(log) if b"[titan]" in line)
    times = [found[1] for line in titan if (found := _TIME.search(line))]
    seconds = (read_time(times[-1]) - read_time(times[0])).total_seconds() if times else 0.0
    # Ranks' lines cross by milliseconds, and a clock may have been set back.
    return seconds if seconds > 0 else None


def read_time(time: str) -> datetime:
    """Parse the time of a TorchTitan line, on the clock of the node that wrote it."""
    return datetime.strptime(time, "%Y-%m-%d %H:%M:%S,%f")


def _time_of(text: str) -> float | None:
    found = _TIME.search(text)
    return read_time(found[1]).timestamp() if found else None


def lines_of(log: Path) -> Iterator[bytes]:
    """Yield the lines of a file; none where it cannot be read."""
    try:
        with log.open("rb") as file:
            yield from file
    except OSError:
        return
