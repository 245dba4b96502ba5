"""The columns of every table: in the terminal, in Markdown, on the HTML page and in `compare`.

To add a column, add a line to COLUMNS: heading, tables, alignment, value, format. `{unit}` in a
heading becomes GPU, or rank for a run on CPUs. A column without any known value is omitted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cookbook.base.tables import markdown_table
from cookbook.results.result import Result, RunResults
from cookbook.results.verdicts import LEVEL, LOSS_LEVEL, STALL, STEPS, SpeedUp

UNKNOWN = "-"
CELLS, PUBLISHED, SPEED = "cells", "published", "speed"
REPEATS, LOSSES, LOAD, COMPARE = "repeats", "losses", "load", "compare"
_TITLES = {
    CELLS: (
        "Cells",
        "Speeds: median of the logged steps after warm-up (their first quarter, 1 to 10 steps). "
        "Memory: peak over all ranks and steps. A dash: unknown.",
    ),
    PUBLISHED: ("Published results", ""),
    SPEED: (
        "Speed",
        "Median and quartiles of tokens/s/{unit} over the measured steps. A stall took "
        f"{STALL:g} times the median step or more; their share is the time beyond the median. A "
        "speed-up whose interval holds 0% is inside the noise.",
    ),
    REPEATS: (
        "Repeats",
        "Cells were trained several times in turn. Speed-ups and intervals are over the pairs of "
        "repeats.",
    ),
    LOSSES: (
        "Loss verdicts",
        "Mean loss minus the baseline's over the steps that both logged, with its "
        f"{LOSS_LEVEL:.0%} interval. Equivalent: the interval lies within the margin. Different: "
        "it lies outside.",
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


class Column(NamedTuple):
    heading: str
    tables: str  # names of the tables with this column, separated by spaces
    align: str  # alignment: l (left), or r (right) for numbers
    value: str | Callable[[Result], object]  # a path such as `throughput.num_steps`, or a function
    # A format string for the value, or a function that returns its text.
    template: str | Callable[[Any], str] = "{}"
    # If this field of `Result` has a value, the baseline's own row shows "baseline" in the column.
    baseline: str = ""

    def text(self, row: Result) -> str:
        """Return this column's text in `row`, or a dash if the value is unknown."""
        if self.baseline and row.is_baseline and getattr(row, self.baseline):
            return "baseline"
        found: Any = row
        if callable(self.value):
            found = self.value(row)
        else:
            for name in self.value.split("."):
                found = getattr(found, name) if found is not None else None
        if found is None or found == "":
            return UNKNOWN
        return self.template(found) if callable(self.template) else self.template.format(found)


def table_of(rows: Sequence[Result], table: str, unit: str) -> Table:
    """Return the table named `table`, without columns that give no information."""
    shown = dict[Column, list[str]]()
    for column in COLUMNS:
        if table not in column.tables.split():
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
        PUBLISHED: cells if any(row.published_tokens_per_second_per_gpu for row in cells) else (),
        SPEED: [row for row in cells if row.throughput],
        REPEATS: [run for cell in cells for run in cell.repeats],
        LOSSES: [row for row in cells if row.loss],
        LOAD: [row for row in cells if row.router_load],
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
    status = row.status or "unknown"
    return f"{status}, emulated" if row.emulated and status != "refused" else status


def _steps(row: Result) -> str:
    done = UNKNOWN if row.steps is None else f"{row.steps:,}"
    has_total = row.status not in ("finished", "refused") and row.total_steps
    return f"{done}/{row.total_steps:,}" if has_total else done


def _published(row: Result) -> str:
    published, gain = tokens_text(row.published_tokens_per_second_per_gpu), row.published_speedup
    return published if gain is None or row.is_baseline else f"{published} ({gain:.2f}x)"


def _over_published(row: Result) -> float | None:
    here, published = row.tokens_per_second_per_gpu, row.published_tokens_per_second_per_gpu
    return here / published if here and published else None


def _tflops(value: float) -> str:
    return f"{value:,.1f}" if value >= 10 else f"{value:.2g}"


def _quartiles(found: Any) -> str:
    return f"{tokens_text(found.lower_quartile)} to {tokens_text(found.upper_quartile)}"


def _basis(speed: SpeedUp) -> str:
    return STEPS if speed.basis == STEPS else f"{speed.num} repeats"


def _span(text: Callable[[float], str]) -> Callable[[Any], str]:
    return lambda found: (
        UNKNOWN if found.low is None else f"{text(found.low)} to {text(found.high)}"
    )


def _judged(found: Any) -> str:
    return f"{found.verdict}: {found.reason}" if found.reason else str(found.verdict)


