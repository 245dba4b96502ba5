"""The steps of a cell over all its attempts, of the rank that knows the loss: one rising curve."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from cookbook.observe.lines import StepMetrics, read_log
from cookbook.observe.scan import LogScan, scan_log
from cookbook.observe.text import blocks
from cookbook.run.folder import Attempt, CellFolder
from cookbook.run.record import CellRecord


@dataclass(frozen=True, slots=True)
class CurveStep(StepMetrics):
    """A metrics line, and the attempt that made it."""

    attempt: int = 0


_STEP_OF_RANK = re.compile(rb"\[rank(?=([0-9]{1,7})\]:[^\n]*?step:)")
_FIGURES = [field.name for field in fields(StepMetrics)]


def scan_attempts(cell: CellFolder, record: CellRecord) -> dict[int, LogScan]:
    """What the log of each attempt says of its loss rank, by the attempt's number."""
    return {
        attempt.number: scan_log(attempt.log, record.as_of(attempt.number).loss_rank)
        for attempt in cell.attempts()
    }


def collect_steps(
    cell: CellFolder, record: CellRecord, scans: Mapping[int, LogScan] | None = None
) -> list[CurveStep]:
    """The loss rank's steps over all attempts, rising: the cell's loss curve.

    Args:
        scans: those of `scan_attempts`, where the logs have been read already.
    """
    steps: list[CurveStep] = []
    scans = scan_attempts(cell, record) if scans is None else scans
    for attempt in cell.attempts():
        shown = scans[attempt.number].steps if attempt.number in scans else []
        for metrics in shown or _other_steps(attempt, record.as_of(attempt.number)):
            while steps and steps[-1].step >= metrics.step:
                steps.pop()
            figures = {name: getattr(metrics, name) for name in _FIGURES}
            steps.append(CurveStep(**figures, attempt=attempt.number))
    return steps


def _other_steps(attempt: Attempt, record: CellRecord) -> list[StepMetrics]:
    """The steps of an attempt whose console does not show the loss rank."""
    rank = record.loss_rank
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
    chosen = _first_rank(attempt.log)
    if all(map(_has_stage_loss, chosen)):
        return [replace(line, loss=None) for line in chosen]
    return [line for line in chosen if not _has_stage_loss(line)]


def _first_rank(log: Path) -> list[StepMetrics]:
    """The steps of the lowest rank that printed some, else those without a rank."""
    ranks = {int(found) for block in blocks(log) for found in set(_STEP_OF_RANK.findall(block))}
    for rank in sorted(ranks):
        if steps := list(read_log(log, rank)):
            return steps
    return [step for step in read_log(log) if step.rank is None]


def _has_stage_loss(metrics: StepMetrics) -> bool:
    """Whether this is the negative number that ranks outside the last PP stage print."""
    return metrics.loss is not None and metrics.loss < 0
