"""Tables beside the summary: published numbers, and what chance does to speed and loss."""

from __future__ import annotations

from cookbook.results.loss import LEVEL as LOSS_LEVEL
from cookbook.results.loss import LossVerdict
from cookbook.results.report import tokens_text
from cookbook.results.result import CellSetting, Result, RunResults
from cookbook.results.speed import LEVEL, STALL, STEPS
from cookbook.results.table import UNKNOWN, Table

SPEED_LEGEND = (
    "Median and quartiles of tokens/s/GPU over the measured steps. A stall took "
    f"{STALL:g} times the median step or more; the share is the time that stalls took beyond the "
    "median. A speed-up whose interval holds 0% is inside the noise."
)
REPEATS_LEGEND = (
    "Every cell was trained several times in turn. A speed-up and its interval are over the pairs "
    "of repeats; step times are shown of each repeat, other figures over the steps of the first."
)
LOSS_LEGEND = (
    f"Mean loss minus the baseline's over the steps that both logged, with its {LOSS_LEVEL:.0%} "
    "interval. Equivalent: the interval lies within the margin. Different: it lies outside."
)
LOAD_LEGEND = (
    "Over the last tenth of the logged steps. Busiest over mean: the tokens of a layer's busiest "
    "expert over the mean of its experts, 1 where all get the same (MaxVio is this minus 1). "
    "Starved: less than a tenth of the mean."
)


def measured_tables(results: RunResults) -> list[tuple[str, Table, str]]:
    """Title, table and legend of what was measured, each where there is something to show."""
    tables = (
        ("Speed", speed_table(results), SPEED_LEGEND),
        ("Repeats", repeats_table(results), REPEATS_LEGEND),
        ("Loss verdicts", loss_table(results), LOSS_LEGEND),
        ("Router load", load_table(results), LOAD_LEGEND),
    )
    return [(title, table, legend) for title, table, legend in tables if table is not None]


def published_table(results: RunResults) -> Table | None:
    """Throughput and speed-up, published and measured here; None where nothing was published."""
    if all(cell.published_tokens_per_second_per_gpu is None for cell in results.cells):
        return None
    return Table(
        head=(
            "cell",
            "published tokens/s/GPU",
            "published speed-up",
            "tokens/s/GPU here",
            "speed-up here",
            f"{LEVEL:.0%} interval",
            "here over published",
        ),
        rows=tuple(_published(cell, results.settings[cell.name]) for cell in results.cells),
        align="lrrrrrr",
    )


def speed_table(results: RunResults) -> Table | None:
    """How sure each throughput and speed-up is; None where nothing was measured."""
    cells = [cell for cell in results.cells if cell.throughput is not None]
    if not cells:
        return None
    return Table(
        head=(
            "cell",
            "steps measured",
            "warm-up left out",
            "median",
            "quartiles",
            "stalls",
            "stalls' share",
            "speed-up",
            f"{LEVEL:.0%} interval",
            "interval over",
            "verdict",
            "GPU hours",
            "cost per 10^9 tokens",
        ),
        rows=tuple(_speed(cell, results.settings[cell.name]) for cell in cells),
        align="lrrrrrrrrllrr",
    ).without_unknown()


def repeats_table(results: RunResults) -> Table | None:
    """Each repeat of each cell; None where the sweep does not repeat its cells."""
    rows = tuple(
        (
            cell.name,
            repeat.name,
            repeat.status or "unknown",
            tokens_text(repeat.tokens_per_second_per_gpu),
            UNKNOWN if repeat.final_loss is None else f"{repeat.final_loss:.4f}",
            f"{len(repeat.stalls):,}",
            f"{max(len(repeat.history.attempts) - 1, 0):,}",
        )
        for cell in results.cells
        for repeat in cell.repeats
    )
    if not rows:
        return None
    head = ("cell", "repeat", "status", "tokens/s/GPU", "final loss", "stalls", "restarts")
    return Table(head, rows, "lllrrrr")


