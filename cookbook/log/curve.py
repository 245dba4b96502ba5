"""The steps of a cell over all its attempts, of the rank that knows the loss: one rising curve."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from cookbook.log.lines import StepMetrics, read_log
from cookbook.run.folder import Attempt, CellFolder
from cookbook.run.record import CellRecord


@dataclass(frozen=True, slots=True)
class CurveStep(StepMetrics):
    """A metrics line, and the attempt that made it."""

    attempt: int = 0


_FIGURES = [field.name for field in fields(StepMetrics)]


def collect_steps(cell: CellFolder, record: CellRecord) -> list[CurveStep]:
    """The loss rank's steps over all attempts, rising: the cell's loss curve."""
    steps: list[CurveStep] = []
    for attempt in cell.attempts():
        for metrics in _attempt_steps(attempt, record.as_of(attempt.number)):
            while steps and steps[-1].step >= metrics.step:
                steps.pop()
            figures = {name: getattr(metrics, name) for name in _FIGURES}
            steps.append(CurveStep(**figures, attempt=attempt.number))
    return steps


def _attempt_steps(attempt: Attempt, record: CellRecord) -> list[StepMetrics]:
    rank = record.loss_rank
    shown = list(read_log(attempt.log, rank)) if attempt.log.is_file() else []
    if shown:
        return shown
    # A rank's own log carries no global rank: of the nodes, take one that printed a real loss.
    logged = [
        [step for log in logs for step in read_log(log)]
        for logs in attempt.rank_logs(rank % record.ranks_per_node)
    ]
    if real := [steps for steps in logged if steps and not any(map(_has_stage_loss, steps))]:
        return max(real, key=len)
    if not attempt.log.is_file():
        return []
    # Lines without a rank (another prefix, or none), or of ranks that hold no real loss.
    lines = list(read_log(attempt.log))
    first = min((line.rank for line in lines if line.rank is not None), default=None)
    chosen = [line for line in lines if line.rank == first]
    if all(map(_has_stage_loss, chosen)):
        return [replace(line, loss=None) for line in chosen]
    return [line for line in chosen if not _has_stage_loss(line)]


def _has_stage_loss(metrics: StepMetrics) -> bool:
    """Whether this is the negative number that ranks outside the last PP stage print."""
    return metrics.loss is not None and metrics.loss < 0
