"""The one list of columns: of every table in the terminal, Markdown, the page and `compare`.

A new column is a line in COLUMNS: heading, tables, alignment, value, format. `{unit}` in a
heading is GPU, or rank for a run on CPUs. A column that is unknown in every row is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cookbook.base.tables import markdown_table
from cookbook.results.loss import LEVEL as LOSS_LEVEL
from cookbook.results.loss import LossVerdict
from cookbook.results.result import CellSetting, Result, RunResults
from cookbook.results.speed import LEVEL, STALL, STEPS

UNKNOWN = "-"
CELLS, PUBLISHED, SPEED = "cells", "published", "speed"
REPEATS, LOSSES, LOAD, COMPARE = "repeats", "losses", "load", "compare"
TITLES = {
    CELLS: "Cells",
    PUBLISHED: "Published results",
    SPEED: "Speed",
    REPEATS: "Repeats",
    LOSSES: "Loss verdicts",
    LOAD: "Router load",
}
LEGENDS = {
    CELLS: "tokens/s/{unit}, TFLOPs and MFU: median of the logged steps after warm-up (their first "
    "quarter, 1 to 10 steps). Memory: peak over all ranks and steps. A dash: unknown.",
    PUBLISHED: "",
    SPEED: "Median and quartiles of tokens/s/{unit} over the measured steps. A stall took "
    f"{STALL:g} times the median step or more; their share is the time beyond the median. A "
    "speed-up whose interval holds 0% is inside the noise.",
    REPEATS: "Cells were trained several times in turn. Speed-ups and intervals are over the pairs "
    "of repeats.",
    LOSSES: "Mean loss minus the baseline's over the steps that both logged, with its "
    f"{LOSS_LEVEL:.0%} interval. Equivalent: the interval lies within the margin. Different: it "
    "lies outside.",
    LOAD: "Over the last tenth of the logged steps. Busiest over mean: tokens of a layer's busiest "
    "expert over the mean of its experts; 1 is even (MaxVio is this minus 1). Starved: less than a "
    "tenth of the mean.",
}


@dataclass(frozen=True)
class Table:
    """Text by row and column; `align` has a letter for each column: l, or r for numbers."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    align: str

    def markdown(self) -> str:
        """The table in Markdown that also reads well as text."""
        return markdown_table(self.head, self.rows, self.align)


@dataclass(frozen=True, slots=True)
class Row:
    """A cell as tables show it; the last three fields are of a comparison.

    Attributes:
        reference_tokens: throughput of the cell that it is compared with.
        reason: why the two cannot be compared.
        is_slower: slower than the tolerance allows, or without a speed where the reference has one.
    """

    cell: Result
    setting: CellSetting
    run: str
    reference_tokens: float | None = None
    reason: str | None = None
    is_slower: bool = False

    @property
    def is_baseline(self) -> bool:
        return self.cell.name == self.setting.baseline


@dataclass(frozen=True)
class Column:
    """A column.

    Attributes:
        tables: names of the tables that have it.
        align: l, or r for numbers.
        value: an attribute of Result such as `throughput.num_steps`, shown by `template`, or a
            function that returns the text.
    """

    heading: str
    tables: str
    align: str
    value: str | Callable[[Row], str]
    template: str = "{}"

    def text(self, row: Row) -> str:
        """The row's text, a dash for an unknown value."""
        if not isinstance(self.value, str):
            return self.value(row)
        found: Any = row.cell
        for name in self.value.split("."):
            found = getattr(found, name) if found is not None else None
        return UNKNOWN if found is None or found == "" else self.template.format(found)


def rows_of(results: RunResults, table: str = CELLS) -> list[Row]:
    """The rows of a table: a cell each, or a repeat each."""
    run = results.run.run
    rows = [Row(cell, results.settings[cell.name], run) for cell in results.cells]
    if table == REPEATS:
        repeats = results.repeats
        rows = [Row(one, r.setting, run) for r in rows for one in repeats.get(r.cell.name, ())]
    needed: Callable[[Row], object] = {
        SPEED: lambda row: row.cell.throughput,
        LOSSES: lambda row: row.cell.loss,
        LOAD: lambda row: row.cell.router_load,
    }.get(table, lambda row: True)
    rows = [row for row in rows if needed(row)]
    if table == PUBLISHED and not any(row.cell.published_tokens_per_second_per_gpu for row in rows):
        return []
    return rows


