"""The columns of every table, in the terminal, in Markdown, on the page and in `compare`; the JSON.

To add a column, add a line to COLUMNS: heading, tables, value, text. `{unit}` in a
heading becomes GPU, or rank for a run on CPUs. A column without any known value is omitted. To add
a field of the JSON report, add a line to FIELDS; `make docs` puts it into the reference.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from cookbook.base.files import json_text
from cookbook.base.tables import markdown_table
from cookbook.results import verdicts
from cookbook.results.recorded import UNKNOWN, routing_of
from cookbook.results.result import Result, RunResults

CELLS, SPEED = "cells", "speed"
REPEATS, LOSSES, LOAD, COMPARE = "repeats", "losses", "load", "compare"
_TITLES = {
    CELLS: (
        "Cells",
        "Speeds: median of the logged steps after warm-up (their first quarter, 1 to 10 steps). "
        "Memory: peak over all ranks and steps. A dash: unknown.",
    ),
    SPEED: (
        "Speed",
        "Median and quartiles of tokens/s/{unit} over the measured steps. A stall took "
        f"{verdicts.STALL:g} times the median step or more; their share is the time beyond the "
        "median. A speed-up whose interval holds 0% is inside the noise.",
    ),
    REPEATS: (
        "Repeats",
        "Cells were trained several times in turn. Speed-ups and intervals are over the pairs of "
        "repeats.",
    ),
    LOSSES: (
        "Loss verdicts",
        "Mean loss minus the baseline's over the steps that both logged, with its "
        f"{verdicts.LOSS_LEVEL:.0%} interval. Equivalent: the interval lies within the margin. "
        "Different: it lies outside.",
    ),
    LOAD: (
        "Router load",
        "Over the last tenth of the logged steps. Busiest over mean: tokens of a layer's busiest "
        "expert over the mean of its experts; 1 is even (MaxVio is this minus 1). Starved: less "
        "than a tenth of the mean.",
    ),
    COMPARE: ("Comparison", ""),
}


@dataclass(frozen=True)
class Table:
    """Text by row and column; `align` has one letter per column: l (left) or r (right)."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    align: str
    title: str = ""
    legend: str = ""  # the text below the table

    def markdown(self) -> str:
        return markdown_table(self.head, self.rows, self.align)


T = TypeVar("T")


@dataclass(frozen=True)
class Column(Generic[T]):
    heading: str
    tables: Sequence[str]  # names of the tables with this column
    value: Callable[[Result], T | None]
    # A format string for the value, or a function that returns its text.
    template: str | Callable[[T], str] = "{}"
    # If this returns a value, the baseline's own row shows "baseline" in the column.
    baseline: Callable[[Result], object] = lambda row: None
    align: str = "r"  # alignment: l (left), or r (right) for numbers

    def text(self, row: Result) -> str:
        """Return this column's text in `row`, or a dash if the value is unknown."""
        if row.is_baseline and self.baseline(row):
            return "baseline"
        found = self.value(row)
        if found is None or found == "":
            return UNKNOWN
        return (
            self.template.format(found) if isinstance(self.template, str) else self.template(found)
        )


def table_of(rows: Sequence[Result], table: str, unit: str) -> Table:
    """Return the table named `table`, without columns that give no information."""
    shown = dict[Column[Any], list[str]]()
    for column in COLUMNS:
        if table not in column.tables:
            continue
        texts = [column.text(row) for row in rows]
        # Omit each of these columns if all cells agree: a line of the report then states the value.
        fewest = 1 if column.heading in ("attention", "attended tokens", "routing") else 0
        if len(shown) < 2 or len({*texts} - {UNKNOWN}) > fewest:
            shown[column] = texts
    title, legend = _TITLES[table]
    return Table(
        head=[column.heading.format(unit=unit) for column in shown],
        rows=[*zip(*shown.values(), strict=True)],
        align="".join(column.align for column in shown),
        title=title,
        legend=legend.format(unit=unit),
    )