_TOKENS, _PUBLISHED = "tokens_per_second_per_gpu", "published_tokens_per_second_per_gpu"
_SPEED_LEVEL, _LOSS_LEVEL = f"{LEVEL:.0%} interval", f"{LOSS_LEVEL:.0%} interval"
COLUMNS = (
    Column("cell", "cells published speed losses load compare", "l", "name"),
    Column("repeat", "repeats", "l", "name"),
    Column("run", "compare", "l", "run"),
    Column("published tokens/s/{unit}", "published", "r", _PUBLISHED, tokens_text),
    Column(
        "published speed-up", "published", "r", "published_speedup", gain_text, baseline=_PUBLISHED
    ),
    Column("tokens/s/{unit}", "cells published repeats compare", "r", _TOKENS, tokens_text),
    Column("over reference", "compare", "r", "speed.ratio", "{:.3f}x"),
    Column(_SPEED_LEVEL, "compare", "r", "speed", _span("{:.3f}".format)),
    Column("speed", "compare", "l", "speed", lambda speed: speed.verdict or "too few steps"),
    Column("speed-up", "cells", "r", "speedup", "{:.2f}x", baseline="speedup"),
    Column("median", "speed", "r", _TOKENS, tokens_text),
    Column("quartiles", "speed", "r", "throughput", _quartiles),
    Column("speed-up", "published speed", "r", "speedup", gain_text, baseline=_TOKENS),
    Column(_SPEED_LEVEL, "published speed", "r", "speed", _span(gain_text)),
    Column("interval over", "speed", "l", "speed", _basis),
    Column("verdict", "speed", "l", "speed", lambda speed: speed.verdict or "too few steps"),
    Column("here over published", "published", "r", _over_published, "{:.2f}"),
    Column("steps measured", "speed", "r", "throughput.num_steps", "{:,}"),
    Column("warm-up left out", "speed", "r", "throughput.warm_up_steps", "{:,}"),
    Column("stalls", "speed repeats", "r", "throughput.stalls", lambda stalls: f"{len(stalls):,}"),
    Column("stalls' share", "speed", "r", "throughput.stall_share", "{:.1%}"),
    Column("final loss", "cells repeats", "r", "final_loss", "{:.4f}"),
    Column("validation loss", "cells repeats compare", "r", "validation_loss", "{:.4f}"),
    Column("status", "cells repeats", "l", _status),
    Column("steps", "cells", "r", _steps),
    Column("restarts", "repeats", "r", lambda row: max(len(row.history.attempts) - 1, 0), "{:,}"),
    Column("TFLOPs/{unit}", "cells", "r", "tflops_per_gpu", _tflops),
    Column("MFU", "cells", "r", "mfu", "{:.1f}%"),
    Column("memory GiB", "cells", "r", "memory_gib", "{:.2f}"),
    Column("published", "cells", "r", _published),
    Column("predicted", "cells", "r", "predicted_tokens_per_second_per_gpu", tokens_text),
    Column("attention", "cells", "r", "attention"),
    Column("attended tokens", "cells", "r", "mean_attended_length", "{:,.0f}"),
    Column("loss", "compare", "l", "loss", _judged),
    Column("loss, last tenth", "compare", "l", "loss_last_tenth", _judged),
    Column("difference", "losses", "r", "loss.difference", "{:+.4f}"),
    Column(_LOSS_LEVEL, "losses", "r", "loss", _span("{:+.4f}".format)),
    Column("margin", "losses", "r", "loss.limit", "±{:.4f}"),
    Column("verdict", "losses", "l", "loss", _judged),
    Column("last tenth: difference", "losses", "r", "loss_last_tenth.difference", "{:+.4f}"),
    Column(f"last tenth: {_LOSS_LEVEL}", "losses", "r", "loss_last_tenth", _span("{:+.4f}".format)),
    Column("last tenth: verdict", "losses", "l", "loss_last_tenth", _judged),
    Column("steps compared", "losses", "r", "loss.num_steps", "{:,}"),
    Column("GPU hours", "speed compare", "r", "gpu_hours", "{:,.1f}"),
    Column("cost per 10^9 tokens", "speed compare", "r", "cost_per_billion_tokens", "{:,.0f}"),
    Column("busiest over mean", "load", "r", "router_load.busiest_over_mean", "{:.2f}"),
    Column("in layer", "load", "r", "router_load.layer"),
    Column("median layer", "load", "r", "router_load.median_over_layers", "{:.2f}"),
    Column("starved experts", "load", "r", "router_load.starved_experts", "{:,}"),
    Column("over steps", "load", "r", "router_load.steps", "{0[0]:,} to {0[1]:,}"),
    Column("routing", "cells load", "l", "routing"),
)