def table_of(rows: Sequence[Row], table: str, unit: str) -> Table:
    """The table of that name without the columns that say nothing."""
    heads: list[str] = []
    columns: list[list[str]] = []
    align = ""
    for column in COLUMNS:
        if table not in column.tables.split():
            continue
        texts = [column.text(row) for row in rows]
        # Where all cells agree on their attention, the facts above the table have it.
        fewest = 1 if column.heading in ("attention", "attended tokens") else 0
        is_first = len(heads) < 2
        if is_first or len({*texts} - {UNKNOWN}) > fewest:
            heads.append(column.heading.format(unit=unit))
            columns.append(texts)
            align += column.align
    return Table(tuple(heads), tuple(zip(*columns, strict=True)), align)


def report_tables(results: RunResults) -> dict[str, Table]:
    """Every table of a report with something to show, by name; the main one always."""
    found = {name: rows_of(results, name) for name in TITLES}
    return {
        name: table_of(rows, name, results.unit)
        for name, rows in found.items()
        if rows or name == CELLS
    }


def number(value: float | None, template: str) -> str:
    """The value in that format, or a dash."""
    return UNKNOWN if value is None else template.format(value)


def tokens_text(value: float | None) -> str:
    """Tokens/s; a CPU's or a debug model's few tokens keep their decimals."""
    return number(value, "{:,.0f}" if value is None or value >= 100 else "{:.3g}")


def gain_text(ratio: float | None) -> str:
    """A ratio as percent more or less: `+30.2%`."""
    return UNKNOWN if ratio is None else f"{100 * (ratio - 1):+.1f}%"


def interval_text(cell: Result) -> str:
    """The interval of a cell's speed-up."""
    if cell.speed is None or cell.speed.low is None:
        return UNKNOWN
    return f"{gain_text(cell.speed.low)} to {gain_text(cell.speed.high)}"


def _status(row: Row) -> str:
    status = row.cell.status or "unknown"
    return f"{status}, emulated" if row.cell.emulated and status != "refused" else status


def _steps(row: Row) -> str:
    """`20` for a finished cell, else the progress: `7/20`."""
    done = number(row.cell.steps, "{:,}")
    total = row.setting.total_steps
    return done if row.cell.status in ("finished", "refused") or not total else f"{done}/{total:,}"


def _loss(row: Row) -> str:
    raw = row.setting.raw_final_loss
    return (
        str(raw) if row.cell.final_loss is None and raw else number(row.cell.final_loss, "{:.4f}")
    )


def _restarts(row: Row) -> str:
    return f"{max(len(row.cell.history.attempts) - 1, 0):,}"


def _speedup(row: Row) -> str:
    if row.cell.speedup is not None and row.is_baseline:
        return "baseline"
    return number(row.cell.speedup, "{:.2f}x")


def _published(row: Row) -> str:
    published = tokens_text(row.cell.published_tokens_per_second_per_gpu)
    gain = row.setting.published_speedup
    return published if gain is None or row.is_baseline else f"{published} ({gain:.2f}x)"


def _published_gain(row: Row) -> str:
    if row.is_baseline and row.cell.published_tokens_per_second_per_gpu:
        return "baseline"
    return gain_text(row.setting.published_speedup)


def _gain(row: Row) -> str:
    if row.is_baseline:
        return "baseline" if row.cell.tokens_per_second_per_gpu else UNKNOWN
    return gain_text(row.cell.speedup)


def _over_published(row: Row) -> str:
    here, published = (
        row.cell.tokens_per_second_per_gpu,
        row.cell.published_tokens_per_second_per_gpu,
    )
    return f"{here / published:.2f}" if here and published else UNKNOWN


def _quartiles(row: Row) -> str:
    found = row.cell.throughput
    if found is None:
        return UNKNOWN
    return f"{tokens_text(found.lower_quartile)} to {tokens_text(found.upper_quartile)}"


def _tflops(row: Row) -> str:
    value = row.cell.tflops_per_gpu
    return number(value, "{:,.1f}" if value is None or value >= 10 else "{:.2g}")


def _stalls(row: Row) -> str:
    return UNKNOWN if row.cell.throughput is None else f"{len(row.cell.throughput.stalls):,}"


def _basis(row: Row) -> str:
    speed = row.cell.speed
    if speed is None:
        return UNKNOWN
    return STEPS if speed.basis == STEPS else f"{speed.num} repeats"


def _verdict(row: Row) -> str:
    return UNKNOWN if row.cell.speed is None else row.cell.speed.verdict or "too few steps"


def _routing(row: Row) -> str:
    found = row.cell.router_load
    return "forced even" if found and found.is_forced else "the router's own"


def _ratio_interval(row: Row) -> str:
    speed = row.cell.speed
    if speed is None or speed.low is None:
        return UNKNOWN
    return f"{speed.low:.3f} to {speed.high:.3f}"


