"""A run's charts, as data for the script on the page.

To add a chart, add a line to CHARTS: a curve of some value of the steps, or a function that returns
a Chart, or None if there is nothing to plot.
"""

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from cookbook.observe.metrics import StepMetrics
from cookbook.results.columns import gain_text, tokens_text
from cookbook.results.result import Result, RunResults, have_same_texts
from cookbook.results.verdicts import LEVEL, MARGIN, STALL
from cookbook.run.status import FINISHED, QUEUED, REFUSED, RUNNING

_FEW_STEPS = 200
# A line has so many points, or fewer if many cells share the page.
_MOST_POINTS, _OF_ALL_CELLS, _LEAST_POINTS = 100, 2400, 20
_CLOCK = 16
# The upper end of the step-time axis, as a multiple of the median step time: one very long step
# would otherwise flatten the lines.
_MOST_STEP_TIME = 3.0

# Pairs of colours for cells, in run order: (light mode, dark mode). They differ in lightness as
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
    """A line of a chart: values by step."""

    cell: int  # place of its cell in the run, which gives the colour
    label: str
    x: list[float]
    y: list[float]
    is_pale: bool = False
    marks: tuple[tuple[float, float], ...] = ()  # points marked by a triangle
    rules: tuple[float, ...] = ()  # steps marked by a vertical line


@dataclass(frozen=True)
class Bar:
    """A bar of a chart: a cell's throughput, with an error bar from `low` to `high`."""

    label: str
    colour: int  # index into COLOURS
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
class _Drawn:
    result: Result
    number: int
    label: str
    base: Result | None
    points: int

    def line(self, values: Mapping[Any, float], label: str = "", is_pale: bool = False) -> Line:
        return Line(self.number, label or self.label, [*values], [*values.values()], is_pale)


Maker = Callable[[Sequence[_Drawn], str], Chart | None]  # of a run's cells, and the unit's name


