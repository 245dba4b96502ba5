"""The charts of a run as plain numbers: the page's script draws them, Matplotlib the files.

A new chart is a function of the cells that returns a Chart, or None without numbers, in CHARTS.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from cookbook.results.columns import gain_text, tokens_text
from cookbook.results.loss import MARGIN, losses_of
from cookbook.results.result import Result, RunResults
from cookbook.results.speed import LEVEL, STALL
from cookbook.run.status import FINISHED, QUEUED, REFUSED, RUNNING

# Of more steps a line is the running mean over a fortieth of them.
_FEW_STEPS = 200
_MOST_POINTS = 400
# A line's chart ends here, times the largest usual step, so that one wild step flattens nothing.
_MOST_STEP_TIME = 3.0

# One for each cell in the run's order, light and dark. They differ in lightness as well as in hue
# (after Okabe and Ito), and are at least 3:1 on the ground.
COLOURS = (
    ("#4a525a", "#b9c2cb"),
    ("#0a6ebd", "#5fb4f0"),
    ("#c2500a", "#ff9d5c"),
    ("#00836a", "#35cfa6"),
    ("#9b4a8c", "#e59bd3"),
    ("#8a6a00", "#e0bb45"),
    ("#5658c4", "#a9abff"),
    ("#96304c", "#f08ba5"),
)


@dataclass(frozen=True)
class Line:
    """A cell's values over the steps.

    Attributes:
        colour: index into COLOURS; `is_dashed`: another cell has the colour already.
        marks: points marked by a triangle; `rules`: steps marked by a vertical line.
    """

    label: str
    colour: int
    x: list[float]
    y: list[float]
    is_dashed: bool = False
    is_pale: bool = False
    marks: tuple[tuple[float, float], ...] = ()
    rules: tuple[float, ...] = ()


@dataclass(frozen=True)
class Bar:
    """A cell's value, with its interval, the baseline's value, and the published one."""

    label: str
    colour: int
    text: str
    value: float | None
    low: float | None
    high: float | None
    base: float | None
    published: float | None
    published_text: str


@dataclass(frozen=True)
class Chart:
    """Lines over the steps, or bars.

    Attributes:
        unit: of the values; `low`, `high`: the range of the axis.
        band: half the height of the margin about 0.
    """

    name: str
    title: str
    caption: str
    unit: str
    low: float
    high: float
    lines: tuple[Line, ...] = ()
    bars: tuple[Bar, ...] = ()
    band: float | None = None


@dataclass(frozen=True)
class _Cell:
    """A cell to be drawn, with the part of its name that differs among cells."""

    result: Result
    label: str
    number: int
    base: Result | None

    @property
    def colour(self) -> int:
        return self.number % len(COLOURS)

    def line(
        self, x: Sequence[float], y: Sequence[float], label: str = "", is_pale: bool = False
    ) -> Line:
        is_dashed = self.number // len(COLOURS) % 2 > 0
        return Line(label or self.label, self.colour, [*x], [*y], is_dashed, is_pale)


def charts_of(results: RunResults) -> list[Chart]:
    """Return every chart for which the logs hold the numbers."""
    by_name = {cell.name: cell for cell in results.cells}
    labels = zip(results.cells, short_labels(list(by_name)), strict=True)
    cells = [
        _Cell(cell, label, number, by_name.get(cell.baseline or ""))
        for number, (cell, label) in enumerate(labels)
    ]
    found = [make(cells, results.unit) for make in CHARTS]
    return [chart for chart in found if chart is not None]


def _losses(result: Result) -> tuple[list[int], list[float]]:
    """Return the steps whose loss is a number, and these losses."""
    known = {step: loss for step, loss in losses_of(result.curve).items() if np.isfinite(loss)}
    return list(known), list(known.values())


def short_labels(names: Sequence[str]) -> list[str]:
    """Return the names without the words that all of them begin with (`671b-`)."""
    words = [name.split("-") for name in names]
    num = 0
    if len(words) > 1:
        shortest = min(map(len, words)) - 1
        while num < shortest and len({word[num] for word in words}) == 1:
            num += 1
    return ["-".join(word[num:]) for word in words]


def throughput(cells: Sequence[_Cell], unit: str) -> Chart | None:
    """Return a bar for each cell, from 0."""
    bars = []
    for cell in cells:
        result, tokens = cell.result, cell.result.tokens_per_second_per_gpu
        base = cell.base.tokens_per_second_per_gpu if cell.base else None
        speed = result.speed
        low, high = (speed.low, speed.high) if speed and base else (None, None)
        is_baseline = cell.base is result
        text = tokens_text(tokens) if tokens else _note(cell) or "nothing measured"
        if tokens:
            gain = gain_text(result.speedup) if result.speedup and not is_baseline else ""
            words = (text, "baseline" if is_baseline else gain, _note(cell) or "")
            text = ", ".join(word for word in words if word)
        published = result.published_tokens_per_second_per_gpu
        bars.append(
            Bar(
                label=cell.label,
                colour=cell.colour,
                text=text,
                value=tokens,
                low=low * base if low and base else None,
                high=high * base if high and base else None,
                base=None if is_baseline else base,
                published=published,
                published_text=f"published {tokens_text(published)}" if published else "",
            )
        )
    numbers = [n for bar in bars for n in (bar.high, bar.value, bar.published) if n]
    if not numbers:
        return None
    caption = "Median of the logged steps after warm-up."
    if any(bar.low for bar in bars):
        caption += f" Whiskers: the {LEVEL:.0%} interval of the speed-up."
    if any(bar.base for bar in bars):
        caption += " Dotted line: the baseline."
    if any(bar.published for bar in bars):
        caption += " Thin bar: the published number."
    title = "Throughput"
    return Chart(
        "throughput", title, caption, f"tokens/s/{unit}", 0, max(numbers) * 1.02, bars=tuple(bars)
    )


def loss(cells: Sequence[_Cell], unit: str) -> Chart | None:
    """Return the loss of every cell."""
    found = [(cell, *_losses(cell.result)) for cell in cells]
    lines = [cell.line(*running_mean(steps, values)) for cell, steps, values in found if steps]
    if not lines:
        return None
    caption = "The loss of every logged step."
    if any(len(steps) > _FEW_STEPS for _, steps, _ in found):
        caption = "The running mean over a fortieth of the logged steps."
    return _chart("loss", "Loss", caption, "loss", lines)


def loss_difference(cells: Sequence[_Cell], unit: str) -> Chart | None:
    """Return the loss of every comparable cell minus its baseline's, in percent."""
    lines, is_mean = [], False
    for cell in cells:
        own, base = cell.result, cell.base
        if base is None or base is own or (base.recipe, base.batch) != (own.recipe, own.batch):
            continue
        known = dict(zip(*_losses(base), strict=True))
        pairs = [(step, loss) for step, loss in zip(*_losses(own), strict=True) if known.get(step)]
        if len(pairs) > 1:
            is_mean |= len(pairs) > _FEW_STEPS
            percents = [100 * (loss / known[step] - 1) for step, loss in pairs]
            lines.append(cell.line(*running_mean([step for step, _ in pairs], percents)))
    if not lines:
        return None
    caption = f"Loss minus the baseline's. Band: ±{MARGIN:.2%}, within which losses are equivalent."
    if is_mean:
        caption += " Running means over a fortieth of the common steps."
    sizes = np.abs(np.concatenate([line.y for line in lines]))
    reach = max(float(np.quantile(sizes, 0.98)) * 1.15, 150 * MARGIN)
    title = "Loss against the baseline"
    return Chart(
        "loss-difference", title, caption, "%", -reach, reach, tuple(lines), band=100 * MARGIN
    )


