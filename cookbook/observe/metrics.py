"""Read the steps and the router's load of a cell: the lines that our hooks wrote, else the console.

A line of `router_load.jsonl` is one logged step: of each MoE layer the tokens of its busiest expert
over the mean of its experts, and its starved experts, since the logged step before.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cookbook.observe.console import (
    Phase,
    StepMetrics,
    lines_of,
    parse_phase,
    parse_step,
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
    *("time", "lr", "tokens_seen", "validation_loss", "skipped_steps"),
)


def read_steps(attempt: Attempt, record: CellRecord | None = None) -> list[StepMetrics]:
    """Return the logged steps of the rank that has the loss, in order."""
    steps: list[StepMetrics] = []
    for metrics in filter(None, map(_parse, lines_of(attempt.metrics))):
        if metrics.loss is not None:
            steps.append(replace(metrics, attempt=attempt.number))
        elif steps and steps[-1].step == metrics.step:
            steps[-1] = replace(steps[-1], validation_loss=metrics.validation_loss)
    if steps:
        return steps
    shown = list(read_console(attempt.log))
    rank = (record or CellRecord()).loss_rank
    own = [one for one in shown if one.rank == rank]
    # Where the console hides that rank; ranks outside the last PP stage print a negative loss.
    own = own or [one for one in shown if one.rank == shown[0].rank]
    return [
        replace(one, attempt=attempt.number, loss=None if one.loss and one.loss < 0 else one.loss)
        for one in own
    ]


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
class LoadStep:
    """The router's load from `first_step` to `step`, layer by layer.

    Attributes:
        busiest_over_mean: 1 where all experts get the same; MaxVio is this minus 1.
        starved_experts: those with less than a tenth of the mean.
    """

    first_step: int
    step: int
    is_forced: bool
    layers: tuple[int, ...]
    busiest_over_mean: tuple[float, ...]
    starved_experts: tuple[int, ...]


def collect_router_load(cell: CellFolder) -> list[LoadStep]:
    """Return the logged steps over all attempts, rising; empty where none logged its load."""
    steps: list[LoadStep] = []
    for attempt in cell.attempts():
        for found in filter(None, map(_parse_load, lines_of(attempt.router_load))):
            while steps and steps[-1].step >= found.first_step:
                steps.pop()
            # Of another model; only the last one's steps can be shown.
            if steps and steps[-1].layers != found.layers:
                steps.clear()
            steps.append(found)
    return steps


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest step and phase of an attempt; None where nothing is logged yet."""

    step: StepMetrics | None = None
    phase: Phase | None = None
    validation_loss: float | None = None


class Tail:
    """Follow an attempt that grows; each `read` takes only the new lines.

    Args:
        rank: the global rank that has the loss; None for every line of the console.
    """

    def __init__(self, attempt: Attempt, rank: int | None) -> None:
        self._rank = rank
        self._metrics, self._console = GrowingFile(attempt.metrics), GrowingFile(attempt.log)
        self._phase: Phase | None = None
        self._validation_loss: float | None = None
        self.recent: deque[StepMetrics] = deque(maxlen=_NUM_RECENT)

    def read(self) -> Newest:
        """Return the newest step and phase."""
        steps = [one for line in self._metrics.lines() if (one := _parse(line))]
        for step in steps:
            self._validation_loss = step.validation_loss or self._validation_loss
        has_metrics = self._metrics.offset > 0
        for line in self._console.lines():
            # The imports come before the first message.
            self._phase = parse_phase(line, self._rank) or self._phase or Phase.LOADING
            if (shown := parse_step(line, self._rank)) is not None:
                self._phase = Phase.TRAINING
                if not has_metrics:
                    steps.append(shown)
        self.recent.extend(step for step in steps if step.loss is not None)
        newest = self.recent[-1] if self.recent else None
        return Newest(newest, self._phase, self._validation_loss)


class GrowingFile:
    """The whole lines that a file has grown by since the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.offset = 0

    def lines(self) -> Iterator[bytes]:
        try:
            with self._path.open("rb") as file:
                end = file.seek(0, 2)
                # A file that was truncated or replaced is read anew.
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


def _parse_load(line: bytes) -> LoadStep | None:
    """Return the step of a line of `router_load.jsonl`; the last one may still be written."""
    try:
        content: dict[str, Any] = json.loads(line)
        step = LoadStep(
            int(content["first_step"]),
            int(content["step"]),
            content["forced"] is True,
            tuple(content["layers"]),
            tuple(map(float, content["busiest_over_mean"])),
            tuple(content["starved_experts"]),
        )
    except (ValueError, TypeError, KeyError):
        return None
    num = {len(step.layers), len(step.busiest_over_mean), len(step.starved_experts)}
    is_whole = len(num) == 1 and 0 not in num and all(map(math.isfinite, step.busiest_over_mean))
    return step if is_whole else None
