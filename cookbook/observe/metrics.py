"""The steps of a cell: `attempt-<k>/metrics.jsonl` where our hooks wrote it, else the console."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cookbook.observe.console import (
    Phase,
    StepMetrics,
    parse_of_rank,
    parse_phase,
    read_console,
)
from cookbook.run.folder import Attempt, CellFolder
from cookbook.run.record import CellRecord

# Some 60,000 console lines: 250 steps with all 256 ranks shown.
_LOOK_BACK_BYTES = 16 << 20
# As many as the widest sparkline shows.
_NUM_RECENT = 20
_FIGURES = (
    *("loss", "grad_norm", "memory_gib", "memory_percent", "tokens_per_second", "tflops", "mfu"),
    *("time", "lr", "tokens_seen", "validation_loss"),
)


def read_steps(attempt: Attempt, record: CellRecord | None = None) -> list[StepMetrics]:
    """Return the logged steps of the rank that has the loss, in order.

    Args:
        record: the cell's, to find that rank's lines in the logs of a run without our hooks.
    """
    try:
        lines = attempt.metrics.read_bytes().splitlines()
    except OSError:
        lines = []
    steps: list[StepMetrics] = []
    for metrics in filter(None, map(_parse, lines)):
        if metrics.loss is not None:
            steps.append(replace(metrics, attempt=attempt.number))
        elif steps and steps[-1].step == metrics.step:
            steps[-1] = replace(steps[-1], validation_loss=metrics.validation_loss)
    if steps:
        return steps
    record = (record or CellRecord()).as_of(attempt.number)
    shown = list(read_console(attempt.log, record.loss_rank))
    return [replace(one, attempt=attempt.number) for one in shown or _other_steps(attempt, record)]


def collect_steps(cell: CellFolder, record: CellRecord) -> list[StepMetrics]:
    """Return the steps over all attempts, rising: the cell's loss curve.

    A resumed attempt replaces the steps that it makes again.
    """
    steps: list[StepMetrics] = []
    for attempt in cell.attempts():
        for metrics in read_steps(attempt, record):
            while steps and steps[-1].step >= metrics.step:
                steps.pop()
            steps.append(metrics)
    return steps


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest step and phase of an attempt; None where nothing is logged yet."""

    step: StepMetrics | None = None
    phase: Phase | None = None


class Tail:
    """Follow an attempt that grows; each `read` takes only what was written since.

    Args:
        rank: the global rank that has the loss; None for every line of the console.
    """

    def __init__(self, attempt: Attempt, rank: int | None) -> None:
        self._rank = rank
        self._metrics, self._console = _Grown(attempt.metrics), _Grown(attempt.log)
        self._newest = Newest()
        self.recent: deque[StepMetrics] = deque(maxlen=_NUM_RECENT)

    def read(self) -> Newest:
        """Return the newest step and phase."""
        steps = [one for line in self._metrics.lines() if (one := _parse(line))]
        phase = self._newest.phase
        has_metrics = self._metrics.offset > 0
        for line in self._console.lines():
            # The imports come before the first message.
            phase = parse_phase(line, self._rank) or phase or Phase.LOADING
            if (step := parse_of_rank(line, self._rank)) is not None:
                phase = Phase.TRAINING
                if not has_metrics:
                    steps.append(step)
        self.recent.extend(step for step in steps if step.loss is not None)
        self._newest = Newest(self.recent[-1] if self.recent else None, phase)
        return self._newest


class _Grown:
    """The whole lines that a file has grown by since the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.offset = 0

    def lines(self) -> Iterator[bytes]:
        try:
            with self._path.open("rb") as file:
                end = file.seek(0, 2)
                # Truncated or replaced: it is read anew.
                start = max(self.offset if self.offset <= end else 0, end - _LOOK_BACK_BYTES)
                file.seek(start)
                text = file.read(end - start)
        except OSError:
            return iter(())
        whole = text.rfind(b"\n") + 1
        self.offset = start + whole
        return iter(text[:whole].splitlines())


def _parse(line: bytes) -> StepMetrics | None:
    """Return the step of a line of `metrics.jsonl`; the last one may still be written."""
    try:
        content: dict[str, Any] = json.loads(line)
        # NaN and infinite values are text.
        values: dict[str, Any] = {
            name: float(content[name]) for name in _FIGURES if name in content
        }
        loss = values.pop("loss", None)
        return replace(StepMetrics(content.get("rank"), int(content["step"]), loss), **values)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _other_steps(attempt: Attempt, record: CellRecord) -> list[StepMetrics]:
    """Return the steps of an attempt whose console does not show the rank that has the loss."""
    # A rank's own log carries no global rank: of the nodes, take one that printed a real loss.
    logged = [
        [step for log in logs for step in read_console(log)]
        for logs in attempt.rank_logs(record.loss_rank % record.ranks_per_node)
    ]
    if real := [steps for steps in logged if steps and not any(map(_has_stage_loss, steps))]:
        return max(real, key=len)
    shown = list(read_console(attempt.log))
    ranks = sorted({step.rank for step in shown if step.rank is not None})
    chosen = [step for step in shown if step.rank == (ranks[0] if ranks else None)]
    if all(map(_has_stage_loss, chosen)):
        return [replace(step, loss=None) for step in chosen]
    return [step for step in chosen if not _has_stage_loss(step)]


def _has_stage_loss(metrics: StepMetrics) -> bool:
    """Whether this is the negative number that ranks outside the last PP stage print."""
    return metrics.loss is not None and metrics.loss < 0