def step_time(cells: Sequence[_Cell], unit: str) -> Chart | None:
    """Return the seconds of every logged step, with stalls and restarts."""
    lines = []
    for cell in cells:
        tokens = cell.result.tokens_per_step_per_gpu
        for number, run in enumerate(cell.result.runs, 1):
            timed = [step for step in run.curve if step.tokens_per_second and tokens]
            seconds = {step.step: (tokens or 0.0) / (step.tokens_per_second or 1) for step in timed}
            if not seconds:
                continue
            label = f"{cell.label}, repeat {number}" if cell.result.repeats else cell.label
            line = cell.line(*thin(list(seconds), list(seconds.values())), label, number > 1)
            stalls = run.throughput.stalls if run.throughput else ()
            lines.append(
                replace(
                    line,
                    marks=tuple((float(at), seconds[at]) for at in stalls if at in seconds),
                    rules=tuple(
                        float(after.step)
                        for one, after in pairwise(run.curve)
                        if one.attempt != after.attempt
                    ),
                )
            )
    if not lines:
        return None
    top = _MOST_STEP_TIME * max(statistics.median(line.y) for line in lines)
    highest = max(max(line.y) for line in lines)
    caption = "Seconds of every logged step."
    if any(line.marks for line in lines):
        caption += f" Triangles: stalls, {STALL:g} times the median or more."
    if any(line.rules for line in lines):
        caption += " Dashed vertical lines: restarts."
    if highest > top:
        caption += " Longer steps end at the upper edge."
    return Chart("step-time", "Step time", caption, "s", 0, min(top, highest * 1.05), tuple(lines))


