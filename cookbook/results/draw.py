"""A chart drawn by Matplotlib, for files and documents: one drawing, in light colours."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from cookbook.results.charts import COLOURS, Chart

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _QUIET, _GRID, _BAND = "#1b2026", "#5d6670", "#e3e6e9", "#edf0f2"


def draw_chart(chart: Chart) -> dict[str, bytes]:
    """Return the picture as `svg` and as `png`.

    Raises:
        ModuleNotFoundError: Matplotlib is not installed.
    """
    import matplotlib
    from matplotlib.figure import Figure

    # A `$` in a cell's name begins no formula.
    style: Any = {"text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": chart.name}
    with matplotlib.rc_context(style):
        height = 1.0 + 0.6 * len(chart.bars) if chart.bars else 3.6
        figure = Figure(figsize=(7.6, height), layout="constrained")
        axes = figure.add_subplot()
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(colors=_QUIET, length=0)
        axes.grid(color=_GRID, axis="x" if chart.bars else "y")
        axes.set_axisbelow(True)
        axes.xaxis.set_major_formatter("{x:,g}")
        if chart.bars:
            _draw_bars(axes, chart)
        else:
            _draw_lines(axes, chart)
            place: Any = {"loc": "outside upper left", "ncols": 3, "frameon": False}
            figure.legend(labelcolor="linecolor", fontsize=9, **place)
        files = {"svg": io.BytesIO(), "png": io.BytesIO()}
        # Without a date the same numbers make the same file.
        figure.savefig(files["svg"], format="svg", metadata={"Date": None})
        figure.savefig(files["png"], format="png", dpi=144)
    return {suffix: file.getvalue() for suffix, file in files.items()}


def _draw_bars(axes: Axes, chart: Chart) -> None:
    axes.set(xlim=(0, chart.high), ylim=(len(chart.bars) - 0.4, -0.7), yticks=[])
    axes.set_xlabel(chart.unit, color=_QUIET)
    for row, bar in enumerate(chart.bars):
        colour = COLOURS[bar.colour][0]
        axes.text(0, row - 0.32, bar.label, color=colour, weight="bold")
        axes.text(chart.high, row - 0.32, bar.text, color=_INK, horizontalalignment="right")
        axes.barh(row, bar.value or 0.0, 0.42, color=colour)
        if bar.value and bar.low and bar.high:
            errors = [[max(bar.value - bar.low, 0.0)], [max(bar.high - bar.value, 0.0)]]
            axes.errorbar(bar.value, row, xerr=errors, ecolor=_INK, capsize=3)
        if bar.base:
            axes.plot([bar.base] * 2, [row - 0.3, row + 0.3], color=_INK, linestyle=":")
        if bar.published:
            axes.barh(row + 0.3, bar.published, 0.1, color=colour, alpha=0.5)


def _draw_lines(axes: Axes, chart: Chart) -> None:
    axes.set_ylim(chart.low, chart.high)
    axes.set_ylabel(chart.unit, color=_QUIET)
    axes.set_xlabel("step", color=_QUIET)
    axes.margins(x=0)
    if chart.band:
        axes.axhspan(-chart.band, chart.band, color=_BAND, zorder=0)
        axes.axhline(0, color=_QUIET, linewidth=1)
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