def _judged(found: LossVerdict | None) -> str:
    if found is None:
        return UNKNOWN
    return f"{found.verdict}: {found.reason}" if found.reason else found.verdict


def _loss_range(found: LossVerdict | None) -> str:
    if found is None or found.low is None:
        return UNKNOWN
    return f"{found.low:+.4f} to {found.high:+.4f}"


def tokens(value: str) -> Callable[[Row], str]:
    """The text of that attribute as tokens/s."""
    return lambda row: tokens_text(getattr(row.cell, value))


_TOKENS, _PUBLISHED = "tokens_per_second_per_gpu", "published_tokens_per_second_per_gpu"
COLUMNS = (
    Column("cell", "cells published speed losses load compare", "l", "name"),
    Column("repeat", "repeats", "l", "name"),
    Column("run", "compare", "l", lambda row: row.run),
    Column("published tokens/s/{unit}", "published", "r", tokens(_PUBLISHED)),
    Column("published speed-up", "published", "r", _published_gain),
    Column("tokens/s/{unit}", "cells published repeats compare", "r", tokens(_TOKENS)),
    Column("over reference", "compare", "r", "speed.ratio", "{:.3f}x"),
    Column(f"{LEVEL:.0%} interval", "compare", "r", _ratio_interval),
    Column("speed", "compare", "l", _verdict),
    Column("speed-up", "cells", "r", _speedup),
    Column("median", "speed", "r", tokens(_TOKENS)),
    Column("quartiles", "speed", "r", _quartiles),
    Column("speed-up", "published speed", "r", _gain),
    Column(f"{LEVEL:.0%} interval", "published speed", "r", lambda row: interval_text(row.cell)),
    Column("interval over", "speed", "l", _basis),
    Column("verdict", "speed", "l", _verdict),
    Column("here over published", "published", "r", _over_published),
    Column("steps measured", "speed", "r", "throughput.num_steps", "{:,}"),
    Column("warm-up left out", "speed", "r", "throughput.warm_up_steps", "{:,}"),
    Column("stalls", "speed repeats", "r", _stalls),
    Column("stalls' share", "speed", "r", "throughput.stall_share", "{:.1%}"),
    Column("final loss", "cells repeats", "r", _loss),
    Column("status", "cells repeats", "l", _status),
    Column("steps", "cells", "r", _steps),
    Column("restarts", "repeats", "r", _restarts),
    Column("TFLOPs/{unit}", "cells", "r", _tflops),
    Column("MFU", "cells", "r", "mfu", "{:.1f}%"),
    Column("memory GiB", "cells", "r", "memory_gib", "{:.2f}"),
    Column("published", "cells", "r", _published),
    Column("predicted", "cells", "r", tokens("predicted_tokens_per_second_per_gpu")),
    Column("attention", "cells", "r", "attention"),
    Column("attended tokens", "cells", "r", "mean_attended_length", "{:,.0f}"),
    Column("loss", "compare", "l", lambda row: _judged(row.cell.loss)),
    Column("loss, last tenth", "compare", "l", lambda row: _judged(row.cell.loss_last_tenth)),
    Column("difference", "losses", "r", "loss.difference", "{:+.4f}"),
    Column(f"{LOSS_LEVEL:.0%} interval", "losses", "r", lambda row: _loss_range(row.cell.loss)),
    Column("margin", "losses", "r", "loss.limit", "±{:.4f}"),
    Column("verdict", "losses", "l", lambda row: _judged(row.cell.loss)),
    Column("last tenth: difference", "losses", "r", "loss_last_tenth.difference", "{:+.4f}"),
    Column(
        f"last tenth: {LOSS_LEVEL:.0%} interval",
        "losses",
        "r",
        lambda row: _loss_range(row.cell.loss_last_tenth),
    ),
    Column("last tenth: verdict", "losses", "l", lambda row: _judged(row.cell.loss_last_tenth)),
    Column("steps compared", "losses", "r", "loss.num_steps", "{:,}"),
    Column("GPU hours", "speed compare", "r", "gpu_hours", "{:,.1f}"),
    Column("cost per 10^9 tokens", "speed compare", "r", "cost_per_billion_tokens", "{:,.0f}"),
    Column("busiest over mean", "load", "r", "router_load.busiest_over_mean", "{:.2f}"),
    Column("in layer", "load", "r", "router_load.layer"),
    Column("median layer", "load", "r", "router_load.median_over_layers", "{:.2f}"),
    Column("starved experts", "load", "r", "router_load.starved_experts", "{:,}"),
    Column("over steps", "load", "r", "router_load.steps", "{0[0]:,} to {0[1]:,}"),
    Column("routing", "load", "l", _routing),
)
