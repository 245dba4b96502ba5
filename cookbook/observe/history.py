"""What became of a cell's attempts: their steps, why each ended, what was lost."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

from cookbook.observe.console import save_seconds, seconds_to_first_step
from cookbook.observe.metrics import read_steps
from cookbook.run.attempts import AttemptEnd, Cause, read_attempt_end, read_resumptions
from cookbook.run.folder import Attempt, CellFolder
from cookbook.run.record import CellRecord

# Steps that say what is usual.
_FEWEST = 3
# Options that change neither how long a step takes nor how a checkpoint is saved. A resumed run may
# be asked for other ones, such as longer sequences, and then its earlier attempts are no measure.
_NOT_OF_SAVES = ("training.steps", "metrics.", "job.", "validation.", "profiling.")
_NOT_OF_STEPS = (*_NOT_OF_SAVES, "checkpoint.")


@dataclass(frozen=True, slots=True)
class AttemptSummary:
    """One attempt; what is not known is None.

    Attributes:
        seconds: from its start to its end.
        steps_lost: steps of it that a later attempt had to make again.
        effective_seconds: spent on the steps that were kept.
    """

    attempt: int
    first_step: int | None
    last_step: int | None
    seconds: float | None
    cause: str | None
    reason: str | None
    decision: str | None
    left_out: tuple[str, ...]
    steps_lost: int
    effective_seconds: float

    @property
    def line(self) -> str:
        """What a person should know of it."""
        steps = "no step"
        if self.first_step is not None:
            steps = f"steps {self.first_step} to {self.last_step}"
        took = None if self.seconds is None else f"in {timedelta(seconds=round(self.seconds))}"
        ended, reason = self.cause, self.reason
        # The signal by which `cancel` and Slurm stop a job is no reason.
        if ended and reason and reason != "SIGTERM":
            ended = reason if reason.startswith(ended) else f"{ended}: {reason}"
        lost = f"{_steps(self.steps_lost)} lost" if self.steps_lost else None
        left_out = f"left out: {', '.join(self.left_out)}" if self.left_out else None
        parts = [f"{steps} {took}" if took else steps, ended, lost, self.decision, left_out]
        return f"attempt {self.attempt}: " + "; ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class History:
    """The attempts of a cell, and what they come to.

    Attributes:
        effective: the share of the time since the first start, of all attempts and of the waiting
            between them, that was spent on steps that were kept; None where no step was made.
    """

    attempts: tuple[AttemptSummary, ...] = ()
    steps_lost: int = 0
    effective: float | None = None

    @property
    def lines(self) -> list[str]:
        """What a person should know; nothing of a cell whose one attempt goes well."""
        ended_well = all(one.cause in (None, Cause.FINISHED) for one in self.attempts)
        if ended_well and len(self.attempts) < 2:
            return []
        total = f"{_steps(self.steps_lost)} lost"
        if self.effective is not None:
            total += f", effective training time {self.effective:.0%}"
        return [*(one.line for one in self.attempts), total]


def collect_history(cell: CellFolder, record: CellRecord) -> History:
    """Return the history of the cell's attempts."""
    attempts = cell.attempts()
    ends = [read_attempt_end(attempt) for attempt in attempts]
    resumed = {one.attempt: one.step or 0 for one in read_resumptions(attempts)}
    times = [_step_times(attempt, record) for attempt in attempts]
    summaries: list[AttemptSummary] = []
    for position, (attempt, end) in enumerate(zip(attempts, ends, strict=True)):
        kept = _kept_until(attempts[position + 1 :], times[position + 1 :], resumed)
        summaries.append(_summary(attempt, end, times[position], kept))
    spent = sum(one.effective_seconds for one in summaries)
    elapsed = _elapsed(attempts, ends, times)
    return History(
        tuple(summaries),
        sum(one.steps_lost for one in summaries),
        min(1.0, spent / elapsed) if spent and elapsed else None,
    )