def report_tables(results: RunResults) -> dict[str, Table]:
    """Return a report's tables by name: the main table, and every other table that has rows."""
    cells = results.cells
    rows: dict[str, Sequence[Result]] = {
        CELLS: cells,
        SPEED: [row for row in cells if row.measured.throughput],
        REPEATS: [run for cell in cells for run in cell.repeats],
        LOSSES: [row for row in cells if row.judged.loss],
        LOAD: [row for row in cells if row.measured.router_load],
    }
    return {
        name: table_of(own, name, results.unit)
        for name, own in rows.items()
        if own or name == CELLS
    }


def tokens_text(value: float | None) -> str:
    """Format tokens/s; small values, as from a CPU or a debug model, keep decimals."""
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def gain_text(ratio: float | None) -> str:
    """Format a ratio as a relative difference: `+30.2%`."""
    return UNKNOWN if ratio is None else f"{100 * (ratio - 1):+.1f}%"


def _status(row: Result) -> str:
    status = row.measured.status or "unknown"
    return f"{status}, emulated" if row.measured.emulated and status != "refused" else status


def _steps(row: Result) -> str:
    done, total = row.measured.steps, row.record.steps
    text = UNKNOWN if done is None else f"{done:,}"
    is_open = row.measured.status not in ("finished", "refused")
    return f"{text}/{total:,}" if is_open and total else text


def _published_and_gain(row: Result) -> str:
    published, gain = tokens_text(_published(row)), row.judged.published_speedup
    return published if gain is None or row.is_baseline else f"{published} ({gain:.2f}x)"


def _tflops(value: float) -> str:
    return f"{value:,.1f}" if value >= 10 else f"{value:.2g}"


def _basis(speed: verdicts.SpeedUp) -> str:
    return verdicts.STEPS if speed.basis == verdicts.STEPS else f"{speed.num} repeats"


def _quartiles(found: verdicts.Throughput) -> str:
    return f"{tokens_text(found.lower_quartile)} to {tokens_text(found.upper_quartile)}"


def _verdict(speed: verdicts.SpeedUp) -> str:
    return speed.verdict or "too few steps"


def _span(text: Callable[[float], str]) -> Callable[[Any], str]:
    return lambda found: (
        UNKNOWN if found.low is None else f"{text(found.low)} to {text(found.high)}"
    )


def _judged(found: verdicts.LossVerdict) -> str:
    return f"{found.verdict}: {found.reason}" if found.reason else str(found.verdict)


def _difference(found: verdicts.LossVerdict) -> str:
    return UNKNOWN if found.difference is None else f"{found.difference:+.4f}"


def _tokens(row: Result) -> float | None:
    return row.measured.tokens_per_second_per_gpu


def _published(row: Result) -> float | None:
    return row.record.published_tokens_per_second_per_gpu


def _predicted(row: Result) -> float | None:
    return row.judged.predicted.tokens_per_second_per_gpu if row.judged.predicted else None


