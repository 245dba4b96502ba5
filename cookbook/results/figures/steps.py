"""Step time over time, a strip for each cell, with stalls and restarts marked."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cookbook.results.figures import theme
from cookbook.results.figures.canvas import Canvas, Size, thin
from cookbook.results.figures.series import Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STRIP, _NAME, _GAP, _BOTTOM = 74.0, 18.0, 12.0, 42.0
_MOST_POINTS = 3200
# A strip reaches up to this many times the median step; what is longer is marked at its edge.
_REACH = 2.6


def draw_steps(cells: Sequence[Series], size: Size) -> Canvas | None:
    """One strip above the other on the same steps, for every repeat; None where no times are."""
    runs = [run for cell in cells for run in cell.repeats or (cell,)]
    cells = [run for run in runs if run.times]
    if not cells:
        return None
    each = _NAME + _STRIP + _GAP
    canvas = Canvas(size, 14 + each * len(cells) + _BOTTOM - _GAP)
    canvas.text(0, 12, "seconds a step", fontsize=size.small, color=theme.QUIET.light)
    last = max(cell.times[-1].step for cell in cells)
    left = 46.0
    for number, cell in enumerate(cells):
        top = 14 + each * number
        median = statistics.median(time.seconds for time in cell.times)
        axes = canvas.axes(left, top + _NAME, size.width - left - 16, _STRIP)
        axes.set(xlim=(0 if last > 40 else 0.5, last * 1.01), ylim=(0, _REACH * median))
        _draw_strip(axes, cell, size, median, _MOST_POINTS // len(cells))
        canvas.text(left, top + _NAME - 4, cell.label, color=cell.colour, weight="bold")
        canvas.text(
            size.width - 16,
            top + _NAME - 4,
            _said(cell, median),
            fontsize=size.small,
            color=theme.QUIET.light,
            horizontalalignment="right",
        )
        if number < len(cells) - 1:
            axes.set_xticklabels([])
        else:
            axes.set_xlabel("step", fontsize=size.small, color=theme.QUIET.light)
            axes.xaxis.set_major_formatter("{x:,.0f}")
    return canvas


def _draw_strip(axes: Axes, cell: Series, size: Size, median: float, most: int) -> None:
    axes.locator_params(axis="x", nbins=4 if size.is_narrow else 8, integer=True)
    axes.locator_params(axis="y", nbins=3)
    top = _REACH * median
    steps = [time.step for time in cell.times]
    seconds = [min(time.seconds, 1.5 * top) for time in cell.times]
    axes.plot(*thin(steps, seconds, most), color=cell.colour, linewidth=0.9)
    stalls = [time for time in cell.times if time.is_stall]
    if stalls:
        axes.plot(
            [time.step for time in stalls],
            [min(time.seconds, 0.97 * top) for time in stalls],
            linestyle="none",
            marker="v",
            markersize=5,
            color=theme.ALARM.light,
            markeredgewidth=0,
            clip_on=False,
        )
    for step in cell.restarts:
        axes.axvline(step, color=theme.INK.light, linewidth=1, linestyle=(0, (3, 2)))
        near_end = step > 0.75 * axes.get_xlim()[1]
        axes.annotate(
            "restart",
            (step, 1),
            xycoords=("data", "axes fraction"),
            xytext=(-3 if near_end else 3, -1),
            textcoords="offset points",
            horizontalalignment="right" if near_end else "left",
            verticalalignment="top",
            fontsize=size.small,
            color=theme.INK.light,
        )


def _said(cell: Series, median: float) -> str:
    said = [f"median {median:.3g} s"]
    num = sum(time.is_stall for time in cell.times)
    if num:
        said.append(f"{num} stall{'s' if num > 1 else ''}")
    if cell.restarts:
        said.append(f"{len(cell.restarts)} restart{'s' if len(cell.restarts) > 1 else ''}")
    return ", ".join(said)
