"""A run's charts, as data for the script in the HTML report.

To add a chart, add a function to CHARTS. It returns a Chart, or None if there is nothing to plot.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from cookbook.results.columns import gain_text, tokens_text
from cookbook.results.result import Result, RunResults
from cookbook.results.run_differences import have_same_texts
from cookbook.results.verdicts import LEVEL, MARGIN, STALL
from cookbook.run.status import FINISHED, QUEUED, REFUSED, RUNNING

_FEW_STEPS = 200
_MOST_POINTS = 400
# The upper end of the step-time axis, as a multiple of the median step time: one very long step
# would otherwise flatten the lines.
_MOST_STEP_TIME = 3.0

# One pair of colours per cell, in run order: (light mode, dark mode). They differ in lightness as
# well as hue (after Okabe and Ito), with a contrast of at least 3:1 to the background.
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
    """A line of a chart: a cell's values by step."""

    label: str
    colour: int  # index into COLOURS
    x: list[float]
    y: list[float]
    is_dashed: bool = False  # whether an earlier cell uses the same colour
    is_pale: bool = False
    marks: tuple[tuple[float, float], ...] = ()  # points marked by a triangle
    rules: tuple[float, ...] = ()  # steps marked by a vertical line


@dataclass(frozen=True)
class Bar:
    """A bar of a chart: a cell's throughput, with an error bar from `low` to `high`."""

    label: str
    colour: int
    text: str
    value: float | None
    low: float | None  # lower end of the speed-up's interval, times the baseline's throughput
    high: float | None  # its upper end, times the baseline's throughput
    base: float | None
    published: float | None
    published_text: str


@dataclass(frozen=True)
class Chart:
    """A chart of lines over steps, or of bars; `low` and `high` limit its value axis."""

    name: str
    title: str
    caption: str
    unit: str
    low: float
    high: float
    lines: tuple[Line, ...] = ()
    bars: tuple[Bar, ...] = ()
    band: float | None = None  # half the width of a shaded band about 0


@dataclass(frozen=True)
class _Cell:
    result: Result
    number: int
    label: str
    base: Result | None

    def line(self, values: Mapping[Any, float], label: str = "", is_pale: bool = False) -> Line:
        turn, colour = divmod(self.number, len(COLOURS))
        x, y = [*values], [*values.values()]
        return Line(label or self.label, colour, x, y, turn % 2 > 0, is_pale)


def charts_of(results: RunResults) -> list[Chart]:
    """Return every chart for which the logs have numbers."""
    by_name = {cell.name: cell for cell in results.cells}
    # Labels omit the leading words that all cell names share (`671b-`).
    words = [name.split("-") for name in by_name]
    while len(words) > 1 and min(map(len, words)) > 1 and len({own[0] for own in words}) == 1:
        words = [own[1:] for own in words]
    cells = [
        _Cell(cell, number, "-".join(own), by_name.get(cell.judged.baseline or ""))
        for number, (cell, own) in enumerate(zip(results.cells, words, strict=True))
    ]
    found = [make(cells, results.unit) for make in CHARTS]
    return [chart for chart in found if chart is not None]


def throughput(cells: Sequence[_Cell], unit: str) -> Chart | None:
    bars = tuple(map(_bar, cells))
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
    high = max(numbers) * 1.02
    return Chart("throughput", "Throughput", caption, f"tokens/s/{unit}", 0, high, bars=bars)


def _bar(cell: _Cell) -> Bar:
    result, measured, speed = cell.result, cell.result.measured, cell.result.judged.speed
    tokens = measured.tokens_per_second_per_gpu
    published = result.record.published_tokens_per_second_per_gpu
    base = cell.base.measured.tokens_per_second_per_gpu if cell.base else None
    gain = gain_text(result.judged.speedup) if result.judged.speedup else ""
    words = (tokens_text(tokens), "baseline" if result.is_baseline else gain) if tokens else ()
    note = "" if measured.status == FINISHED else measured.status or "status unknown"
    if measured.emulated and measured.status != REFUSED:
        note = "emulated, speed means nothing"
    elif measured.status in (QUEUED, RUNNING) and measured.steps is not None:
        total = f" of {result.record.steps:,}" if result.record.steps else ""
        note = f"so far, {measured.steps:,}{total} steps"
    text = ", ".join(word for word in (*words, note) if word)
    return Bar(
        label=cell.label,
        colour=cell.number % len(COLOURS),
        text=text or "nothing measured",
        value=tokens,
        low=speed.low * base if speed and speed.low and base else None,
        high=speed.high * base if speed and speed.high and base else None,
        base=base if tokens and not (result.is_baseline or measured.emulated) else None,
        published=published,
        published_text=f"published {tokens_text(published)}" if published else "",
    )


def _finite_losses(result: Result, kind: str = "loss") -> dict[int, float]:
    found = ((one.step, getattr(one, kind)) for one in result.measured.curve)
    return {step: loss for step, loss in found if loss is not None and np.isfinite(loss)}


def loss(cells: Sequence[_Cell], unit: str) -> Chart | None:
    found = [(cell, losses) for cell in cells if (losses := _finite_losses(cell.result))]
    caption = "The loss of every logged step."
    if any(len(losses) > _FEW_STEPS for _, losses in found):
        caption = "The running mean over a fortieth of the logged steps."
    lines = [cell.line(running_mean(losses)) for cell, losses in found]
    return _chart("loss", "Loss", caption, "loss", lines)