def loss_table(results: RunResults) -> Table | None:
    """Each verdict on a loss curve; None where no two cells can be compared."""
    rows = [
        _loss(cell, verdict)
        for cell in results.cells
        for verdict in (cell.loss, cell.loss_last_tenth)
        if verdict is not None
    ]
    if not rows:
        return None
    head = ("cell", "window", "steps", "difference", f"{LOSS_LEVEL:.0%} interval", "margin")
    return Table((*head, "verdict"), tuple(rows), "llrrrrl")


def load_table(results: RunResults) -> Table | None:
    """How evenly experts are loaded; None where no cell logged it."""
    rows = tuple(
        (
            cell.name,
            f"{found.steps[0]:,} to {found.steps[1]:,}",
            f"{found.busiest_over_mean:.2f}",
            f"{found.layer}",
            f"{found.median_over_layers:.2f}",
            f"{found.starved_experts:,}",
            "forced even" if found.is_forced else "the router's own",
        )
        for cell in results.cells
        if (found := cell.router_load) is not None
    )
    head = ("cell", "steps", "busiest over mean", "in layer", "median layer", "starved experts")
    return Table((*head, "routing"), rows, "lrrrrrl") if rows else None


def _published(cell: Result, setting: CellSetting) -> tuple[str, ...]:
    published, here = cell.published_tokens_per_second_per_gpu, cell.tokens_per_second_per_gpu
    is_baseline = cell.name == setting.baseline
    return (
        cell.name,
        tokens_text(published),
        "baseline" if is_baseline and published else _gain(setting.published_speedup),
        tokens_text(here),
        "baseline" if is_baseline and here else _gain(cell.speedup),
        _interval(cell),
        f"{here / published:.2f}" if here and published else UNKNOWN,
    )


def _speed(cell: Result, setting: CellSetting) -> tuple[str, ...]:
    found = cell.throughput
    assert found is not None
    verdict = cell.speed.verdict if cell.speed else None
    if cell.speed is not None and verdict is None:
        verdict = "too few steps"
    return (
        cell.name,
        f"{found.num_steps:,}",
        f"{found.warm_up_steps:,}",
        tokens_text(found.median),
        f"{tokens_text(found.lower_quartile)} to {tokens_text(found.upper_quartile)}",
        f"{len(found.stalls):,}",
        f"{found.stall_share:.1%}",
        "baseline" if cell.name == setting.baseline else _gain(cell.speedup),
        _interval(cell),
        _basis(cell),
        verdict or UNKNOWN,
        UNKNOWN if cell.gpu_hours is None else f"{cell.gpu_hours:,.1f}",
        UNKNOWN if cell.cost_per_billion_tokens is None else f"{cell.cost_per_billion_tokens:,.0f}",
    )


def _loss(cell: Result, found: LossVerdict) -> tuple[str, ...]:
    def number(value: float | None, sign: str = "+") -> str:
        return UNKNOWN if value is None else f"{value:{sign}.4f}"

    interval = UNKNOWN
    if found.low is not None and found.high is not None:
        interval = f"{number(found.low)} to {number(found.high)}"
    return (
        cell.name,
        found.window,
        f"{found.num_steps:,}",
        number(found.difference),
        interval,
        UNKNOWN if found.limit is None else f"±{number(found.limit, '')}",
        found.verdict + (f": {found.reason}" if found.reason else ""),
    )


def _basis(cell: Result) -> str:
    if cell.speed is None:
        return UNKNOWN
    return cell.speed.basis if cell.speed.basis == STEPS else f"{cell.speed.num} repeats"


def _interval(cell: Result) -> str:
    if cell.speed is None or cell.speed.low is None:
        return UNKNOWN
    return f"{_gain(cell.speed.low)} to {_gain(cell.speed.high)}"


def _gain(ratio: float | None) -> str:
    return UNKNOWN if ratio is None else f"{100 * (ratio - 1):+.1f}%"