def usual_step_time(cell: CellFolder, record: CellRecord, number: int) -> float | None:
    """The median seconds of a step in the newest attempt that says some; None where none does.

    Args:
        number: the attempt that this is asked for; those whose steps are others say nothing of it.
    """
    for attempt in reversed(_alike(cell, record, number, _NOT_OF_STEPS)):
        steps = _step_times(attempt, record)
        pairs = [(one, other) for one, other in pairwise(steps) if 0 < one[0] < other[0]]
        seconds = [(then - at) / (later - step) for (step, at), (later, then) in pairs]
        if len(seconds) >= _FEWEST:
            return statistics.median(seconds)
    return None


def longest_save(cell: CellFolder, record: CellRecord, number: int) -> float | None:
    """The most seconds that a checkpoint took to be saved; None where none was.

    Args:
        number: the attempt that this is asked for; those that save otherwise say nothing of it.
    """
    alike = _alike(cell, record, number, _NOT_OF_SAVES)
    seconds = [found for attempt in alike for found in save_seconds(attempt.log)]
    return max(seconds, default=None)


def _alike(
    cell: CellFolder, record: CellRecord, number: int, apart_from: tuple[str, ...]
) -> list[Attempt]:
    """The attempts that were asked for what attempt `number` is, but for some options."""

    def asked(attempt: int) -> tuple[int, dict[str, Any]]:
        then = record.as_of(attempt)
        options = then.options.items()
        return then.nodes, {name: v for name, v in options if not name.startswith(apart_from)}

    return [one for one in cell.attempts() if asked(one.number) == asked(number)]


def _summary(
    attempt: Attempt, end: AttemptEnd | None, times: Sequence[tuple[int, float]], kept: int | None
) -> AttemptSummary:
    steps = [step for step, _ in times if step]
    first, last = (min(steps), max(steps)) if steps else (None, None)
    lost, effective, before = 0, 0.0, None
    for step, at in times:
        is_kept = kept is None or step <= kept
        if before is not None and is_kept:
            effective += max(0.0, at - before)
        before = at
    if last is not None and first is not None and kept is not None:
        lost = max(0, last - max(kept, first - 1))
    has_times = end is not None and end.started is not None and end.ended is not None
    return AttemptSummary(
        attempt.number,
        first,
        last,
        end.ended - end.started if end and has_times and end.ended and end.started else None,
        str(end.cause) if end else None,
        end.reason if end else None,
        end.decision if end else None,
        end.left_out if end else (),
        lost,
        effective,
    )


def _kept_until(
    later: Sequence[Attempt], times: Sequence[Sequence[tuple[int, float]]], resumed: dict[int, int]
) -> int | None:
    """The step that the next attempt which made steps continued after; None where none did."""
    points = []
    for attempt, steps in zip(later, times, strict=True):
        if made := [step for step, _ in steps if step]:
            points.append(resumed.get(attempt.number, min(made) - 1))
    return min(points, default=None)


def _elapsed(
    attempts: Sequence[Attempt],
    ends: Sequence[AttemptEnd | None],
    times: Sequence[Sequence[tuple[int, float]]],
) -> float | None:
    if not attempts:
        return None
    first, last = ends[0], ends[-1]
    started = first.started if first and first.started else None
    if started is None:
        # Of a time when no ends were kept, or of one that runs.
        started = times[0][0][1] if times[0] else None
    ended = last.ended if last and last.ended else None
    if ended is None:
        ended = _last_word(attempts[-1].log)
    return ended - started if started is not None else None


def _last_word(log: Path) -> float:
    try:
        return log.stat().st_mtime
    except OSError:
        return time.time()


def _step_times(attempt: Attempt, record: CellRecord) -> list[tuple[int, float]]:
    """Return the logged steps and when, in seconds; step 0 is the start of training."""
    times = [(one.step, one.time) for one in read_steps(attempt, record) if one.time is not None]
    before = seconds_to_first_step(attempt.log)
    if times and before is not None:
        # Not the console's own time: its node may be in another time zone.
        return [(0, times[0][1] - before), *times]
    return times


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"