def validation_loss(cells: Sequence[_Cell], unit: str) -> Chart | None:
    found = ((cell, _finite_losses(cell.result, "validation_loss")) for cell in cells)
    lines = [cell.line(losses) for cell, losses in found if losses]
    caption = "The loss on the same validation batches each time."
    return _chart("validation-loss", "Validation loss", caption, "loss", lines)


def loss_difference(cells: Sequence[_Cell], unit: str) -> Chart | None:
    """Chart how far each comparable cell's loss is from its baseline's, in percent."""
    lines, is_mean = [], False
    for cell in cells:
        own, base = cell.result, cell.base
        if base is None or base is own or not have_same_texts(own, base):
            continue
        known = _finite_losses(base)
        losses = {step: loss for step, loss in _finite_losses(own).items() if known.get(step)}
        percents = {step: 100 * (loss / known[step] - 1) for step, loss in losses.items()}
        if len(percents) > 1:
            is_mean |= len(percents) > _FEW_STEPS
            lines.append(cell.line(running_mean(percents)))
    caption = f"Loss minus the baseline's. Band: ±{MARGIN:.2%}, within which losses are equivalent."
    if is_mean:
        caption += " Running means over a fortieth of the common steps."
    chart = _chart("loss-difference", "Loss against the baseline", caption, "%", lines)
    if chart is None:
        return None
    sizes = np.abs(np.concatenate([line.y for line in lines]))
    reach = max(float(np.quantile(sizes, 0.98)) * 1.15, 150 * MARGIN)
    return replace(chart, low=-reach, high=reach, band=100 * MARGIN)


def step_time(cells: Sequence[_Cell], unit: str) -> Chart | None:
    """Chart the duration of every logged step, and mark stalls and restarts."""
    lines = []
    for cell in cells:
        for number, run in enumerate(cell.result.runs, 1):
            measured = run.measured
            if not (seconds := measured.seconds):
                continue
            label = (
                f"{cell.label}, repeat {run.record.repeat}" if cell.result.repeats else cell.label
            )
            line = cell.line(thin(seconds), label, number > 1)
            stalls = measured.throughput.stalls if measured.throughput else ()
            marks = tuple((float(at), seconds[at]) for at in stalls if at in seconds)
            steps = pairwise(measured.curve)
            rules = tuple(float(after.step) for one, after in steps if one.attempt != after.attempt)
            lines.append(replace(line, marks=marks, rules=rules))
    caption = "Seconds of every logged step."
    if any(line.marks for line in lines):
        caption += f" Triangles: stalls, {STALL:g} times the median or more."
    if any(line.rules for line in lines):
        caption += " Dashed vertical lines: restarts."
    if not lines:
        return None
    top = _MOST_STEP_TIME * max(statistics.median(line.y) for line in lines)
    highest = max(max(line.y) for line in lines)
    if highest > top:
        caption += " Longer steps end at the upper edge."
    return Chart("step-time", "Step time", caption, "s", 0, min(top, highest * 1.05), tuple(lines))


def router_load(cells: Sequence[_Cell], unit: str) -> Chart | None:
    """Chart the ratio of the busiest expert's load to the mean, in the median and worst layers."""
    lines = []
    for cell in cells:
        if load := {one.step: one.busiest_over_mean for one in cell.result.measured.loads}:
            median = {step: statistics.median(of_layers) for step, of_layers in load.items()}
            most = {step: max(of_layers) for step, of_layers in load.items()}
            worst = f"{cell.label}, worst layer"
            lines += [cell.line(thin(median)), cell.line(thin(most), worst, True)]
    caption = (
        "Tokens of a layer's busiest expert over the mean of its experts: of the median layer and, "
        "pale, of the most uneven one. 1 is even."
    )
    return _chart("router-load", "Router load", caption, "times the mean", lines)


CHARTS: tuple[Callable[[Sequence[_Cell], str], Chart | None], ...] = (
    throughput,
    loss,
    validation_loss,
    loss_difference,
    step_time,
    router_load,
)


def _chart(name: str, title: str, caption: str, unit: str, lines: Sequence[Line]) -> Chart | None:
    if not lines:
        return None
    values = np.concatenate([line.y for line in lines])
    low, high = float(values.min()), float(values.max())
    pad = 0.04 * (high - low) or 0.04 * abs(high) or 1.0
    return Chart(name, title, caption, unit, low - pad, high + pad, tuple(lines))


def running_mean(values: Mapping[int, float]) -> Mapping[Any, float]:
    """Return the running mean of a curve over 1/40 of its steps; a short curve is unchanged."""
    if len(values) <= _FEW_STEPS:
        return values
    window = np.full(len(values) // 40, 1 / (len(values) // 40))
    every = -(-(len(values) - len(window) + 1) // _MOST_POINTS)
    steps, means = (
        np.convolve(some, window, mode="valid")[::every].tolist()
        for some in ([*values], [*values.values()])
    )
    return dict(zip(steps, means, strict=True))


def thin(values: Mapping[int, float]) -> Mapping[int, float]:
    """Return at most `_MOST_POINTS` points: the lowest and highest in each interval of steps."""
    if len(values) <= _MOST_POINTS:
        return values
    kept = set[int]()
    for part in np.array_split([*values], _MOST_POINTS // 2):
        kept |= {min(part, key=values.__getitem__), max(part, key=values.__getitem__)}
    return {step: value for step, value in values.items() if step in kept}
