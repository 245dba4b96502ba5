"""Summarize a cell's attempts: their steps, why each ended, and how much work was lost."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise

from cookbook.observe.metrics import read_steps, seconds_to_first_step, step_seconds
from cookbook.run.folder import Attempt, CellFolder, saved_steps
from cookbook.run.record import CellRecord
from cookbook.run.status import Cause, read_attempt_end, read_resumptions


@dataclass(frozen=True, slots=True)
class AttemptSummary:
    """One attempt; unknown values are None."""

    attempt: int
    first_step: int | None
    last_step: int | None
    seconds: float | None
    cause: str | None
    reason: str | None
    decision: str | None
    excluded: tuple[str, ...]
    steps_lost: int
    effective_seconds: float

    @property
    def line(self) -> str:
        steps = "no step"
        if self.first_step is not None:
            steps = f"steps {self.first_step} to {self.last_step}"
        if self.seconds is not None:
            steps += f" in {timedelta(seconds=round(self.seconds))}"
        ended, reason = self.cause, self.reason
        # SIGTERM explains nothing: `cancel` and Slurm stop every job with it.
        if ended and reason and reason != "SIGTERM":
            ended = reason if reason.startswith(ended) else f"{ended}: {reason}"
        lost = f"{_steps(self.steps_lost)} lost" if self.steps_lost else None
        excluded = f"excluded: {', '.join(self.excluded)}" if self.excluded else None
        parts = [steps, ended, lost, self.decision, excluded]
        return f"attempt {self.attempt}: " + "; ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class History:
    """All attempts of a cell, and their totals."""

    attempts: tuple[AttemptSummary, ...] = ()
    steps_lost: int = 0
    # The fraction of the run's time that went into steps that were not lost.
    effective: float | None = None

    @property
    def lines(self) -> list[str]:
        """Lines to show the user; empty for a single attempt that has not failed."""
        ended_well = all(one.cause in (None, Cause.FINISHED) for one in self.attempts)
        if ended_well and len(self.attempts) < 2:
            return []
        total, last = f"{_steps(self.steps_lost)} lost", self.attempts[-1]
        if last.cause is None and last.first_step is not None:
            # The attempt is still training, or its node was lost and nothing has recorded that yet.
            total += f" before attempt {last.attempt}"
        if self.effective is not None:
            total += f", effective training time {self.effective:.0%}"
        return [*(one.line for one in self.attempts), total]


def collect_history(cell: CellFolder, record: CellRecord) -> History:
    attempts = cell.attempts()
    if not attempts:
        return History()
    ends = [read_attempt_end(attempt) for attempt in attempts]
    times = [_step_times(attempt) for attempt in attempts]
    resumed = {one.attempt: one.step or 0 for one in read_resumptions(attempts)}
    # The step that each attempt resumed from. If it is not recorded, assume the step before the
    # first logged one, or -1 if the attempt logged no step.
    starts = [
        resumed.get(attempt.number, min((step for step, _ in own if step), default=0) - 1)
        for attempt, own in zip(attempts, times, strict=True)
    ]
    summaries: list[AttemptSummary] = []
    for position, (attempt, end, own) in enumerate(zip(attempts, ends, times, strict=True)):
        # The attempt's steps after `kept` are lost: training resumes from `kept`.
        kept = min((start for start in starts[position + 1 :] if start >= 0), default=None)
        if kept is None and end is not None and end.cause is not Cause.FINISHED:
            saved = saved_steps(cell.checkpoints(record.options))
            kept = next((step for step, path in saved if (path / ".metadata").is_file()), 0)
        steps, lost = [step for step, _ in own if step], 0
        if steps and kept is not None:
            lost = max(0, max(steps) - max(kept, starts[position]))
        effective = (
            max(0.0, at - before)
            for (_, before), (step, at) in pairwise(own)
            if kept is None or step <= kept
        )
        summary = AttemptSummary(
            attempt=attempt.number,
            first_step=min(steps, default=None),
            last_step=max(steps, default=None),
            seconds=end.ended - end.started if end and end.ended and end.started else None,
            cause=str(end.cause) if end else None,
            reason=end.reason if end else None,
            decision=end.decision if end else None,
            excluded=end.excluded if end else (),
            steps_lost=lost,
            effective_seconds=sum(effective),
        )
        summaries.append(summary)
    started = ends[0].started if ends[0] else None
    if started is None and times[0]:
        started = times[0][0][1]
    ended = ends[-1].ended if ends[-1] else None
    if ended is None:
        log = attempts[-1].log
        ended = log.stat().st_mtime if log.exists() else time.time()
    spent = sum(one.effective_seconds for one in summaries)
    effective_share = min(1.0, spent / (ended - started)) if spent and started else None
    return History(tuple(summaries), sum(one.steps_lost for one in summaries), effective_share)


def usual_step_time(attempts: Sequence[Attempt]) -> float | None:
    """Return the median step time, in seconds, of the latest attempt for which it is known."""
    found = (step_seconds(read_steps(attempt)) for attempt in reversed(attempts))
    return next((seconds for seconds in found if seconds is not None), None)


def _step_times(attempt: Attempt) -> list[tuple[int, float]]:
    times = [(one.step, one.time) for one in read_steps(attempt) if one.time is not None]
    before = seconds_to_first_step(attempt.log)
    # Console times have no time zone and may come from another node: use only differences.
    return [(0, times[0][1] - before), *times] if times and before is not None else times


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"