_SPEED_LEVEL = f"{verdicts.LEVEL:.0%} interval"
_LOSS_LEVEL = f"{verdicts.LOSS_LEVEL:.0%} interval"
_NAMED = (CELLS, SPEED, LOSSES, LOAD, COMPARE)
_ALL, _COSTS = (CELLS, REPEATS, COMPARE), (SPEED, COMPARE)
_LAST, _SIGNED_SPAN = "last tenth: ", _span("{:+.4f}".format)
# In these lines, `r` is a cell's Result.
COLUMNS: tuple[Column[Any], ...] = (
    Column("cell", _NAMED, lambda r: r.name, align="l"),
    Column("repeat", (REPEATS,), lambda r: r.name, align="l"),
    Column("run", (COMPARE,), lambda r: r.judged.run, align="l"),
    Column("tokens/s/{unit}", (CELLS, REPEATS, COMPARE), _tokens, tokens_text),
    Column("over reference", (COMPARE,), lambda r: r.judged.speed, "{0.ratio:.3f}x"),
    Column(_SPEED_LEVEL, (COMPARE,), lambda r: r.judged.speed, _span("{:.3f}".format)),
    Column("speed", (COMPARE,), lambda r: r.judged.speed, _verdict, align="l"),
    Column("speed-up", (CELLS,), lambda r: r.judged.speedup, "{:.2f}x", lambda r: r.judged.speedup),
    Column("median", (SPEED,), _tokens, tokens_text),
    Column("quartiles", (SPEED,), lambda r: r.measured.throughput, _quartiles),
    Column("speed-up", (SPEED,), lambda r: r.judged.speedup, gain_text, _tokens),
    Column(_SPEED_LEVEL, (SPEED,), lambda r: r.judged.speed, _span(gain_text)),
    Column("interval over", (SPEED,), lambda r: r.judged.speed, _basis, align="l"),
    Column("verdict", (SPEED,), lambda r: r.judged.speed, _verdict, align="l"),
    Column("steps measured", (SPEED,), lambda r: r.measured.throughput, "{0.num_steps:,}"),
    Column("warm-up left out", (SPEED,), lambda r: r.measured.throughput, "{0.warm_up_steps:,}"),
    Column(
        "stalls", (SPEED, REPEATS), lambda r: (t := r.measured.throughput) and len(t.stalls), "{:,}"
    ),
    Column("stalls' share", (SPEED,), lambda r: r.measured.throughput, "{0.stall_share:.1%}"),
    Column("final loss", (CELLS, REPEATS), lambda r: r.measured.final_loss, "{:.4f}"),
    Column("validation loss", _ALL, lambda r: r.measured.validation_loss, "{:.4f}"),
    Column("status", (CELLS, REPEATS), _status, align="l"),
    Column("steps", (CELLS,), _steps),
    Column("restarts", (REPEATS,), lambda r: max(len(r.measured.history.attempts) - 1, 0), "{:,}"),
    Column("TFLOPs/{unit}", (CELLS,), lambda r: r.measured.tflops_per_gpu, _tflops),
    Column("MFU", (CELLS,), lambda r: r.measured.mfu, "{:.1f}%"),
    Column("memory GiB", (CELLS,), lambda r: r.measured.memory_gib, "{:.2f}"),
    Column("published", (CELLS,), _published_and_gain),
    Column("predicted", (CELLS,), _predicted, tokens_text),
    Column("attention", (CELLS,), lambda r: r.measured.attention),
    Column("attended tokens", (CELLS,), lambda r: r.measured.mean_attended_length, "{:,.0f}"),
    Column("loss", (COMPARE,), lambda r: r.judged.loss, _judged, align="l"),
    Column("loss, last tenth", (COMPARE,), lambda r: r.judged.loss_last_tenth, _judged, align="l"),
    Column("difference", (LOSSES,), lambda r: r.judged.loss, _difference),
    Column(_LOSS_LEVEL, (LOSSES,), lambda r: r.judged.loss, _SIGNED_SPAN),
    Column("margin", (LOSSES,), lambda r: r.judged.loss and r.judged.loss.limit, "±{:.4f}"),
    Column("verdict", (LOSSES,), lambda r: r.judged.loss, _judged, align="l"),
    Column(_LAST + "difference", (LOSSES,), lambda r: r.judged.loss_last_tenth, _difference),
    Column(_LAST + _LOSS_LEVEL, (LOSSES,), lambda r: r.judged.loss_last_tenth, _SIGNED_SPAN),
    Column(_LAST + "verdict", (LOSSES,), lambda r: r.judged.loss_last_tenth, _judged, align="l"),
    Column("steps compared", (LOSSES,), lambda r: r.judged.loss, "{0.num_steps:,}"),
    Column("GPU hours", _COSTS, lambda r: r.measured.gpu_hours, "{:,.1f}"),
    Column("cost per 10^9 tokens", _COSTS, lambda r: r.measured.cost_per_billion_tokens, "{:,.0f}"),
    Column(
        "busiest over mean", (LOAD,), lambda r: r.measured.router_load, "{0.busiest_over_mean:.2f}"
    ),
    Column("in layer", (LOAD,), lambda r: r.measured.router_load, "{0.layer}"),
    Column("median layer", (LOAD,), lambda r: r.measured.router_load, "{0.median_over_layers:.2f}"),
    Column("starved experts", (LOAD,), lambda r: r.measured.router_load, "{0.starved_experts:,}"),
    Column(
        "over steps", (LOAD,), lambda r: r.measured.router_load, "{0.steps[0]:,} to {0.steps[1]:,}"
    ),
    Column("routing", (CELLS, LOAD), lambda r: routing_of(r.record), align="l"),
)