def router_load(cells: Sequence[_Cell], unit: str) -> Chart | None:
    """Return the busiest expert over the mean: of the median layer, and of the most uneven one."""
    lines = []
    for cell in cells:
        if load := cell.result.loads:
            steps = [step.step for step in load]
            most = [max(step.busiest_over_mean) for step in load]
            median = [statistics.median(step.busiest_over_mean) for step in load]
            lines.append(cell.line(*thin(steps, median)))
            lines.append(cell.line(*thin(steps, most), f"{cell.label}, worst layer", True))
    if not lines:
        return None
    caption = (
        "Tokens of a layer's busiest expert over the mean of its experts: of the median layer and, "
        "pale, of the most uneven one. 1 is even."
    )
    return _chart("router-load", "Router load", caption, "times the mean", lines)


CHARTS: tuple[Callable[[Sequence[_Cell], str], Chart | None], ...] = (
    throughput,
    loss,
    loss_difference,
    step_time,
    router_load,
)

NAMES = [make.__name__.replace("_", "-") for make in CHARTS]


def _chart(name: str, title: str, caption: str, unit: str, lines: Sequence[Line]) -> Chart:
    values = np.concatenate([line.y for line in lines])
    low, high = float(values.min()), float(values.max())
    pad = 0.04 * (high - low) or 0.04 * abs(high) or 1.0
    return Chart(name, title, caption, unit, low - pad, high + pad, tuple(lines))


def running_mean(
    steps: Sequence[float], values: Sequence[float]
) -> tuple[list[float], list[float]]:
    """Return the centred running mean over a fortieth of many steps; few steps as they are."""
    if len(steps) <= _FEW_STEPS:
        return list(steps), list(values)
    width = len(steps) // 40
    mean = np.convolve(values, np.full(width, 1 / width), mode="valid")
    centres = np.convolve(steps, np.full(width, 1 / width), mode="valid")
    every = -(-len(mean) // _MOST_POINTS)
    return centres[::every].tolist(), mean[::every].tolist()


def thin(steps: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return at most `_MOST_POINTS` points: the lowest and highest of each stretch of steps."""
    if len(steps) <= _MOST_POINTS:
        return list(steps), list(values)
    kept: list[int] = []
    for part in np.array_split(np.arange(len(steps)), _MOST_POINTS // 2):
        own = np.asarray(values)[part]
        kept += sorted({int(part[own.argmin()]), int(part[own.argmax()])})
    return [steps[index] for index in kept], [values[index] for index in kept]


def _note(cell: _Cell) -> str | None:
    result = cell.result
    if result.status == REFUSED:
        return "refused"
    if result.emulated:
        return "emulated, speed means nothing"
    if result.status == FINISHED:
        return None
    if result.status in (QUEUED, RUNNING) and result.steps is not None:
        total = cell.result.total_steps
        return f"so far, {result.steps:,}{f' of {total:,}' if total else ''} steps"
    return result.status or "status unknown"
