"""Draw a chart with Matplotlib, for files and documents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cookbook.base.figure import BAND, INK, QUIET, draw_figure
from cookbook.results.charts import COLOURS, Chart

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_chart(chart: Chart) -> dict[str, bytes]:
    """Return the picture as `svg` and as `png`.

    Raises:
        ModuleNotFoundError: Matplotlib is not installed.
    """
    if chart.bars:
        height = 1.0 + 0.6 * len(chart.bars)
        return draw_figure(chart.name, height, lambda axes: _draw_bars(axes, chart), grid="x")
    return draw_figure(chart.name, 3.6, lambda axes: _draw_lines(axes, chart), legend="linecolor")


def _draw_bars(axes: Axes, chart: Chart) -> None:
    axes.set(xlim=(0, chart.high), ylim=(len(chart.bars) - 0.4, -0.7), yticks=[])
    axes.set_xlabel(chart.unit, color=QUIET)
    for row, bar in enumerate(chart.bars):
        colour = COLOURS[bar.colour][0]
        axes.text(0, row - 0.32, bar.label, color=colour, weight="bold")
        axes.text(chart.high, row - 0.32, bar.text, color=INK, horizontalalignment="right")
        axes.barh(row, bar.value or 0.0, 0.42, color=colour)
        if bar.value and bar.low and bar.high:
            errors = [[max(bar.value - bar.low, 0.0)], [max(bar.high - bar.value, 0.0)]]
            axes.errorbar(bar.value, row, xerr=errors, ecolor=INK, capsize=3)
        if bar.base:
            axes.plot([bar.base] * 2, [row - 0.3, row + 0.3], color=INK, linestyle=":")
        if bar.published:
            axes.barh(row + 0.3, bar.published, 0.1, color=colour, alpha=0.5)


def _draw_lines(axes: Axes, chart: Chart) -> None:
    axes.set_ylim(chart.low, chart.high)
    axes.set_ylabel(chart.unit, color=QUIET)
    axes.set_xlabel("step", color=QUIET)
    axes.margins(x=0)
    if chart.band:
        axes.axhspan(-chart.band, chart.band, color=BAND, zorder=0)
        axes.axhline(0, color=QUIET, linewidth=1)
    for line in chart.lines:
        style: Any = {"color": COLOURS[line.colour][0], "alpha": 0.4 if line.is_pale else 1.0}
        marker = "o" if len(line.x) == 1 else None
        dashes = "--" if line.is_dashed else "-"
        label = None if line.is_pale else line.label
        axes.plot(line.x, line.y, dashes, linewidth=1.4, marker=marker, label=label, **style)
        for x, y in line.marks:
            axes.plot(x, min(y, chart.high), "^", markersize=5, **style)
        for x in line.rules:
            axes.axvline(x, linestyle="--", linewidth=1, **style)