def _cells_of(results: RunResults) -> list[_Drawn]:
    by_name = {cell.name: cell for cell in results.cells}
    # Labels omit the leading words that all cell names share (`671b-`).
    words = [name.split("-") for name in by_name]
    while len(words) > 1 and min(map(len, words)) > 1 and len({own[0] for own in words}) == 1:
        words = [own[1:] for own in words]
    points = min(_MOST_POINTS, max(_LEAST_POINTS, _OF_ALL_CELLS // max(1, len(words))))
    return [
        _Drawn(cell, number, "-".join(own), by_name.get(cell.judged.baseline or ""), points)
        for number, (cell, own) in enumerate(zip(results.cells, words, strict=True))
    ]


def charts_of(results: RunResults) -> list[Chart]:
    """Return every chart for which the logs have numbers."""
    cells = _cells_of(results)
    found = [make(cells, results.unit) for make in CHARTS]
    return [chart for chart in found if chart is not None]


def throughput(cells: Sequence[_Drawn], unit: str) -> Chart | None:
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


def _bar(cell: _Drawn) -> Bar:
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


Value = Callable[[StepMetrics], float | None]


def _loss(step: StepMetrics) -> float | None:
    return step.loss


def _finite(result: Result, value: Value) -> dict[int, float]:
    found = ((one.step, value(one)) for one in result.measured.curve)
    return {step: value for step, value in found if value is not None and math.isfinite(value)}


def _curve(
    name: str, title: str, caption: str, unit: str, value: Value, is_noisy: bool = True
) -> Maker:
    """Return the maker of a chart of each logged step's `value`, as it is or as a running mean."""

    def make(cells: Sequence[_Drawn], _: str) -> Chart | None:
        found = [(cell, values) for cell in cells if (values := _finite(cell.result, value))]
        is_mean = is_noisy and any(len(values) > _FEW_STEPS for _, values in found)
        said = "The running mean over a fortieth of the logged steps." if is_mean else caption
        mean = running_mean if is_noisy else thin
        lines = [cell.line(thin(mean(values, cell.points), cell.points)) for cell, values in found]
        return _chart(name, title, said, unit, lines)

    return make


def loss_difference(cells: Sequence[_Drawn], unit: str) -> Chart | None:
    """Chart how far each comparable cell's loss is from its baseline's, in percent."""
    lines, is_mean = [], False
    for cell in cells:
        own, base = cell.result, cell.base
        if base is None or base is own or not have_same_texts(own, base):
            continue
        known = _finite(base, _loss)
        losses = {step: loss for step, loss in _finite(own, _loss).items() if known.get(step)}
        percents = {step: 100 * (loss / known[step] - 1) for step, loss in losses.items()}
        if len(percents) > 1:
            is_mean |= len(percents) > _FEW_STEPS
            lines.append(cell.line(running_mean(percents, cell.points)))
    caption = f"Loss minus the baseline's. Band: ±{MARGIN:.2%}, within which losses are equivalent."
    if is_mean:
        caption += " Running means over a fortieth of the common steps."
    chart = _chart("loss-difference", "Loss against the baseline", caption, "%", lines)
    if chart is None:
        return None
    sizes = sorted(abs(y) for line in lines for y in line.y)
    reach = max(sizes[int(0.98 * (len(sizes) - 1))] * 1.15, 150 * MARGIN)
    return replace(chart, low=-reach, high=reach, band=100 * MARGIN)


def step_time(cells: Sequence[_Drawn], unit: str) -> Chart | None:
    """Chart the duration of every logged step, and mark stalls and restarts."""
    lines = []
    for cell in cells:
        for number, run in enumerate(cell.result.runs, 1):
            measured = run.measured
            if not (seconds := measured.seconds):
                continue
            label = f"{cell.label}, repeat {run.record.repeat}" if cell.result.repeats else ""
            line = cell.line(thin(seconds, cell.points), label, number > 1)
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


def router_load(cells: Sequence[_Drawn], unit: str) -> Chart | None:
    """Chart the ratio of the busiest expert's load to the mean, in the median and worst layers."""
    lines = []
    for cell in cells:
        if load := {one.step: one.busiest_over_mean for one in cell.result.measured.loads}:
            median = {step: statistics.median(of_layers) for step, of_layers in load.items()}
            most = {step: max(of_layers) for step, of_layers in load.items()}
            worst = f"{cell.label}, worst layer"
            lines.append(cell.line(thin(median, cell.points)))
            lines.append(cell.line(thin(most, cell.points), worst, True))
    caption = (
        "Tokens of a layer's busiest expert over the mean of its experts: of the median layer and, "
        "pale, of the most uneven one. 1 is even."
    )
    return _chart("router-load", "Router load", caption, "times the mean", lines)


CHARTS: tuple[Maker, ...] = (
    throughput,
    _curve("loss", "Loss", "The loss of every logged step.", "loss", _loss),
    _curve(
        *("validation-loss", "Validation loss"),
        *("The loss on the same validation batches each time.", "loss"),
        *(lambda one: one.validation_loss, False),
    ),
    *(loss_difference, step_time, router_load),
    _curve("grad-norm", "Gradient norm", "Before clipping.", "norm", lambda one: one.grad_norm),
    _curve("learning-rate", "Learning rate", "Of each logged step.", "", lambda one: one.lr, False),
)


def _chart(name: str, title: str, caption: str, unit: str, lines: Sequence[Line]) -> Chart | None:
    if not lines:
        return None
    values = [y for line in lines for y in line.y]
    low, high = min(values), max(values)
    pad = 0.04 * (high - low) or 0.04 * abs(high) or 1.0
    return Chart(name, title, caption, unit, low - pad, high + pad, tuple(lines))


def running_mean(values: Mapping[int, float], most: int) -> Mapping[Any, float]:
    """Return the running mean over 1/40 of the steps, in `most` points; a short curve as it is."""
    if len(values) <= _FEW_STEPS:
        return values
    size = len(values) // 40
    every = -(-(len(values) - size + 1) // most)
    sums = [[0.0, *accumulate(some)] for some in (values, values.values())]
    steps, means = (
        [(one[end] - one[end - size]) / size for end in range(size, len(one), every)]
        for one in sums
    )
    return dict(zip(steps, means, strict=True))


def thin(values: Mapping[Any, float], most: int) -> Mapping[Any, float]:
    """Return at most `most` points: the lowest and highest in each interval of steps."""
    if len(values) <= most:
        return values
    steps, parts, kept = [*values], most // 2, set[Any]()
    for part in range(parts):
        own = steps[part * len(steps) // parts : (part + 1) * len(steps) // parts]
        kept |= {min(own, key=values.__getitem__), max(own, key=values.__getitem__)}
    return {step: value for step, value in values.items() if step in kept}


def _rounded(values: Iterable[float]) -> list[float]:
    numbers = (float(f"{value:.5g}") for value in values)
    return [int(number) if number.is_integer() else number for number in numbers]


def chart_data(results: RunResults, charts: Sequence[Chart]) -> str:
    """Return cells and charts of lines as the JSON that the page's script draws.

    A cell's clock says for some steps when they ended, in seconds after the first one, and how many
    tokens were seen by then. A line's `x` has differences of steps; what it lacks is as before.
    """
    cells = []
    for cell in _cells_of(results):
        curve = [one for one in cell.result.measured.curve if one.time is not None]
        kept = {place * (len(curve) - 1) // _CLOCK for place in range(_CLOCK + 1)} if curve else {}
        record, start = cell.result.record, min((one.time or 0.0 for one in curve), default=0.0)
        a_step = (record.tokens_per_step_per_gpu or 0.0) * record.world
        clock = [
            _rounded([one.step, (one.time or 0.0) - start, one.tokens_seen or a_step * one.step])
            for one in (curve[place] for place in sorted(kept))
        ]
        cells.append({"label": cell.label, "clock": clock})
    drawn = []
    for chart in charts:
        lines, before = list[dict[str, Any]](), dict[str, Any]()
        for line in chart.lines:
            steps = [line.x[0], *(new - old for old, new in pairwise(line.x))]
            found = asdict(line) | {"x": _rounded(steps), "y": _rounded(line.y)}
            # Steps and values that are those of the line before are written once, and no default.
            alike = [key for key in ("x", "y") if found[key] == before.get(key)]
            alike += [key for key in ("is_pale", "marks", "rules") if not found[key]]
            lines.append({key: found[key] for key in found if key not in alike})
            before = found
        if lines:
            drawn.append({**asdict(chart), "lines": lines, "bars": ()})
    return json.dumps({"cells": cells, "charts": drawn}, separators=(",", ":"))
