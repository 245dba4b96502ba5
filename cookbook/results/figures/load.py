"""The router's load: how far each layer's busiest expert is above the mean, and who gets what.

For each cell a strip over the steps, and beside it (on a phone below it) a map of its experts: a
row for each layer, its experts from the busiest to the least, as they were counted last.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cookbook.results.figures import theme
from cookbook.results.figures.canvas import Canvas, Size, thin
from cookbook.results.figures.series import Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STRIP, _NAME, _GAP, _BOTTOM, _LEFT = 104.0, 18.0, 14.0, 40.0, 46.0
_MOST_POINTS = 2400
# An expert with so many times the mean, or more, has the full colour. Few shades make small files.
_FULL, _SHADES = 3.0, 24


def draw_load(cells: Sequence[Series], size: Size) -> Canvas | None:
    """One strip above the other on the same steps; None where no cell logged its load."""
    cells = [cell for cell in cells if cell.load]
    if not cells:
        return None
    parts = 2 if size.is_narrow else 1
    each = _NAME + parts * (_STRIP + _BOTTOM) + _GAP
    canvas = Canvas(size, each * len(cells))
    last = max(cell.load[-1].step for cell in cells)
    high = max(max(step.busiest_over_mean) for cell in cells for step in cell.load)
    inner = size.width - _LEFT - 16
    for number, cell in enumerate(cells):
        top = each * number
        canvas.text(_LEFT, top + 13, cell.label, color=cell.colour, weight="bold")
        canvas.text(
            size.width - 16,
            top + 13,
            _said(cell),
            fontsize=size.small,
            color=theme.QUIET.light,
            horizontalalignment="right",
        )
        width = inner if size.is_narrow else inner * 0.55
        axes = canvas.axes(_LEFT, top + _NAME, width, _STRIP)
        axes.set(xlim=(0 if last > 40 else 0.5, last * 1.01))
        _draw_strip(axes, cell, size, high, _MOST_POINTS // len(cells))
        if size.is_narrow:
            box = (_LEFT, top + _NAME + _STRIP + _BOTTOM, inner, _STRIP)
        else:
            box = (_LEFT + width + _LEFT, top + _NAME, inner - width - _LEFT, _STRIP)
        _draw_map(canvas.axes(*box), cell, size)
    return canvas


def _draw_strip(axes: Axes, cell: Series, size: Size, high: float, most: int) -> None:
    # Early in a training one expert may have ten times the mean: equal factors are equally high.
    axes.set_yscale("log", base=2)
    axes.set_ylim(0.94, max(high, 2.0) * 1.06)
    axes.yaxis.set_major_formatter("{x:g}x")
    axes.minorticks_off()
    axes.locator_params(axis="x", nbins=4 if size.is_narrow else 6, integer=True)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("step", fontsize=size.small, color=theme.QUIET.light, labelpad=2)
    steps = [step.step for step in cell.load]
    for values, width, alpha in (
        ([max(step.busiest_over_mean) for step in cell.load], 0.9, 0.45),
        ([statistics.median(step.busiest_over_mean) for step in cell.load], 1.6, 1.0),
        ([min(step.busiest_over_mean) for step in cell.load], 0.9, 0.45),
    ):
        marker = "o" if len(steps) == 1 else None
        axes.plot(
            *thin(steps, values, most // 3),
            color=cell.colour,
            linewidth=width,
            alpha=alpha,
            marker=marker,
            markersize=3,
        )


def _draw_map(axes: Axes, cell: Series, size: Size) -> None:
    """The map as an image of one colour, more or less opaque: it fits a light and a dark ground."""
    import numpy as np
    from matplotlib.colors import to_rgb

    found = next((step for step in reversed(cell.load) if step.counts is not None), None)
    if found is None or found.counts is None:
        axes.set_axis_off()
        return
    counts = -np.sort(-np.array(found.counts, dtype=float), axis=1)
    share = counts / np.maximum(counts.mean(axis=1, keepdims=True), 1e-9)
    shade = np.round(np.minimum(share / _FULL, 1) * _SHADES) / _SHADES
    image = np.empty((*shade.shape, 4))
    image[..., :3] = to_rgb(theme.MAP)
    image[..., 3] = shade
    axes.imshow(image, aspect="auto", interpolation="nearest", origin="upper")
    axes.grid(visible=False)
    layers = found.layers
    shown = sorted({0, len(layers) // 2, len(layers) - 1})
    axes.set_yticks(shown, [f"{layers[row]}" if row else f"layer {layers[0]}" for row in shown])
    columns = shade.shape[1]
    axes.set_xticks([-0.5, columns - 0.5], ["busiest", "least"])
    first, last = axes.get_xticklabels()
    first.set_horizontalalignment("left")
    last.set_horizontalalignment("right")
    steps = f"steps {found.counts_from:,} to {found.step:,}"
    if found.counts_from == found.step:
        steps = f"step {found.step:,}"
    axes.set_xlabel(
        f"{columns} experts of each layer, {steps}",
        fontsize=size.small,
        color=theme.QUIET.light,
        labelpad=2,
    )


def _said(cell: Series) -> str:
    if cell.load[-1].is_forced:
        return "balance is forced"
    last = cell.load[-1]
    most = max(last.busiest_over_mean)
    layer = last.layers[last.busiest_over_mean.index(most)]
    return f"at last {most:.3g}x, in layer {layer}"