_OF_REPEAT = ("name", "status", "steps", "tokens_per_second_per_gpu", "final_loss")
# The fields of a cell in the JSON report: name, meaning, value.
FIELDS: tuple[tuple[str, str, Callable[[Result], object]], ...] = (
    ("name", "of the cell and its folder", lambda r: r.name),
    ("recipe", "that is trained", lambda r: r.record.recipe),
    ("precision", "its overlay", lambda r: r.record.precision),
    ("ep_backend", "its overlay", lambda r: r.record.ep_backend),
    ("status", "finished, running, failed, refused, ...", lambda r: r.measured.status),
    ("reason", "why it has this status", lambda r: r.measured.reason),
    ("steps", "the last step reached", lambda r: r.measured.steps),
    ("tokens_per_second_per_gpu", "median of the logged steps after warm-up", _tokens),
    ("tflops_per_gpu", "TFLOP/s, median likewise", lambda r: r.measured.tflops_per_gpu),
    ("mfu", "%, likewise; of the BF16 peak, also for quantized cells", lambda r: r.measured.mfu),
    ("memory_gib", "GiB, peak over all ranks and steps", lambda r: r.measured.memory_gib),
    ("final_loss", "of the last step", lambda r: r.measured.final_loss),
    ("validation_loss", "the last one", lambda r: r.measured.validation_loss),
    ("speedup", "over the baseline's throughput; null if emulated", lambda r: r.judged.speedup),
    ("published_tokens_per_second_per_gpu", "where the recipe has one", _published),
    ("attention", "what computed it in the first step", lambda r: r.measured.attention),
    ("mean_attended_length", "tokens one attends to", lambda r: r.measured.mean_attended_length),
    ("emulated", "whether software stands in for a kernel", lambda r: r.measured.emulated),
    ("active", "what ran, as observed in the first step", lambda r: r.measured.active),
    ("resumptions", "where each attempt resumed", lambda r: r.measured.resumptions),
    ("history", "attempts: cause, decision, steps lost, time", lambda r: r.measured.history),
    ("throughput", "tokens/s/GPU: quartiles, mean, stalls", lambda r: r.measured.throughput),
    ("speed", "the speed-up with its interval and verdict", lambda r: r.judged.speed),
    ("loss", "the verdict against the baseline's curve", lambda r: r.judged.loss),
    ("loss_last_tenth", "the same over the last tenth", lambda r: r.judged.loss_last_tenth),
    ("gpu_hours", "h, of all attempts and repeats", lambda r: r.measured.gpu_hours),
    (
        "cost_per_billion_tokens",
        "needs `price_per_gpu_hour`",
        lambda r: r.measured.cost_per_billion_tokens,
    ),
    ("predicted_tokens_per_second_per_gpu", "what `check` predicts", _predicted),
    (
        "predicted_largest",
        "the largest term of the predicted step",
        lambda r: r.judged.predicted and r.judged.predicted.largest,
    ),
    ("router_load", "over the last tenth of the logged steps", lambda r: r.measured.router_load),
    ("profiled", "whether the profiler slowed it down", lambda r: r.measured.profiled),
    (
        "repeats",
        "each repeat's name, status, steps, speed and final loss",
        lambda r: [fields_of(one, _OF_REPEAT) for one in r.repeats],
    ),
)


def fields_of(row: Result, names: Sequence[str]) -> dict[str, object]:
    return {name: value(row) for name, _, value in FIELDS if name in names}


def render_json(results: RunResults) -> str:
    """Return the report as one JSON object; unknown, NaN and infinite values are null."""
    run, names = results.run, [name for name, *_ in FIELDS]
    cells = [fields_of(cell, names) for cell in results.cells]
    return json_text({"run": run.run, "sweep": run.sweep, "cells": cells, "baseline": run.baseline})
