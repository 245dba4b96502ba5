"""The one style of figures in files: drawn by Matplotlib in light colours with quiet axes."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, QUIET, GRID, BAND = "#1b2026", "#5d6670", "#e3e6e9", "#edf0f2"


def draw_figure(
    name: str,
    height: float,
    paint: Callable[[Axes], None],
    grid: Literal["x", "y"] = "y",
    legend: str = "",
) -> dict[str, bytes]:
    """Return the picture that `paint` draws as `svg` and as `png`; a name makes the same bytes.

    Args:
        height: inches, of 7.6 in width.
        grid: the axis whose ticks have lines.
        legend: colour of a legend's labels, or `linecolor`; empty for no legend.

    Raises:
        ModuleNotFoundError: Matplotlib is not installed.
    """
    import matplotlib
    from matplotlib.figure import Figure

    # A `$` in a cell's name begins no formula.
    style: Any = {"text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": name}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(7.6, height), layout="constrained")
        axes = figure.add_subplot()
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(colors=QUIET, length=0)
        axes.grid(color=GRID, axis=grid)
        axes.set_axisbelow(True)
        axes.xaxis.set_major_formatter("{x:,g}")
        paint(axes)
        if legend:
            place: Any = {"loc": "outside upper left", "ncols": 2, "frameon": False}
            figure.legend(fontsize=9, labelcolor=legend, **place)
        files = {"svg": io.BytesIO(), "png": io.BytesIO()}
        # Without a date the same numbers make the same file.
        figure.savefig(files["svg"], format="svg", metadata={"Date": None})
        figure.savefig(files["png"], format="png", dpi=144)
    return {suffix: file.getvalue() for suffix, file in files.items()}
