"""What the figures draw of a cell: its result, and what its logs say over the steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from cookbook.observe.curve import CurveStep
from cookbook.observe.router_load import LoadStep
from cookbook.results.figures import theme
from cookbook.results.result import CellSetting, Result, RunResults
from cookbook.run.status import FINISHED, QUEUED, REFUSED, RUNNING


@dataclass(frozen=True)
class StepTime:
    """How long a step took, on average since the line before; by TorchTitan's tokens/s."""

    step: int
    seconds: float
    is_stall: bool = False


@dataclass(frozen=True)
class Series:
    """One cell of a run, to be drawn.

    Attributes:
        name: the cell's.
        label: that without what the names of all cells begin with.
        position: the cell's place in the run, which decides its colour.
        note: what a reader must know of its numbers: `emulated`, `so far`, `refused`.
        is_baseline: whether others are held against it.
        baseline: the name of the cell that it is held against.
        base_tokens: the throughput of its baseline.
        is_comparable: whether it is held against the baseline, of the same recipe and batch.
        tokens_low, tokens_high: the interval of its speed-up, times the baseline's throughput.
        restarts: the first step of each attempt but the first.
        capacity_gib: the memory of its GPU, as the log's percentages say.
        repeats: where the cell was trained several times, each of them, this first one too.
    """

    name: str
    label: str
    position: int
    status: str | None
    note: str | None
    is_baseline: bool
    base_tokens: float | None
    is_comparable: bool
    tokens: float | None
    tokens_low: float | None
    tokens_high: float | None
    speedup: float | None
    published: float | None
    published_speedup: float | None
    steps: Sequence[CurveStep]
    times: Sequence[StepTime]
    restarts: Sequence[int]
    memory_gib: float | None
    capacity_gib: float | None
    load: Sequence[LoadStep] = ()
    baseline: str | None = None
    repeats: Sequence[Series] = ()

    @property
    def colour(self) -> str:
        return theme.colour_of(self.position).light

    @property
    def dash(self) -> Any:
        return theme.dash_of(self.position)

    @property
    def losses(self) -> tuple[list[int], list[float]]:
        """Steps and finite losses."""
        found = [
            (metrics.step, metrics.loss)
            for metrics in self.steps
            if metrics.loss is not None and math.isfinite(metrics.loss)
        ]
        return [step for step, _ in found], [loss for _, loss in found]


def short_labels(names: Sequence[str]) -> list[str]:
    """The names without the words that all of them begin with (`671b-`)."""
    words = [name.split("-") for name in names]
    num = 0
    if len(words) > 1:
        shortest = min(map(len, words)) - 1
        while num < shortest and len({word[num] for word in words}) == 1:
            num += 1
    return ["-".join(word[num:]) for word in words]


def all_series(results: RunResults) -> list[Series]:
    """Every cell of a run, in its order."""
    by_name = {cell.name: cell for cell in results.cells}
    labels = short_labels([cell.name for cell in results.cells])
    return [
        _series(cell, label, position, results.settings[cell.name], by_name, results)
        for position, (cell, label) in enumerate(zip(results.cells, labels, strict=True))
    ]


def _series(
    cell: Result,
    label: str,
    position: int,
    setting: CellSetting,
    by_name: Mapping[str, Result],
    results: RunResults,
) -> Series:
    steps = results.curves.get(cell.name, ())
    base = by_name.get(setting.baseline or "")
    is_baseline = base is cell
    base_tokens = base.tokens_per_second_per_gpu if base else None
    low, high = (cell.speed.low, cell.speed.high) if cell.speed else (None, None)
    capacities = [
        100 * step.memory_gib / step.memory_percent
        for step in steps
        if step.memory_gib and step.memory_percent
    ]
    series = Series(
        name=cell.name,
        label=label,
        position=position,
        status=cell.status,
        note=_note(cell, setting),
        is_baseline=is_baseline,
        base_tokens=base_tokens,
        is_comparable=base is not None
        and not is_baseline
        and base.recipe == cell.recipe
        and setting.batch == results.settings[base.name].batch,
        tokens=cell.tokens_per_second_per_gpu,
        tokens_low=low * base_tokens if low and base_tokens else None,
        tokens_high=high * base_tokens if high and base_tokens else None,
        speedup=cell.speedup,
        published=cell.published_tokens_per_second_per_gpu,
        published_speedup=None if is_baseline else setting.published_speedup,
        steps=steps,
        times=(),
        restarts=(),
        memory_gib=cell.memory_gib,
        capacity_gib=statistics.median(capacities) if capacities else None,
        load=results.loads.get(cell.name, ()),
        baseline=base.name if base else None,
    )
    if not cell.repeats:
        return _with_times(
            series, steps, cell.throughput.stalls if cell.throughput else (), setting
        )
    repeats = [
        _with_times(
            replace(series, label=f"{label}, repeat {number}"),
            results.curves.get(repeat.name, ()),
            repeat.stalls,
            setting,
        )
        for number, repeat in enumerate(cell.repeats, 1)
    ]
    return replace(series, repeats=repeats)


def _with_times(
    series: Series, steps: Sequence[CurveStep], stalls: Sequence[int], setting: CellSetting
) -> Series:
    """The cell with the times of a run's `steps`, of which `stalls` took longest."""
    per_step = setting.tokens_per_step_per_gpu
    times = [
        StepTime(step.step, per_step / step.tokens_per_second, step.step in stalls)
        for step in steps
        if per_step and step.tokens_per_second
    ]
    pairs = pairwise(steps)
    restarts = [after.step for before, after in pairs if after.attempt != before.attempt]
    return replace(series, steps=steps, times=times, restarts=restarts)


def _note(cell: Result, setting: CellSetting) -> str | None:
    if cell.status == REFUSED:
        return "refused"
    if cell.emulated:
        return "emulated, speed means nothing"
    if cell.status == FINISHED:
        return None
    if cell.status in (QUEUED, RUNNING) and cell.steps is not None:
        of = f" of {setting.total_steps:,}" if setting.total_steps else ""
        return f"so far, {cell.steps:,}{of} steps"
    return cell.status or "status unknown"
