"""Peak memory by cell, within what the GPU has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cookbook.results.figures import theme
from cookbook.results.figures.canvas import Canvas, Size
from cookbook.results.figures.series import Series

_BAR, _NAME, _GAP, _BOTTOM = 14.0, 18.0, 12.0, 44.0


def draw_memory(cells: Sequence[Series], size: Size) -> Canvas | None:
    """Bars from 0, the GPU's memory outlined; None where no cell logged its memory."""
    cells = [cell for cell in cells if cell.memory_gib]
    if not cells:
        return None
    most = max(max(cell.memory_gib or 0.0, cell.capacity_gib or 0.0) for cell in cells)
    each = _NAME + _BAR + _GAP
    canvas = Canvas(size, 8 + each * len(cells) + _BOTTOM)
    axes = canvas.axes(4, 8, size.width - 20.0, each * len(cells))
    axes.set(xlim=(0, most * 1.01), ylim=(each * len(cells), 0), yticks=[])
    axes.grid(axis="x", color=theme.GRID.light, linewidth=0.8)
    axes.locator_params(axis="x", nbins=4 if size.is_narrow else 7)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.get_xticklabels()[0].set_horizontalalignment("left")
    axes.set_xlabel("GiB per GPU, peak", fontsize=size.small, color=theme.QUIET.light)
    ground = {"facecolor": theme.GROUND.light, "edgecolor": "none", "pad": 1.0}
    for number, cell in enumerate(cells):
        top = number * each
        middle = top + _NAME + _BAR / 2
        axes.barh(middle, cell.memory_gib or 0.0, _BAR, color=cell.colour)
        said = f"{cell.memory_gib:.4g} GiB"
        if cell.capacity_gib:
            outline: dict[str, Any] = {
                "facecolor": "none",
                "edgecolor": theme.QUIET.light,
                "linewidth": 1.0,
            }
            axes.barh(middle, cell.capacity_gib, _BAR - 1, **outline)
            said += f" of {cell.capacity_gib:.4g}"
        axes.text(
            0,
            top + _NAME - 2,
            cell.label,
            color=cell.colour,
            fontsize=size.text,
            weight="bold",
            verticalalignment="bottom",
            bbox=ground,
        )
        axes.text(
            axes.get_xlim()[1],
            top + _NAME - 2,
            said,
            color=theme.INK.light,
            fontsize=size.text,
            horizontalalignment="right",
            verticalalignment="bottom",
            bbox=ground,
        )
    return canvas
